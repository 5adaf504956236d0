// Package launch starts a cluster, or one node's share of it, as processes of this
// machine, watches them and ends them together.
//
// A Spec says what is wanted. Resolve turns it into a Plan: addresses, port,
// transport and device chosen, one Child for each process with its complete
// environment. Run starts the plan's children, copies their output line by line,
// and returns when all have ended.
//
// Only processes that Run has started, and what these start in their process
// group, are ever signalled. On Linux the kernel kills the children when the
// launcher dies, however that happens.
package launch
