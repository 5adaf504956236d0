// Package conn has the parts of an RDMA connection: queue pairs and the steps that connect them, queues of work requests with the memory
// that these use until completion, registered memory, and due queues for housekeeping. It knows nothing of messages.
package conn
