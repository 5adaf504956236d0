package engine

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// TestPeerQueueModel: the items of slow queues, their order, and pauses, compared with lists.
// It runs alone, and calls the functions of the receiver and of the deliveries.
func TestPeerQueueModel(t *testing.T) {
	golden.Check(t, "peerqueues", 60, func(rng *rand.Rand, w io.Writer) {
		type waits struct{ seq, bytes int }
		const n = 4
		var peerQueues [n]PeerQueue[waits]
		var want [n][]waits
		var paused, resumed []int
		budget := NewBudget([]int64{0, 300, 1000}[rng.IntN(3)], []int64{0, 700, 1500}[rng.IntN(3)])
		if rng.IntN(6) == 0 {
			budget = nil
		}
		loops := [2]*Loop[waits]{}
		for i := range loops { // which share a budget
			l := NewLoop(func() (waits, *PeerQueue[waits], bool) { return waits{}, nil, false }, func(waits) {})
			l.QueueCap, l.Budget = []int{4, 8, 100}[rng.IntN(3)], budget
			if rng.IntN(4) > 0 {
				l.Weight = func(x waits) int { return x.bytes }
			}
			l.Paused = func(queue *PeerQueue[waits], bytes int64) {
				paused = append(paused, queue.ID)
				if bytes != queue.bytes {
					t.Errorf("%d bytes are reported, %d are queued", bytes, queue.bytes)
				}
			}
			l.Resumed = func(queue *PeerQueue[waits]) { resumed = append(resumed, queue.ID) }
			loops[i] = l
		}
		for i := range peerQueues {
			peerQueues[i].ID = i
		}
		weight := func(i int, x waits) int64 {
			if loops[i%2].Weight == nil {
				return 0
			}
			return int64(x.bytes)
		}
		pauses := 0
		for seq := range 400 {
			i := rng.IntN(n)
			queue, l := &peerQueues[i], loops[i%2]
			switch rng.IntN(6) {
			case 0:
				queue.slow.Store(true)
				fmt.Fprintln(w, "slow", i)
			case 1, 2, 3:
				x := waits{seq, rng.IntN(200)}
				slow, full := l.push(queue, x)
				if slow && !full {
					want[i] = append(want[i], x)
				}
				fmt.Fprintln(w, "push", i, slow, full)
			case 4:
				x, ok := l.pop(queue)
				if ok != (len(want[i]) > 0) || ok && x != want[i][0] {
					t.Fatalf("queue %d gives %v, %t, want the first of %v", i, x, ok, want[i])
				}
				if ok {
					want[i] = want[i][1:]
				}
				fmt.Fprintln(w, "pop", i, ok)
			case 5:
				fmt.Fprintln(w, "may read", i, l.MayRead(queue))
			}
			pauses += len(paused)
			slices.Sort(resumed) // which of them first the map of paused peerQueues decides
			fmt.Fprintln(w, paused, resumed)
			paused, resumed = nil, nil
			var used int64
			entered := 0
			for k := range peerQueues {
				queue, bytes := &peerQueues[k], int64(0)
				for _, x := range want[k] {
					bytes += weight(k, x)
				}
				used += bytes
				if queue.n != len(want[k]) || queue.bytes != bytes {
					t.Fatalf("queue %d has %d items of %d bytes, want %d of %d", k, queue.n, queue.bytes, len(want[k]), bytes)
				}
				if queue.paused {
					entered++
				}
				if queue.paused && !queue.slow.Load() {
					t.Fatalf("queue %d is paused, and nobody would end that", k)
				}
				tokens := len(queue.free)
				if queue.blocked && (!queue.paused || tokens > 0) {
					t.Fatalf("queue %d: held %t, paused %t, %d tokens", k, queue.blocked, queue.paused, tokens)
				}
				if tokens > 0 {
					<-queue.free
				}
				fmt.Fprintln(w, queue.paused, queue.blocked, tokens, len(queue.ring) > keepRing)
			}
			if budget != nil && (budget.Used() != used || len(budget.paused) != entered) {
				t.Fatalf("%d bytes and %d paused peerQueues in the budget, want %d and %d", budget.Used(), len(budget.paused), used, entered)
			}
		}
		if got := int(loops[0].Pauses() + loops[1].Pauses()); got != pauses {
			t.Errorf("%d pauses are counted, %d were reported", got, pauses)
		}
		for i := range peerQueues {
			for range want[i] {
				loops[i%2].pop(&peerQueues[i])
			}
			loops[i%2].pop(&peerQueues[i])
			if peerQueues[i].n != 0 || peerQueues[i].bytes != 0 || peerQueues[i].paused || peerQueues[i].slow.Load() {
				t.Errorf("queue %d: %d items, %d bytes, paused %t, slow %t at the end", i, peerQueues[i].n, peerQueues[i].bytes, peerQueues[i].paused, peerQueues[i].slow.Load())
			}
		}
		if budget.Used() != 0 {
			t.Errorf("%d bytes in use at the end", budget.Used())
		}
	})
}

// TestSmallGolden: the spin time before a sleep, and the watchdog's interval.
func TestSmallGolden(t *testing.T) {
	golden.Check(t, "small", 30, func(rng *rand.Rand, w io.Writer) {
		var a adaptiveSpin
		now := uint64(1000)
		p := interval{limit: 500}
		p.begin()
		for range 300 {
			now += uint64(rng.IntN(3000))
			switch rng.IntN(6) {
			case 0:
				a.empty(now)
			case 1:
				a.begin(now)
			case 2, 3:
				a.arrived(now, 2000)
			case 4:
				fmt.Fprintln(w, p.calm(), p.every, p.checks)
			case 5:
				if rng.IntN(20) == 0 {
					p.begin()
				}
			}
			fmt.Fprintln(w, a.waiting, a.since, a.score, a.spin(1<<20), a.spin(3000), p.every)
		}
	})
}
