// Package kv is the key-value API: workers push values under sorted keys to the
// servers that own them, and pull them back.
//
// A Worker cuts a request by the servers' key ranges and sends each server its
// part. A Server hands every part to a Handler, which answers it; SummingHandler
// is one that adds up what is pushed. A SimpleApp exchanges small messages, a
// number and some bytes, between any nodes.
//
// The semantics are those that ps-lite documents for KVWorker, KVServer and
// SimpleApp, with errors where StepMesh aborts, hangs or loses values. The last
// server also owns the largest keys, which the original's ranges leave to nobody.
//
// # Memory
//
// Push and Pull copy keys and pushed values. With NoCopy they use the caller's slices
// until the request is done: until Wait has returned or the function of Done runs.
// A Handler receives views on receive memory. Such views need not be
// aligned for their type, which Go allows for types without pointers on the
// processors that this module supports (amd64, arm64; both little endian, as the
// wire is).
package kv
