package cluster

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// outbox is a van that records messages.
type outbox struct {
	van.Van // nil: an unexpected call panics
	sent    []string
	fail    error
}

func (v *outbox) Send(m *van.Message) error {
	from, to := m.Incarnations()
	v.sent = append(v.sent, fmt.Sprint(m.Sender, " ", m.Receiver, " ", m.Timestamp, " ", m.Control.Cmd, " ", string(m.Body), " ", from, " ", to))
	return v.fail
}

// TestNoticeStories: the notices of canceled requests that are sent, and sent again when their peer is back, in
// virtual time.
func TestNoticeStories(t *testing.T) {
	golden.Check(t, "notices", 60, func(rng *rand.Rand, w io.Writer) {
		synctest.Test(t, func(t *testing.T) {
			self := &nodeInfo{cfg: env.Default(), log: slog.New(slog.DiscardHandler)}
			self.id.Store(9)
			self.setName("worker 0")
			v := &outbox{}
			p := &processes{self: self, incarnation: 77}
			s := &notices{self: self, processes: p, van: v, by: map[int][]peerNotice{}}
			said := map[int]int{}
			for i := range 120 {
				id := []int{8, 10}[rng.IntN(2)]
				switch rng.IntN(10) {
				case 0, 1, 2, 3, 4:
					for range 1 + rng.IntN(10)/9*40 {
						s.cancel(id, rng.IntN(3), Canceled{Customer: 1, First: int32(i), Count: 2})
						said[id]++
					}
				case 5:
					p.mu.Lock()
					p.change(id, func(p *process) { p.incarnation, p.known = uint32(rng.IntN(3)), true })
					p.mu.Unlock()
				case 6:
					p.setLost(id, van.ErrPeerLost)
				case 7:
					p.setLost(id, nil)
					s.resend(id)
				case 8:
					time.Sleep([]time.Duration{time.Second, time.Minute, cancelMemory}[rng.IntN(3)])
				case 9:
					v.fail = []error{nil, van.ErrQueueFull}[rng.IntN(2)]
				}
				fmt.Fprintln(w, v.sent, len(s.by[8]), len(s.by[10]))
				v.sent = nil
				for id, l := range s.by {
					if len(l) > maxNotices {
						t.Errorf("%d notices for %d are remembered", len(l), id)
					}
				}
			}
		})
	})
}

// TestOutputQueuesModel: outputs about one peer are performed in order, whichever are slow; those about other peers do not
// wait for them, and Ready follows when no output is pending.
func TestOutputQueuesModel(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 7))
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			var done []membership.Output
			busy := 0
			block := map[int]chan struct{}{}
			var l outputQueues
			l.perform = func(o membership.Output) {
				id, _, slow := peerOf(o)
				mu.Lock()
				busy++
				c := block[id]
				mu.Unlock()
				if c != nil && slow {
					<-c
				}
				mu.Lock()
				defer mu.Unlock()
				busy--
				if _, ready := o.(membership.Ready); ready && busy > 0 {
					t.Error("ready, while something is under way")
				}
				done = append(done, o)
			}
			asked := map[int][]string{} // by peer
			alias := map[int]int{}      // new ids of peers
			readies := 0
			of := func(id int) int {
				for alias[id] != 0 {
					id = alias[id]
				}
				return id
			}
			for i := range 60 {
				id := 1 + rng.IntN(4)
				var o membership.Output
				switch rng.IntN(12) {
				case 0, 1:
					o = membership.Connect{ID: id, Node: van.Node{Port: i}}
				case 2:
					o = membership.Disconnect{ID: id}
				case 3, 4, 5, 6:
					o = membership.Send{To: id, Meta: van.Meta{Timestamp: int32(i)}}
				case 7:
					o = membership.PeerDead{ID: id}
				case 8:
					mu.Lock()
					if c := block[id]; c != nil {
						close(c)
						delete(block, id)
					} else {
						block[id] = make(chan struct{})
					}
					mu.Unlock()
					continue
				case 9:
					o = membership.PeerAlive{ID: id}
				case 10:
					if rng.IntN(4) == 0 {
						o = membership.Ready{}
						readies++
					}
				case 11:
					if rng.IntN(4) == 0 && l.queues[id] != nil { // it has another id from now on
						o = membership.Rename{Old: id, New: 10*i + 10}
						alias[10*i+10] = id
					}
				}
				if o == nil {
					continue
				}
				l.dispatch(o)
				if peer, about, _ := peerOf(o); about {
					asked[of(peer)] = append(asked[of(peer)], fmt.Sprintf("%T%v", o, o))
				}
				if r, is := o.(membership.Rename); is { // outputs with the new id follow it
					x := membership.Send{To: r.New, Meta: van.Meta{Timestamp: int32(i)}}
					l.dispatch(x)
					asked[of(r.New)] = append(asked[of(r.New)], fmt.Sprintf("%T%v", x, x))
				}
				synctest.Wait()
				waits := map[int]bool{}
				for id := range l.queues {
					waits[of(id)] = true
				}
				mu.Lock()
				if busy != len(waits) {
					t.Errorf("seed %d: %d outputs are under way in %d lanes", seed, busy, len(waits))
				}
				mu.Unlock()
			}
			over := make(chan struct{})
			began := time.Now()
			go func() {
				l.await(time.Minute)
				close(over)
			}()
			synctest.Wait()
			waiting := len(l.queues) > 0
			select {
			case <-over:
				if waiting {
					t.Error("await has returned before the last output")
				}
			default:
				if !waiting {
					t.Error("await waits for nothing")
				}
			}
			mu.Lock()
			for id, c := range block {
				close(c)
				delete(block, id)
			}
			mu.Unlock()
			<-over
			if time.Since(began) > 0 {
				t.Error("await has waited for its limit")
			}
			synctest.Wait()
			got, ready := map[int][]string{}, 0
			for _, o := range done {
				if peer, about, _ := peerOf(o); about {
					got[of(peer)] = append(got[of(peer)], fmt.Sprintf("%T%v", o, o))
				} else {
					ready++
				}
			}
			for id := range asked {
				if !slices.Equal(got[id], asked[id]) {
					t.Errorf("seed %d: of peer %d\n%v were carried out, want\n%v", seed, id, got[id], asked[id])
				}
			}
			if ready != readies || len(l.queues) > 0 || len(l.waiting) > 0 || len(l.idle) > 0 {
				t.Errorf("%d times ready, want %d; %d lanes, %d outputs, %d waits are left", ready, readies, len(l.queues), len(l.waiting), len(l.idle))
			}
		})
	}
}
