// Package resend is PS_RESEND: a van around a van that keeps each message until
// the receiver has acknowledged it, sends it again when that takes too long, and
// drops what arrives twice. The bytes on the wire are those of ps-lite's resender.
//
// An acknowledgement names a message by a signature of 64 bits:
//
//	(app & 0xffff)<<48 | (sender & 0xff)<<40 | (receiver & 0xff)<<32 | int64(timestamp<<1 | request)
//
// It says less than it should: ids are cut to 8 bits, so that instance ranks from
// 124 up look like others, and neither customer, command nor push and pull are in
// it, so that two different messages may have the same one. ps-lite drops the
// second of them. This package does not: it looks at those fields too when it
// compares what it has received, and does not send a message while one with the
// same signature to the same peer waits for its acknowledgement. A ps-lite peer
// still drops such a message when both come.
//
// Other differences from ps-lite, none visible on the wire: after the last try a
// message fails (Options.OnFail) instead of ending the process; nothing is sent
// again to a peer that is lost or disconnected; what came before Enable is
// recognised when it is sent again, as a peer that has started earlier does; and
// what is remembered of received messages is bounded: the last 65,536 timestamps
// of each peer, application, customer and kind of message. Anything older counts
// as received before. That needs timestamps that grow, which they do: a node
// counts its requests, and its control messages.
//
// When inner places values straight into registered memory, a value that comes a
// second time is written there a second time before this package can see it.
package resend
