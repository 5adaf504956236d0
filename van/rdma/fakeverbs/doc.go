// Package fakeverbs is an RDMA network inside one process: package verbs in plain
// Go, for tests of what is built on it. Nothing in it needs a device or C.
//
// A Net holds hosts, which are addresses with one device each, and Stacks, which are
// the processes that run there. Everything can reach everything. What is written to a
// peer is copied there by address, after the checks that a NIC makes, so that a
// forgotten registration or a wrong key is found. Between a write and the reader who
// has polled its completion there is a happens-before edge: the race detector finds a
// reader who has not waited. Config.CheckSource finds a sender who has not.
//
// Everything happens at once, in the goroutine that asks for it, and in the same
// order each time, unless a test wants it otherwise: delays (Config), failures (Net.Fail,
// Net.FailWR, Net.RejectNext), lost peers and links (Net.Kill, Net.Cut,
// Net.RemoveDevice), and deliveries held back (Net.Hold, Net.HoldQP). Waiting is done
// with timers and condition variables only, so that a Net also works in the bubble of
// testing/synctest. It has no goroutine of its own.
//
// Differences from hardware: a message is delivered whole or not at all; a message
// that is not held, delayed or without receive request is in the peer's memory when Post
// returns; queue pair numbers and keys are never used again.
package fakeverbs
