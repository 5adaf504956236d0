// Package rdma is the RDMA transport, wire-compatible with the default (GDR) build of
// StepMesh, the C++ library.
//
// A connection to a peer is directed: it consists of STEPAF_QP_NUM queue pairs that the
// sender has opened (a link), and is an inbound connection at the receiver. Where a message
// is put in the receiver's memory, its receive slot, is agreed on once for each kind of
// message (package rendezvous); then the value is written there, or straight into the pull
// tensor, and the meta behind it with a notification.
//
// Nodes of this library recognise each other by their private data when they connect. They
// speak the native dialect: a trailer behind each meta returns credits for slots, and
// describes payloads that StepMesh's form has no room for. With nodes of the C++ library a
// node speaks StepMesh's dialect. See dialect.go.
//
// Completions are polled in C, on a locked thread that sleeps when nothing has come for a
// while, or by a goroutine that waits for an answer.
//
// From below to above: package conn (queue pairs, registered memory, due queues); wire.go and
// message.go (what is sent), proof.go (proofs of the secret); device.go and node.go (what connections share); inbound.go with
// slots.go, budget.go, reclaim.go and slotmemory.go (receiving side); peer.go with sent.go,
// put.go, send.go, pull.go, notify.go and dial.go (sending side); native.go and stepmesh.go
// (the dialects); receive.go and loop.go (completions); prove.go (who is refused), accept.go, peers.go, beating.go
// (who answers for a busy process; package liveness) and van.go.
package rdma
