//go:build !race

package tcp

// Stubs for builds without the race detector; see race.go.

func raceSent()     {}
func raceReceived() {}
