// Package launch starts a cluster, or one machine's part of it, as processes of this machine, watches them and ends
// them together.
//
// A Spec describes what to start. Resolve turns it into a Plan: it chooses addresses, port, transport and device, and
// makes one Child for each process, with its complete environment. Run starts the plan's children, copies their output
// line by line, and returns when all have ended.
//
// Only processes that Run has started, and the processes in their process groups, are ever signaled. On Linux the
// kernel kills the children when the launcher dies for any reason.
package launch
