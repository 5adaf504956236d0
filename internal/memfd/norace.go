//go:build !race

package memfd

// Wrote is for the race detector; see race.go.
func Wrote() {}

// Read is for the race detector; see race.go.
func Read() {}
