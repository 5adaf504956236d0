// Package conn is what the connections of the RDMA transport are made of: queue pairs and
// the steps that connect them, queues of work requests with what these use until they have
// completed, registered memory, and the queues of what is due. It knows no messages.
package conn
