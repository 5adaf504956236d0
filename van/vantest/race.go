//go:build race

package vantest

// raceEnabled: the race detector makes sync.Pool forget on purpose.
const raceEnabled = true
