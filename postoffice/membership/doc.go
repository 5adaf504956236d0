// Package membership is a node's life in a ps-lite cluster as a pure state
// machine: how it gets an id, whom it connects to, barriers, heartbeats, dead
// and replaced nodes, and the way out. It has no socket, goroutine, clock or log.
// Messages (Step), the passing of time (Tick), what a transport noticed
// (PeerLost, PeerBack) and calls of the application (Barrier, Finalize) go in;
// one ordered list of actions and events comes out of Take.
//
// The caller does each Action, in order, and delivers a Send to the node's own
// id by calling Step with it: the machine asks for no connection to itself.
// Times are monotonic durations since any fixed moment, the same in all calls.
// A Machine is not safe for concurrent use.
//
// # Compatibility
//
// Messages, their order and their timestamps are those of StepMesh's van.cc and
// postoffice.cc, so that C++ nodes and ours can be mixed. The differences are
// deliberate and concern only what the original answers with an abort, a hang or
// silence:
//
//   - The scheduler refuses a node that cannot fit (rank taken or out of range, no
//     place left, host not in BYTEPS_ORDERED_HOSTS) when it registers, tells it
//     why, and goes on waiting for one that fits.
//   - An instance barrier counts a sender once, so that a resent request cannot
//     release it early. Group barriers count as the original does, which with a
//     group size above 1 means after n/G of n requests.
//   - A barrier that can no longer be complete, because a missing member is dead,
//     fails on everybody who waits.
//   - A lost connection counts as death, not only missing heartbeats; recovery
//     works any number of times, and a replacement with a preferred rank gets
//     that rank.
//   - A node keeps the scheduler address that it was configured with, because that
//     one works, and not the one that the scheduler advertises.
//   - The control counter leaves out 32767, the protocol's "not set".
//
// # Notices
//
// What the protocol has no message for, the scheduler tells by a notice: a
// HEARTBEAT without node records, which a C++ node ignores, with a body "stepaf/1
// <verb> <text>". See notice for the verbs. To a node without an id it opens a
// connection under a negative, temporary id, and renames it later.
package membership
