// Package resend implements PS_RESEND: it wraps a van, keeps each sent message until
// the receiver has acknowledged it, sends it again after a timeout, and drops
// duplicates. Messages and acknowledgements are encoded as ps-lite's resender does.
//
// An acknowledgement names a message by a signature of 64 bits:
//
//	(app & 0xffff)<<48 | (sender & 0xff)<<40 | (receiver & 0xff)<<32 | int64(timestamp<<1 | request)
//
// A signature is not unique: ids are cut to 8 bits, so that instance ranks from 124
// up collide with others, and customer, command, push and pull are not in it, so that
// two different messages may have the same signature. ps-lite drops the second of
// them. This package does not: it compares those fields of received messages too,
// and does not send a message while one with the same signature to the same peer
// waits for its acknowledgement. A ps-lite peer still drops the second if it
// receives both.
//
// Two things on the wire are not ps-lite's. Between nodes of this library an acknowledgement
// also has the incarnations of the message that came, in a field which C++ nodes pass over.
// And a peer that has let a message time out is sent heartbeats without records, of which
// C++ nodes make nothing but an acknowledgement, until something of it comes.
//
// Other differences from ps-lite: after the last try a message fails (Options.OnFail) instead
// of ending the process; nothing is resent to a peer that is lost or disconnected; messages
// received before Enable are recognised when a peer that was enabled earlier resends them; and
// the memory of received messages is bounded: the last 65,536 timestamps of each peer,
// application, customer and kind of message. Older timestamps count as received. This relies on
// timestamps that grow: a node numbers its requests, and its control messages.
//
// If the wrapped van writes values straight into registered memory, it also writes a
// duplicate there, before this package can drop it.
package resend
