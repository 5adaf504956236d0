// Package replay tests nodes of this library against recorded sessions of the C++
// original (van/testdata/sessions), with real ZeroMQ sockets over loopback.
//
// For each session and each of its nodes, our node plays that one, with the
// environment of the session, and a scripted peer plays all others from the
// recording: it binds their ports, opens their sockets with the recorded
// routing ids, and sends the same messages, byte for byte, at the moment at which the
// recorded node received them. Our node must send the recorded frames, on
// the recorded kind of socket, in the recorded order on each connection.
//
// The script changes only what cannot be the same in another run: ports in node
// records, and the address that an answer repeats from our request. Payloads that
// the recording cut are completed from their beginning. The permitted differences of our
// node are in compare_test.go, with reasons: the tables dontCare and repairs
// for content, late for time. Messages of a node to itself stay inside ours, so that they are not
// compared; where the recorded scheduler asked itself for a barrier ours must do
// so at the same place, because it takes a number of its control counter.
//
// Sessions over RDMA (testdata/rdma_*.jsonl) are played in the same way on a network in
// memory (tests/fakeverbs), where our node has the recorded address and port. Each
// other node is a cppNode, the original's RDMA transport by hand; it sends the recorded
// messages, and makes its own rendezvous. Then every work request that our node has
// posted is compared with the recorded one's, connection by connection: kinds,
// operations, lengths, order, lists, queue pairs, bytes. The permitted differences are in
// rdma_compare_test.go: the tables rdmaMasks and rdmaIntended.
//
// Heartbeats run ten times as fast. Where they mix with other control messages
// their number and the counter depend on time: a session with heartbeats is
// compared without timestamps, which must still be a counter, and additional
// heartbeats are allowed. Acknowledgements (PS_RESEND) are compared as a set, since
// their order among other messages depends on time, too.
package replay
