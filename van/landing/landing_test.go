package landing

import (
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/internal/testlimit"
	"github.com/stepaf/stepaf-go/van"
)

// TestAnswersApart: a peer whose answers have no place of their own does not wait for others that have places.
func TestAnswersApart(t *testing.T) {
	places := New(1 << 10)
	places.mu.Lock()
	defer places.mu.Unlock()
	done := make(chan struct{})
	go func() {
		places.Answered(8, &van.Meta{})
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("it waits for others")
	}
}
