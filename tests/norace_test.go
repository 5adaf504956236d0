//go:build !race

package tests

// raceEnabled tells whether the programs are built with the race detector too.
const raceEnabled = false
