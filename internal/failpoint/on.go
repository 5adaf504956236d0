//go:build failpoints

package failpoint

import "sync/atomic"

// Enabled reports whether this build can plant faults.
const Enabled = true

var planted atomic.Pointer[map[string]bool]

// On reports whether the fault called name is planted.
func On(name string) bool {
	p := planted.Load()
	return p != nil && (*p)[name]
}

// Plant plants the named faults in this process, and removes those planted before.
func Plant(names ...string) {
	m := map[string]bool{}
	for _, n := range names {
		m[n] = true
	}
	planted.Store(&m)
}
