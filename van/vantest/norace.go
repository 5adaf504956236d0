//go:build !race

package vantest

const raceEnabled = false
