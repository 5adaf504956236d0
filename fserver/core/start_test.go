package core

import (
	"context"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// TestStartBarrierLimit: a server stops before the second barrier of the start. The start of the other nodes ends
// within the limit. They do not know the missing node; the error names the scheduler, which does.
func TestStartBarrierLimit(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	begun := time.Now()
	s, err := open(t.Context(), c.Workers[0], 300*time.Millisecond)
	if took := time.Since(begun); s != nil || took < 300*time.Millisecond || took > 20*time.Second {
		t.Errorf("%v after %s, want none after 300 ms", s, took)
	}
	vantest.Fails(t, err, context.DeadlineExceeded, "worker 0 (id 9)", "barrier", "the scheduler's log names the missing nodes")
	if c.Workers[0].Alive() == nil {
		t.Error("the node has not left")
	}
}
