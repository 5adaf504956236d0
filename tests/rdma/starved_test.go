package rdma

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// TestStarved: a process of any role whose Go code does not run for longer than the heartbeat limit is not declared dead by any node: a thread answers for it.
// If it is stopped while it is so busy, it is declared dead as fast as any other process.
func TestStarved(t *testing.T) {
	notShort(t)
	const (
		busy = 5 * time.Second // the limit is 3 s
		slow = 4               // like the emulated devices of a busy machine
		ms   = plan.Duration(time.Millisecond)
	)
	c := real.Begin(t, real.Options{Workers: 2, Leg: real.RDMA, Host: addresses(t)[0], Slow: slow,
		Env:   append([]string{"PS_HEARTBEAT_INTERVAL=1", fmt.Sprintf("STEPAF_RDMA_ACK_TIMEOUT=%d", patientAck)}, real.Starved...),
		Loads: []plan.Load{{Nodes: "workers", Every: 10 * ms, Size: 3000, Limit: 60_000 * ms}}})
	if err := c.Works(5, slow*soon); err != nil {
		t.Fatal(err)
	}
	for _, role := range []string{"server", "scheduler", "worker"} {
		if err := c.Starve(role, busy, slow*soon); err != nil {
			t.Fatalf("while the %s is busy: %v", role, err)
		}
	}
	victim, other := c.Get("worker", 0), c.Get("worker", 1)
	go victim.Spin(time.Minute)
	<-time.After(busy)
	if err := c.NobodyLost(); err != nil {
		t.Fatal(err)
	}
	if err := victim.Stop(); err != nil {
		t.Fatal(err)
	}
	stopped, m := time.Now(), real.WatchMachine(t.Context())
	err := <-other.Barrier(van.WorkerGroup, 30*time.Second)
	took, limit := time.Since(stopped), 4*time.Second+m.Late(stopped)
	t.Logf("after %s (limit %s): %v", took, limit, err)
	if err == nil || !strings.Contains(err.Error(), "worker 0 (id 9)") || took > limit {
		t.Errorf("a barrier with the worker that was stopped: %v after %s, want an error that names it after %s at most", err, took, limit)
	}
	if c.NobodyLost() == nil {
		t.Error("no process has lost a peer")
	}
}
