package pace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
)

// timed is a sink that records the arrival times of messages, in microseconds.
type timed struct {
	sink
	begun time.Time
	came  []string
	full  int // number of messages for peer 9 that get ErrQueueFull
}

func (s *timed) Send(m *van.Message) error {
	s.mu.Lock()
	refuse := m.Receiver == 9 && s.full > 0
	if refuse {
		s.full--
	}
	s.mu.Unlock()
	err := error(van.ErrQueueFull)
	if !refuse {
		err = s.sink.Send(m)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.came = append(s.came, fmt.Sprint(name(m), " ", time.Since(s.begun).Microseconds(), " ", err != nil))
	return err
}

type sent struct{ atomic.Int32 }

func (s *sent) Sent() { s.Add(1) }

// TestStories: messages are queued and leave, in virtual time, while rates change, requests are canceled, peers
// connect and disconnect, and the inner van's queue is full at times. The counted bytes always match the queued messages. At the
// end the queues are empty, and Done was called once for each accepted message. If messages of two applications have waited
// equally long, their order is open, so there is no golden file.
func TestStories(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) { story(t, rand.New(rand.NewPCG(seed, 1)), io.Discard) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func story(t *testing.T, rng *rand.Rand, w io.Writer) {
	time.Sleep(50 * 365 * 24 * time.Hour) // a bubble begins in the year 2000, before the clock of the process does
	s := &timed{begun: time.Now()}
	var failed []string
	v := New(s, Options{Budget: []int64{0, 100_000, 1_000_000}[rng.IntN(3)], OnFail: func(peer int, meta *van.Meta, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		failed = append(failed, fmt.Sprint(peer, meta.Timestamp, golden.Err(err)))
	}})
	rates := func() Rates {
		r := Rates{Peers: map[int]int64{}, Apps: map[int32]int64{}}
		for _, id := range []int{9, 11} {
			if rng.IntN(2) == 0 {
				r.Peers[id] = []int64{10_000, 1_000_000, 3_000_000}[rng.IntN(3)]
			}
		}
		for _, app := range []int32{5, 6} {
			if rng.IntN(2) == 0 {
				r.Apps[app] = []int64{20_000, 500_000, 2_000_000}[rng.IntN(3)]
			}
		}
		return r
	}
	v.SetRates(rates())
	var all []*sent
	for ts := range 120 {
		switch k := rng.IntN(20); {
		case k < 12:
			m := message([]int{9, 11, 13}[rng.IntN(3)], 5+rng.IntN(3), ts, []int{0, 10, 100, 5000, 50_000, 300_000}[rng.IntN(6)])
			_ = rng.IntN(3)
			if rng.IntN(8) == 0 {
				m.Control.Cmd = van.Heartbeat
			}
			d := &sent{}
			m.Done = d
			if err := v.Send(m); err == nil {
				all = append(all, d)
			} else {
				fmt.Fprintln(w, "refused", errors.Is(err, van.ErrQueueFull))
				if d.Load() > 0 {
					t.Error("Done was called for what was refused")
				}
			}
		case k < 16:
			time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
		case k == 16:
			v.SetRates(rates())
		case k == 17:
			v.Cancel(van.Requests{App: int32(5 + rng.IntN(3)), First: int32(max(ts-10, 0)), Count: int32(rng.IntN(10))})
		case k == 18:
			s.mu.Lock()
			s.full = rng.IntN(4)
			s.err = []error{nil, nil, nil, van.ErrPeerLost}[rng.IntN(4)]
			s.mu.Unlock()
		case rng.IntN(2) == 0:
			v.Disconnect([]int{9, 11}[rng.IntN(2)])
		default:
			_ = v.Connect(context.Background(), []int{9, 11}[rng.IntN(2)], van.Node{})
		}
		synctest.Wait()
		s.mu.Lock()
		slices.Sort(s.came) // messages of two peers may leave at once
		slices.Sort(failed)
		fmt.Fprintln(w, s.came, failed, time.Since(s.begun).Microseconds())
		s.came, failed = nil, nil
		s.mu.Unlock()
		if table := v.table.Load(); table != nil {
			for _, id := range []int{9, 11, 13} {
				if l := table.queues[id]; l != nil {
					l.mu.Lock()
					bytes, n := int64(0), 0
					for _, a := range append([]*rateQueue{l.rest}, rateQueues(l)...) {
						for _, i := range a.queue.All() {
							bytes += i.bytes + itemCost
							n++
						}
					}
					if l.bytes != bytes || l.running != (n > 0) {
						t.Errorf("peer %d: %d bytes wait, want %d; running %t with %d messages", id, l.bytes, bytes, l.running, n)
					}
					fmt.Fprintln(w, id, bytes, n, len(l.apps))
					l.mu.Unlock()
				}
			}
		} else {
			fmt.Fprintln(w, "no table")
		}
	}
	s.mu.Lock()
	s.full, s.err = 0, nil
	s.mu.Unlock()
	if rng.IntN(2) == 0 {
		v.SetRates(Rates{})
		time.Sleep(time.Second)
		synctest.Wait()
		if v.table.Load() != nil {
			t.Error("a table is left when nothing waits and no rate is set")
		}
	}
	if err := v.Close(context.Background()); err != nil {
		t.Error(err)
	}
	synctest.Wait()
	s.mu.Lock()
	slices.Sort(s.came)
	fmt.Fprintln(w, s.came, failed)
	s.mu.Unlock()
	for i, d := range all {
		if d.Load() != 1 {
			t.Errorf("Done of message %d was called %d times", i, d.Load())
		}
	}
}

func rateQueues(l *peerQueue) (all []*rateQueue) {
	for _, app := range []int32{5, 6, 7} {
		if a := l.apps[app]; a != nil {
			all = append(all, a)
		}
	}
	return all
}
