// Package postoffice makes a process a node of a cluster: joining, ids and groups, barriers, the loss of peers, leaving.
//
// A program starts a Node, makes workers or servers of package af or kv on it, and ends with Finalize:
//
//	cfg, err := postoffice.LoadConfig() // DMLC_ROLE, DMLC_PS_ROOT_URI and the other variables
//	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg})
//	switch node.Role() {
//	case postoffice.Worker:
//		worker, err := af.NewWorker(node, af.WorkerOptions{})
//	case postoffice.Server:
//		server, err := af.NewServer(node, af.ServerOptions{})
//	}
//	err = node.Finalize(ctx) // waits for all nodes, then leaves
//
// A process may hold any number of nodes. Package clustertest runs a whole cluster in one Go test.
//
// # Roles, ids and groups
//
// A cluster has one scheduler, and any number of workers and servers. A NodeID names one node; a Group names all nodes of some
// roles, and groups are added: ServerGroup + WorkerGroup. Workers and servers have ranks from 0, by which programs address
// them. With DMLC_GROUP_SIZE above 1, several instances form one group of a rank, see Topology.
//
// # Errors
//
// Errors wrap one of the sentinels of this package, which errors.Is finds, and are of type *Error, which names the failed
// node, its operation, the peer, the elapsed time, and a remedy.
package postoffice
