// Package postoffice makes a process a node of a cluster: joining, ids and groups,
// barriers, liveness, leaving, and requests in flight. The rules of membership are in
// package membership, a state machine without sockets and clocks. This package runs
// it over a transport, routes messages to applications, and fails requests to lost
// peers.
//
// A program starts a Node, makes workers or servers of package kv or af on it,
// and ends with Finalize. A process may hold any number of nodes.
package postoffice
