package real

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// TestMayFail: an answer that finds its own node closed is a fault, unless the node leaves.
func TestMayFail(t *testing.T) {
	for _, c := range []struct {
		err             error
		running, leaves bool
	}{
		{nil, true, true},
		{fmt.Errorf("send: %w", van.ErrPeerLost), true, true},
		{fmt.Errorf("send: %w", van.ErrTimeout), true, true},
		{fmt.Errorf("send: %w", van.ErrClosed), false, true},
		{fmt.Errorf("send: %w", van.ErrInvalid), false, false},
		{errors.New("another"), false, false},
	} {
		n := &node{ended: make(chan struct{})}
		if got := n.mayFail(c.err); got != c.running {
			t.Errorf("%v on a node that runs: %t, want %t", c.err, got, c.running)
		}
		n.finish()
		if got := n.mayFail(c.err); got != c.leaves {
			t.Errorf("%v on a node that leaves: %t, want %t", c.err, got, c.leaves)
		}
	}
}
