package local

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// pushMarks pushes values with the number of this process until that fails.
func pushMarks(c *nodetest.Child, w *af.Worker) {
	for i := 0; ; i++ {
		if err := roundTrip(w, os.Getpid(), []int{64, 1 << 20}[i%2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			c.Say("ended")
			return
		}
		if i == 0 {
			c.Say("begun")
		}
	}
}

// TestReplacedWhileStopped: a worker is stopped, replaced, and continues. Its messages are
// not accepted any more, and it learns so soon.
func TestReplacedWhileStopped(t *testing.T) {
	const interval, timeout = time.Second, 3 * time.Second
	beats := func(c *exec.Cmd) { c.Env = append(c.Env, "PS_HEARTBEAT_INTERVAL=1", "PS_HEARTBEAT_TIMEOUT=3") }
	var p *nodetest.Process
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.SHM, Workers: 1,
		Set:       func(c *postoffice.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = interval, timeout },
		Elsewhere: nodetest.Elsewhere(t, "worker", 0, marks, &p, beats)})
	var mu sync.Mutex
	heard := map[int]int{} // by process
	if err := nodetest.Serve(c.Servers[0], func(b af.Batch) {
		pid := int(binary.LittleEndian.Uint32(b.Pushes()[0].Val.Bytes()[4:]))
		mu.Lock()
		heard[pid]++
		mu.Unlock()
		_ = nodetest.Echo(b) // its worker may be gone
	}); err != nil {
		t.Fatal(err)
	}
	from := func(p *nodetest.Process) int {
		mu.Lock()
		defer mu.Unlock()
		return heard[p.PID()]
	}
	p.Expect("begun")
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	testcluster.Lost(t, c.Scheduler, workerID)
	var next *nodetest.Process
	nodetest.Returns(t, c.Servers, workerID, func() { next = nodetest.Spawn(t, c, "worker", 0, marks, beats) })
	next.Expect("begun")
	before := from(p)
	if before == 0 {
		t.Error("nothing was heard of the first worker")
	}
	begun, m := time.Now(), real.WatchMachine(t.Context())
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	p.Expect("ended")
	t.Logf("it learnt after %s", time.Since(begun))
	if d := time.Since(begun); d > 5*time.Second+m.Late(begun) {
		t.Errorf("it took the woken worker %s to learn that it was replaced", d)
	}
	seen := from(next)
	vantest.Eventually(t, 20*time.Second, "the other one goes on", func() bool { return from(next) > seen+10 })
	if n := from(p) - before; n != 0 {
		t.Errorf("%d batches of the woken worker were taken", n)
	}
}
