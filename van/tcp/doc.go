// Package tcp carries data messages between nodes of this library over TCP connections of its own. It is a van wrapped
// around the main one (zmq), which keeps control messages and the data of C++ nodes.
//
// # Connections
//
// A connection has one direction. The sender dials the data port in the receiver's node record
// (van.NodeExtension.DataPort) when it first sends data to that peer. Send waits until the connection is made or has failed, for at
// most dialTime (tlsTime with TLS). If the first attempt has failed, for example because the peer was stopped, the peer's data goes over
// the van inside until a later attempt succeeds (van/links). The log has the reason, and the change.
// Nodes with different STEPAF_TLS send each other no data.
//
// Both ends introduce themselves before anything else (handshake.go). If the cluster has a secret, both prove that they know it.
// With STEPAF_TLS=1, the TLS handshake comes first, and everything after it is encrypted (tls.go).
//
// # Messages
//
// A message is a head with lengths, then its meta, keys, lengths and values (frame.go). The sender encodes all but long
// values into one buffer, and writes the buffer and the long values with one system call. A batch is one such message: its meta
// has the directory, and its values follow one another. Bytes that the socket does not accept wait in a queue; the engine's
// loop, or a goroutine that polls, writes them when the socket is writable again.
//
// The receiver reads into a buffer of 64 KiB. The values of messages longer than half of it are read straight into the memory that the pull
// request has named, into the buffer registered for the push, or into memory of this package that is used again. New memory of that
// kind grows with the bytes that arrive.
//
// # Order and replaced processes
//
// A receiver takes a connection's messages while its node record for the sender's id names the same process
// (incarnation). A connection of a process that it does not know yet waits unread, for holdTime at most. When Connect names
// another process for an id, connections of the former process end, and nothing more of them is delivered.
//
// # Bounds
//
// A peer whose messages wait for a slow handler is not read. STEPAF_SEND_BUDGET bounds the bytes that wait to be sent to one
// peer. Handshakes are bounded in number and time (accept.go).
//
// # Files
//
// frame and handshake know the bytes; out is the sender's end of a connection, in and inbound the receiver's; source is the
// engine's source; peers and van/links decide which connections there are; dial and accept make them; tls encrypts their bytes; silence ends connections whose
// peer acknowledges nothing; van combines all parts.
package tcp
