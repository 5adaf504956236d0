// Package rdma is the RDMA transport, wire-compatible with the default (GDR) build of StepMesh, the C++ library.
//
// A connection has one direction. The sender opens STEPAF_QP_NUM queue pairs, which it sees as a link and the receiver as an inbound
// connection. For each kind of message, sender and receiver agree once on a receive slot: the place of the message in the receiver's
// memory (package rendezvous). For each message, the sender then writes the value to the slot, or straight into the pull tensor, and
// after it the meta with a notification.
//
// Nodes of this library recognize each other by the private data of the connect request. They use the native dialect: a trailer behind
// each meta returns credits for slots and describes payloads that StepMesh's format cannot describe. With nodes of the C++ library, a
// node uses StepMesh's dialect. See dialect.go.
//
// Completions are polled in C, on a locked thread that sleeps after a while without completions, or by a goroutine that waits for an
// answer.
//
// The files, from the lowest layer up:
//
//	package conn                                          queue pairs, registered memory, due queues
//	wire.go, message.go, proof.go                         formats, outgoing messages, proofs of the secret
//	device.go, node.go                                    what connections share
//	inbound.go, slots.go, budget.go, reclaim.go, slotmemory.go     receiving side
//	peer.go, sent.go, put.go, send.go, pull.go, notify.go, dial.go, dialing.go     sending side
//	native.go, batch.go, stepmesh.go                      the dialects
//	receive.go, source.go                                 completions, the engine's source
//	prove.go, accept.go, peers.go, liveness.go, van.go    admission, tables, probes of busy processes (package liveness), the van
package rdma
