// Package resend implements PS_RESEND. It wraps a van, keeps each sent message until
// the receiver has acknowledged it, sends it again after a timeout, and drops
// duplicates. Messages and acknowledgements are encoded as ps-lite's resender does.
//
// An acknowledgement names a message by a signature of 64 bits:
//
//	(app & 0xffff)<<48 | (sender & 0xff)<<40 | (receiver & 0xff)<<32 | int64(timestamp<<1 | request)
//
// A signature is not unique. Ids are cut to 8 bits, so instance ranks from 124
// up collide with others. Customer, command, push and pull are not in it, so
// two different messages may have the same signature. ps-lite drops the second of
// them. This package also compares those fields of received messages,
// and does not send a message while one with the same signature to the same peer
// waits for its acknowledgement. A ps-lite peer still drops the second if it
// receives both.
//
// Two extensions on the wire:
//   - Between nodes of this library an acknowledgement also has the incarnations of the
//     acknowledged message, in a field that C++ nodes ignore.
//   - After a message to a peer has timed out, the peer gets probes until it sends a message:
//     heartbeats without records, which C++ nodes only acknowledge.
//
// Other differences from ps-lite:
//   - After the last try a message fails (Options.OnFail); the process does not end.
//   - No message is resent to a peer that is lost or disconnected.
//   - Messages received before Enable are recognised when a peer that was enabled earlier
//     resends them.
//   - A receiver remembers the last 65,536 timestamps of each peer, application, customer and
//     kind of message. If a connected peer uses half of them in less time than that in which a
//     message may be sent again, the number doubles, up to 8,388,608. Older requests and control
//     messages count as received: a node numbers them in the order in which it sends them. An
//     older answer is delivered, since requests may be answered in any order; the application
//     drops answers that it does not wait for.
//
// A C++ node over RDMA writes values directly into registered memory. It also writes a
// duplicate there, before this package can drop it.
package resend
