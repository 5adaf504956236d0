package vantest

import (
	"errors"
	"strings"
	"testing"
)

// Fails checks that err wraps sentinel and names everything in texts.
func Fails(t testing.TB, err, sentinel error, texts ...string) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Errorf("got %v, want an error that wraps %q", err, sentinel)
		return
	}
	for _, s := range texts {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q does not say %q", err, s)
		}
	}
}
