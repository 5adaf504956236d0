// Package membership is the protocol of a ps-lite cluster as a pure state machine:
// how a node gets an id, to which nodes it connects, barriers, heartbeats, dead and
// replaced nodes, and leaving. It has no socket, goroutine, clock or log. Its inputs
// are messages (Step), time (Tick), what the transport notices (PeerLost, PeerBack, Answers)
// and calls of the application (Barrier, Finalize); its output is one ordered list of
// actions and events, which Take returns.
//
// The caller does what they say, in order, and delivers a Send to the node's own
// id by calling Step with it: the machine asks for no connection to itself.
// Times are monotonic durations since any fixed moment, the same in all calls.
// A Machine is not safe for concurrent use.
//
// # Compatibility
//
// Messages, their order and their timestamps are those of StepMesh's van.cc and
// postoffice.cc, so that C++ nodes and nodes of this library can be mixed. The
// differences are deliberate and concern only cases in which C++ StepMesh aborts, hangs
// or does nothing:
//
//   - The scheduler refuses a node that it cannot accept (rank taken or out of range,
//     all ranks taken, host not in BYTEPS_ORDERED_HOSTS) when it registers, tells it
//     why, and waits for another one.
//   - An instance barrier counts a sender once, so that a resent request cannot
//     release it early. Group barriers count as C++ StepMesh does, which with a group
//     size G above 1 means that n/G of n requests release one.
//   - A barrier that cannot be complete, because a missing member is dead, fails for
//     all nodes that wait for it.
//   - A lost connection counts as death, not only missing heartbeats; recovery
//     works any number of times, and a replacement with a preferred rank gets
//     that rank.
//   - A node keeps the scheduler address that it was configured with, which is known
//     to work, and ignores the one that the scheduler advertises.
//   - The control counter leaves out 32767, the protocol's "not set".
//
// # Notices
//
// What the protocol has no message for, the scheduler sends as a notice: a HEARTBEAT
// without node records, which a C++ node ignores, with a body "stepaf/1 <verb> <text>".
// See notice for the verbs. To reach a node without an id, the scheduler opens a
// connection under a negative, temporary id, and renames it when the node gets one.
package membership
