//go:build !failpoints

package failpoint

// Enabled says whether faults can be planted in this build.
const Enabled = false

// On tells whether the fault called name is planted: never, in this build.
func On(string) bool { return false }

// Plant does nothing in this build.
func Plant(...string) {}
