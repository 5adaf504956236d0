// Package postoffice is a node's life in a cluster: joining, ids and groups,
// barriers, liveness, leaving, and the requests it has in flight. The rules are in
// package membership, a machine without sockets or clocks; this package gives it
// both, routes messages to applications, and fails what a lost peer owes.
//
// A program starts a Node, makes workers or servers of package kv or af on it,
// and ends with Finalize. A process may hold any number of nodes.
package postoffice
