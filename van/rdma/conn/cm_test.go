package conn

import (
	"errors"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// failingID fails to make queue pairs.
type failingID struct{ verbs.ID }

func (failingID) CreateQP(verbs.QPOptions) (verbs.QP, error) { return nil, errTest }

// reserving is a device that records reservations.
type reserving struct {
	verbs.Device
	most int
	err  error
}

func (d *reserving) Reserve(n int) error {
	d.most = max(d.most, n)
	return d.err
}

// TestFailedQueuePairsReserveNothing: a queue pair that cannot be made releases its entries in the completion queue.
func TestFailedQueuePairsReserveNothing(t *testing.T) {
	for _, refused := range []error{nil, errors.New("too many entries")} {
		m, d := &Manager{SendDepth: 10, RecvDepth: 20}, &reserving{err: refused}
		for range 5 {
			if _, err := m.CreateQP(failingID{}, d, 1, 0); err == nil {
				t.Fatal("a queue pair was made")
			}
		}
		if d.most != 30 || m.reserved[d] != 0 {
			t.Errorf("up to %d entries were reserved, %d still are; want 30 and 0", d.most, m.reserved[d])
		}
	}
}
