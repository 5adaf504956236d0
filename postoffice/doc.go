// Package postoffice makes a process a node of a cluster: joining, ids and groups, barriers, the loss of peers, leaving.
//
// A program starts a Node, makes workers or servers of package af or kv on it, and ends with Shutdown:
//
//	cfg, err := postoffice.LoadConfig() // DMLC_ROLE, DMLC_PS_ROOT_URI and the other variables
//	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg})
//	switch node.Role() {
//	case postoffice.Worker:
//		worker, err := af.NewWorker(node, af.WorkerOptions{})
//	case postoffice.Server:
//		server, err := af.NewServer(node, af.ServerOptions{})
//	}
//	err = node.Shutdown(ctx) // waits for all nodes, then leaves
//
// A process may hold any number of nodes. Package clustertest runs a whole cluster in one Go test.
//
// # Roles, ids and groups
//
// A cluster has one scheduler, and any number of workers and servers. A NodeID names one node; a Group names all nodes of some
// roles, and groups are added: ServerGroup + WorkerGroup. Workers and servers have ranks from 0, by which programs address
// them. With DMLC_GROUP_SIZE above 1, several instances form one group of a rank, see Topology.
//
// # Close and Shutdown
//
// A value that must be ended has the method Close, and some have Shutdown, too. No other method ends anything.
//
//   - Close() error ends the value at once: its calls in flight fail with ErrClosed. Close does not wait for the answers of
//     other nodes. Its comment states what else it waits for, and the limit. Close may be called more than once, and after
//     Shutdown.
//   - Shutdown(ctx) error ends the value in order, until ctx ends: Node.Shutdown waits for all nodes of the cluster,
//     af.Server.Shutdown and kv.Server.Shutdown for the answers to requests, collective.Comm.Shutdown for ranks that read its memory,
//     session.Session.Shutdown for the session's calls. A node, communicator or session is closed afterwards; a server
//     refuses requests until Close, or until its node has left.
//
// The end of a node ends everything that was made on it.
//
// # Errors
//
// Errors wrap one of the sentinels of this package, which errors.Is finds, and are of type *Error, which names the failed
// node, its operation, the peer, the elapsed time, and a remedy.
package postoffice
