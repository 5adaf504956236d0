// Package inproc is a van whose nodes live in one process: for tests, for
// simulated clusters, and for programs that run several roles at once.
//
// Nodes that are to meet share a Network, which has its own addresses; nothing of
// it is visible outside. A value is copied once, when it is sent, into a buffer
// that is used again later, so the sender's memory is free when Send returns. A
// node costs two goroutines, a connection none.
//
// A Network can also lose nodes and connections on request: see Network.Kill and
// Network.Partition.
package inproc
