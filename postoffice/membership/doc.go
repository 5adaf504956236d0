// Package membership is the protocol of a ps-lite cluster as a pure state machine: registration, node ids,
// connections, barriers, heartbeats, dead and replaced nodes, and shutdown. It has no socket, goroutine, clock or
// log. Its inputs are messages (Step), time (Tick), events of the transport (PeerLost, PeerBack, ProbeAnswered) and
// calls of the application (Barrier, Finalize). Its output is one ordered list of actions and events, which Take
// returns.
//
// The caller performs the actions in order. A Send to the node's own id is delivered by a call of Step: the machine
// requests no connection to itself. Times are monotonic durations since any fixed moment, the same in all calls. A
// Machine is not safe for concurrent use.
//
// # Compatibility
//
// Messages, their order and their timestamps are those of StepMesh's van.cc and postoffice.cc, so that C++ nodes and
// nodes of this library can be mixed. The differences are deliberate and concern only cases in which C++ StepMesh
// aborts, hangs or does nothing:
//
//   - The scheduler refuses a node that it cannot accept (rank taken or out of range, all ranks taken, host not in
//     BYTEPS_ORDERED_HOSTS) when the node registers, sends it the reason, and waits for another one.
//   - An instance barrier counts a sender once, so that a resent request cannot release it early. Group barriers
//     count as C++ StepMesh does: with a group size G above 1, n/G of n requests release one.
//   - A barrier that cannot complete, because a missing member is dead, fails for all nodes that wait for it.
//   - A lost connection counts as death, not only missing heartbeats. Recovery works any number of times, and a
//     replacement process with a preferred rank gets that rank.
//   - A node keeps the scheduler address that it was configured with, which is known to work, and ignores the address
//     that the scheduler advertises.
//   - The control counter leaves out 32767, the protocol's "not set".
//
// # Notices
//
// Where the protocol has no message, the scheduler sends a notice: a HEARTBEAT without node records, which a C++ node
// ignores, with a body "stepaf/1 <verb> <text>". notice.go lists the verbs. To reach a node without an id, the
// scheduler opens a connection under a negative, temporary id, and renames it when the node gets an id.
package membership
