//go:build !countlocks

package bench

// countLocks returns nil: only a build with the tag countlocks counts.
func countLocks() map[string]uint64 { return nil }
