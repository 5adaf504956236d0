//go:build !race

package rdma

// raceEnabled tells that the race detector allocates, too.
const raceEnabled = false
