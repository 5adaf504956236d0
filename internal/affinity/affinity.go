// Package affinity returns the cores that this process may use, and binds threads to cores.
package affinity

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Check returns the reason why threads of this process cannot be bound to core, or nil.
func Check(core int) error {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return fmt.Errorf("core %d: %w", core, err)
	}
	if core < 0 || core >= len(set)*64 || !set.IsSet(core) {
		return fmt.Errorf("core %d does not exist or is not among the %d that this process may use", core, set.Count())
	}
	return nil
}

// Bind binds the calling thread to core. The goroutine must be locked to it.
func Bind(core int) error {
	if err := Check(core); err != nil {
		return err
	}
	var set unix.CPUSet
	set.Set(core)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("core %d: %w", core, err)
	}
	return nil
}
