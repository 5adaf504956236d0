package backend

import (
	"errors"
	"testing"
)

// TestNewInAnyCase: names are found however they are written.
func TestNewInAnyCase(t *testing.T) {
	for _, name := range []string{"CPU", "cpu", "Cpu"} {
		if b, err := New(name, 0); err != nil || b.Name() != "CPU" {
			t.Errorf("New(%q): %v, %v", name, b, err)
		}
	}
	if b, err := New("abacus", 0); !errors.Is(err, ErrUnavailable) {
		t.Errorf("New of what there is not: %v, %v", b, err)
	}
}
