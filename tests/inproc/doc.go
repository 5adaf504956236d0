// Package inproc is a van between nodes of one process: for tests, simulated
// clusters and examples.
//
// Nodes that communicate share a Network, which has its own addresses; none of it
// is visible outside the process. A value is copied once, when it is sent, into a
// pooled buffer, so the sender's memory is free when Send returns. A node costs two
// goroutines, a connection none.
//
// Null is a second van, which passes messages without a copy, for measurements of the layers above a transport.
//
// Network.Kill and Network.Partition simulate crashes and lost connections.
package inproc
