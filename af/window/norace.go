//go:build !race

package window

// watched is for the race detector; see race.go.
const watched = false
