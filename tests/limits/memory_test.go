// Package limits tests what the library may cost: memory over many requests, time
// to start, and processor time when nothing happens.
package limits

import (
	"math"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// size of the tensors in bytes. The original loses 12 KiB for each such request.
const size = 1 << 10

// usage is the resources of a process.
type usage struct {
	resident   int // bytes, those of C included
	goroutines int
}

// settled collects garbage, returns it to the system, and measures.
func settled(t testing.TB) usage {
	t.Helper()
	nodetest.Settle()
	return usage{nodetest.Resident(t, os.Getpid()), runtime.NumGoroutine()}
}

// spans is how often flat measures.
const spans = 3

// flat checks that memory and goroutines do not grow with the number of requests, which run makes. A leak grows in each
// span; a machine that is slow for a while grows one of them only.
func flat(t testing.TB, run func(requests int)) {
	t.Helper()
	noise := 2 << 20 // in all requests
	if vantest.Race {
		noise = 16 << 20 // its shadow of the heap: 3 to 9 MB are seen, as many for 50,000 requests as for 290,000
	}
	run(warmUp)
	first := settled(t)
	before, least, requests := first, math.MaxInt, (total()-warmUp)/spans
	for range spans {
		run(requests)
		after := settled(t)
		t.Logf("resident %d KiB, then %d KiB; goroutines %d, then %d", before.resident>>10, after.resident>>10, before.goroutines, after.goroutines)
		least = min(least, after.resident-before.resident)
		before = after
	}
	if spans*least > noise {
		t.Errorf("resident memory has grown by %d bytes or more in each %d requests, %d each", least, requests, least/requests)
	}
	if before.goroutines > first.goroutines+2 {
		t.Errorf("%d goroutines were %d before", before.goroutines, first.goroutines)
	}
}

// overSockets runs a test with data over TCP, and with data over shared memory.
func overSockets(t *testing.T, test func(t *testing.T, o testcluster.Options)) {
	testcluster.Over(t, test, testcluster.TCP, testcluster.SHM)
}

// pair is a worker and a server.
func pair(t testing.TB, o testcluster.Options) (*testcluster.Cluster, *af.Worker) {
	t.Helper()
	c := testcluster.Start(t, o)
	nodetest.Server(t, c.Servers[0], nodetest.Echoes(t))
	return c, nodetest.Worker(t, c.Workers[0])
}

func tensor(t testing.TB) af.Tensor {
	t.Helper()
	x, err := af.FromSlice(make([]byte, size))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// nothingHeld checks that requests have left nothing.
func nothingHeld(t testing.TB, c *testcluster.Cluster) {
	t.Helper()
	for _, n := range c.Nodes() {
		// The transport releases a value a moment after the answer has arrived.
		for limit := time.Now().Add(10 * time.Second); testcluster.Stats(n).LentValues > 0; runtime.Gosched() {
			if time.Now().After(limit) {
				t.Fatalf("%s still holds %d values", n.Name(), testcluster.Stats(n).LentValues)
			}
		}
	}
}

// warmUp and total are the numbers of requests between which nothing may grow.
const warmUp = 10_000

func total() int {
	if vantest.Race {
		return 60_000
	}
	return 110_000
}

// TestMemory makes requests, with few and with several in flight.
func TestMemory(t *testing.T) { overSockets(t, memory) }

func memory(t *testing.T, o testcluster.Options) {
	c, w := pair(t, o)
	const flight = 16
	type slot struct {
		h          af.Call
		push, pull []af.KeyTensor
		open       bool
	}
	var slots [flight]slot
	for i := range slots {
		slots[i].push = []af.KeyTensor{{Key: uint64(i), Val: tensor(t)}}
		slots[i].pull = []af.KeyTensor{{Key: uint64(i), Val: tensor(t)}}
	}
	wait := func(s *slot) {
		if s.open {
			if err := s.h.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.open = false
		}
	}
	requests := func(n int) {
		for i := range n {
			s := &slots[i%flight]
			if i%1000 < 100 { // one at a time
				s = &slots[0]
			}
			wait(s)
			var err error
			if s.h, err = w.PushPull(s.push, [][]af.KeyTensor{s.pull}); err != nil {
				t.Fatal(err)
			}
			s.open = true
		}
		for i := range slots {
			wait(&slots[i])
		}
	}
	flat(t, requests)
	if n := testcluster.InFlight(c.Workers[0]); n != 0 {
		t.Errorf("%d requests are in flight, want none", n)
	}
	nothingHeld(t, c)
	c.Finalize(t)
}

// TestMemoryWithoutWait makes pushes that are hardly ever waited for.
func TestMemoryWithoutWait(t *testing.T) { overSockets(t, withoutWait) }

func withoutWait(t *testing.T, o testcluster.Options) {
	c, w := pair(t, o)
	push := []af.KeyTensor{{Key: 1, Val: tensor(t)}}
	pushes := func(n int) {
		for i := range n {
			h, err := w.PushPull(push, nil)
			if err != nil {
				t.Fatal(err)
			}
			// Without this Wait the output queue would grow without end. Answers arrive in the order of the requests:
			// after the last answer all requests are finished.
			if i%256 == 255 || i == n-1 {
				if err := h.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	flat(t, pushes)
	// A request that finished before its Wait displaced another one, and is not remembered itself.
	if n := testcluster.InFlight(c.Workers[0]); n > 4096 || n < 4096-4096/256-1 {
		t.Errorf("%d finished requests are remembered, want 4096, or one fewer for each of the last Waits", n)
	}
	nothingHeld(t, c)
	c.Finalize(t)
}
