//go:build race

package limits

// raceEnabled tells that everything is several times slower, and that the race
// detector's own memory comes on top.
const raceEnabled = true
