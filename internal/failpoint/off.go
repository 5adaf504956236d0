//go:build !failpoints

package failpoint

// Enabled reports whether this build can plant faults.
const Enabled = false

// On reports whether the fault called name is planted: never, in this build.
func On(string) bool { return false }

// Plant does nothing in this build.
func Plant(...string) {}
