// Package cluster is what package postoffice shows to programs, and more that packages which build an application protocol
// on a node need, such as af and kv: Node, App, Customer, Request. It runs the membership machine (package
// postoffice/membership, without sockets and clocks) over a transport, routes messages to applications, and fails requests
// to lost peers.
//
// A *postoffice.Node is converted to a *cluster.Node, and a postoffice.Call to a cluster.Call.
package cluster
