package engine

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// TestLanesModel: what waits in slow lanes, in order, which lanes are paused and which go on, against lists.
// Nothing runs beside it: it calls what the receiver and the deliveries call.
func TestLanesModel(t *testing.T) {
	golden.Check(t, "lanes", 60, func(rng *rand.Rand, w io.Writer) {
		type waits struct{ seq, bytes int }
		const n = 4
		var lanes [n]PeerQueue[waits]
		var want [n][]waits
		var paused, resumed []int
		budget := NewBudget([]int64{0, 300, 1000}[rng.IntN(3)], []int64{0, 700, 1500}[rng.IntN(3)])
		if rng.IntN(6) == 0 {
			budget = nil
		}
		loops := [2]*Loop[waits]{}
		for i := range loops { // which share a budget
			l := NewLoop(func() (waits, *PeerQueue[waits], bool) { return waits{}, nil, false }, func(waits, *Deliverer) {})
			l.QueueCap, l.Budget = []int{4, 8, 100}[rng.IntN(3)], budget
			if rng.IntN(4) > 0 {
				l.Weight = func(x waits) int { return x.bytes }
			}
			l.Paused = func(lane *PeerQueue[waits], bytes int64) {
				paused = append(paused, lane.ID)
				if bytes != lane.bytes {
					t.Errorf("%d bytes are told, %d wait", bytes, lane.bytes)
				}
			}
			l.Resumed = func(lane *PeerQueue[waits]) { resumed = append(resumed, lane.ID) }
			loops[i] = l
		}
		for i := range lanes {
			lanes[i].ID = i
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
			lane, l := &lanes[i], loops[i%2]
			switch rng.IntN(6) {
			case 0:
				lane.keep()
				fmt.Fprintln(w, "slow", i)
			case 1, 2, 3:
				x := waits{seq, rng.IntN(200)}
				slow, full := l.push(lane, x)
				if slow && !full {
					want[i] = append(want[i], x)
				}
				fmt.Fprintln(w, "push", i, slow, full)
			case 4:
				x, ok := l.pop(lane)
				if ok != (len(want[i]) > 0) || ok && x != want[i][0] {
					t.Fatalf("lane %d gives %v, %t, want the first of %v", i, x, ok, want[i])
				}
				if ok {
					want[i] = want[i][1:]
				}
				fmt.Fprintln(w, "pop", i, ok)
			case 5:
				fmt.Fprintln(w, "may read", i, l.MayRead(lane))
			}
			pauses += len(paused)
			slices.Sort(resumed) // which of them first the map of paused lanes decides
			fmt.Fprintln(w, paused, resumed)
			paused, resumed = nil, nil
			var used int64
			entered := 0
			for k := range lanes {
				lane, bytes := &lanes[k], int64(0)
				for _, x := range want[k] {
					bytes += weight(k, x)
				}
				used += bytes
				if lane.n != len(want[k]) || lane.bytes != bytes {
					t.Fatalf("lane %d has %d items of %d bytes, want %d of %d", k, lane.n, lane.bytes, len(want[k]), bytes)
				}
				if lane.paused {
					entered++
				}
				if lane.paused && !lane.slow.Load() {
					t.Fatalf("lane %d is paused, and nobody would end that", k)
				}
				tokens := len(lane.room)
				if lane.held && (!lane.paused || tokens > 0) {
					t.Fatalf("lane %d: held %t, paused %t, %d tokens", k, lane.held, lane.paused, tokens)
				}
				if tokens > 0 {
					<-lane.room
				}
				fmt.Fprintln(w, lane.paused, lane.held, tokens, len(lane.ring) > keepRing)
			}
			if budget != nil && (budget.Used() != used || len(budget.paused) != entered) {
				t.Fatalf("%d bytes and %d paused lanes in the budget, want %d and %d", budget.Used(), len(budget.paused), used, entered)
			}
		}
		if got := int(loops[0].Pauses() + loops[1].Pauses()); got != pauses {
			t.Errorf("%d pauses are counted, %d were told", got, pauses)
		}
		for i := range lanes {
			for range want[i] {
				loops[i%2].pop(&lanes[i])
			}
			loops[i%2].pop(&lanes[i])
			if lanes[i].n != 0 || lanes[i].bytes != 0 || lanes[i].paused || lanes[i].slow.Load() {
				t.Errorf("lane %d: %d items, %d bytes, paused %t, slow %t at the end", i, lanes[i].n, lanes[i].bytes, lanes[i].paused, lanes[i].slow.Load())
			}
		}
		if budget.Used() != 0 {
			t.Errorf("%d bytes in use at the end", budget.Used())
		}
	})
}

// TestSmallGolden: how long is looked before a sleep, and how often.
func TestSmallGolden(t *testing.T) {
	golden.Check(t, "small", 30, func(rng *rand.Rand, w io.Writer) {
		var a adaptiveSpin
		now := uint64(1000)
		p := pace{limit: 500}
		p.begin()
		for range 300 {
			now += uint64(rng.IntN(3000))
			switch rng.IntN(6) {
			case 0:
				a.empty(now)
			case 1:
				a.begin(now)
			case 2, 3:
				a.came(now, 2000)
			case 4:
				fmt.Fprintln(w, p.calm(), p.every, p.looks)
			case 5:
				if rng.IntN(20) == 0 {
					p.begin()
				}
			}
			fmt.Fprintln(w, a.waiting, a.since, a.score, a.spin(1<<20), a.spin(3000), p.every)
		}
	})
}
