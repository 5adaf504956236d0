// Package sim runs a whole cluster in one process, on virtual time, from one seed: the
// nodes are those that programs run (postoffice, kv, af, fserver/core), the network and the
// clock are simulated. It is for tests, which call Run from a goroutine without a bubble
// of testing/synctest.
//
// # The network
//
// A Net is what ZeroMQ over TCP is to van/zmq: each node listens at an address and dials
// every peer; what it sends to a peer, data and control, leaves in order over the
// connection that it dialled, and a server's answers leave over the one that the worker
// dialled, found by the worker's routing id. Connections are made again for as long as
// the node wants them; what was given to one that does not stand waits for it. What was
// under way when one breaks is lost. A process that is killed says so to its peers,
// behind what it had sent; one that is stopped, or whose child keeps the sockets, says
// nothing. Over a cut link nothing comes, and nobody is told before Transport.Silence; with
// Transport.Backoff a connection goes on later than its link, or breaks then.
//
// # One seed
//
// Every decision is a hash of the seed, of what it is about (a connection of two
// processes, numbered) and of its number there. So it does not matter in which order
// goroutines get to run. All events have times of their own: virtual time stands still
// until everything that the one before has caused is done. What several goroutines of a node
// send at one time leaves in an order that is not theirs (conn.inOrder).
package sim
