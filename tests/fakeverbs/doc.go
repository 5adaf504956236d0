// Package fakeverbs is an RDMA network inside one process. It implements package verbs in plain Go, for tests, and needs neither a device nor C.
//
// A Net has hosts, which are addresses with one device each, and Stacks, which are the processes on the hosts. All hosts can reach each other.
// A write to a peer is copied to its address after the checks that a NIC makes, so that a missing registration or a wrong key is found. Between a
// write and a reader that has polled its completion there is a happens-before edge: the race detector finds a reader that has not waited.
// Config.CheckSource finds a sender that has not.
//
// Every operation is carried out immediately, in the calling goroutine, and in the same order in each run, unless a test asks for something else:
// delays (Config), failures (Net.Fail, Net.FailWR, Net.RejectNext), lost peers and links (Net.Kill, Net.Cut, Net.RemoveDevice), or postponed
// deliveries (Net.Hold, Net.HoldQP). Waiting uses timers and condition variables only, so that a Net also works in the bubble of
// testing/synctest. The package starts no goroutine.
//
// Differences from hardware:
//   - A message is delivered completely or not at all.
//   - A message is in the peer's memory when Post returns, unless it is held, delayed or without a receive request.
//   - Numbers of queue pairs and keys are never reused.
package fakeverbs
