package nodetest

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
)

// Settle collects garbage and gives it back to the system.
func Settle() {
	for range 2 {
		runtime.GC()
		debug.FreeOSMemory()
	}
}

// Resident is the resident memory of a process in bytes, that of C included.
func Resident(t testing.TB, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var total, resident int
	if _, err := fmt.Sscan(string(text), &total, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * os.Getpagesize()
}
