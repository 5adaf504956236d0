// Package rdma is the RDMA transport, wire-compatible with the default (GDR) build of
// StepMesh's.
//
// A connection to a peer is directed: it consists of STEPAF_QP_NUM queue pairs that
// the sender has opened. Where a message is put in the receiver's memory is agreed on
// once for each kind of message (package rendezvous); then the value is written there,
// or straight into the pull tensor, and the meta behind it with a notification.
//
// Native nodes recognise each other by their private data when they
// connect, and then add a trailer to each meta: it gives slots back to their sender
// and describes payloads that StepMesh's form has no room for.
//
// Completions are polled in C, on a locked thread that sleeps when nothing has come
// for a while, or by who waits for an answer.
package rdma
