// Package sim runs a whole cluster in one process, on virtual time, from one seed: the
// nodes are those that programs run (postoffice, kv, af, fserver/core), the network and the
// clock are simulated. It is for tests, which call Run from a goroutine without a bubble
// of testing/synctest.
//
// # The network
//
// A Net simulates ZeroMQ over TCP as van/zmq uses it. Each node listens at an address and dials
// every peer. Its messages to a peer, data and control, leave in order over the
// connection that it dialled. A server's answers leave over the connection that the worker
// dialled, found by the worker's routing id. Connections are made again for as long as
// the node wants them. Messages for a connection that is not up are queued. Messages in
// flight when a connection breaks are lost. The connections of a killed process close, after
// its earlier messages; those of a stopped process, or of one whose child keeps the sockets,
// do not. Over a cut link no message arrives, and no end is notified before Transport.Silence;
// with Transport.Backoff a connection goes on later than its link, or breaks then.
//
// # One seed
//
// Every decision is a hash of the seed, of its subject (a connection of two
// processes, numbered) and of its number there. So the order in which goroutines run
// does not matter. All events have times of their own: virtual time advances only when
// all consequences of the event before are done. Messages that several goroutines of a node
// send at one time leave in an order that is not theirs (conn.inOrder).
package sim
