package resend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// doneCount counts the calls of Done for one message.
type doneCount struct{ atomic.Int32 }

func (c *doneCount) Sent() { c.Add(1) }

// TestStories: in virtual time, messages are acknowledged, lost, duplicated, refused and canceled, and peers connect,
// disconnect and change. At the end no message is kept, and Done was called once for each message. There is no golden file:
// because of the probes, a story may differ from run to run.
func TestStories(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) { story(t, rand.New(rand.NewPCG(seed, 1)), io.Discard) })
	}
}

func story(t *testing.T, rng *rand.Rand, w io.Writer) {
	begun := time.Now()
	p := &pipe{hold: rng.IntN(2) == 0}
	var mu sync.Mutex
	var events []string
	say := func(format string, a ...any) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, fmt.Sprintf(format, a...))
	}
	v := New(p, Options{Timeout: 100 * time.Millisecond, MaxTries: 3, OnFail: func(peer int, meta *van.Meta, err error) {
		say("failed %d %d %t %s", peer, meta.Timestamp, errors.Is(err, van.ErrTimeout), golden.Err(err))
	}})
	v.WatchPeers(func(id int, up bool, cause error) { say("peer %d %t %t", id, up, cause != nil) })
	v.Start(func(m *van.Message) { say("up %d %d %d", m.Sender, m.AppID, m.Timestamp) })
	v.SetID(9)
	var dones []*doneCount
	refused := map[*doneCount]bool{}
	next := map[int]int32{}
	data := func(to int) *van.Message {
		m := request(to, int(next[to]))
		next[to] += int32(1 + rng.IntN(2))
		m.AppID, m.CustomerID, m.Push = int32(rng.IntN(2)), int32(rng.IntN(2)), rng.IntN(2) == 0
		if rng.IntN(6) == 0 { // the same signature as that of an earlier one, perhaps
			m.Timestamp -= 2
		}
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, []int{0, 5, 5000}[rng.IntN(3)]))
		d := &doneCount{}
		dones = append(dones, d)
		m.Done = d
		return m
	}
	peers := []int{8, 10, 12}
	addrs := map[int]string{}
	connect := func(id int, host string, incarnation uint32) {
		n := van.Node{ID: id, Hostname: host, Port: 1}
		if incarnation > 0 {
			n.Endpoint = (&van.NodeExtension{Incarnation: incarnation}).Encode()
		}
		addrs[id] = host
		say("connect %s", golden.Err(v.Connect(context.Background(), id, n)))
	}
	var sent []sentMessage
	enabled := false
	for range 150 {
		id := peers[rng.IntN(len(peers))]
		switch rng.IntN(20) {
		case 0:
			v.Enable()
			enabled = true
		case 1, 2, 3, 4, 5, 6:
			m := data(id)
			if err := v.Send(m); err != nil {
				refused[m.Done.(*doneCount)] = true
				say("refused %s", golden.Err(err))
			}
		case 7, 8, 9: // some of what was sent is acknowledged
			for range rng.IntN(6) {
				if len(sent) > 0 {
					s := sent[rng.IntN(len(sent))]
					p.recv(ack(s.receiver, signature(&s.meta, 9, s.receiver)))
				}
			}
		case 10, 11: // requests come, some twice
			m := request(9, rng.IntN(12))
			m.Sender, m.AppID = id, int32(rng.IntN(2))
			if from := uint32(rng.IntN(3)); from > 0 {
				m.SetIncarnations(from, 77)
			}
			for range 1 + rng.IntN(2) {
				p.recv(m)
			}
		case 12:
			time.Sleep(time.Duration(rng.IntN(250)) * time.Millisecond)
		case 13:
			p.mu.Lock()
			p.fail = []error{nil, nil, van.ErrQueueFull, van.ErrPeerLost}[rng.IntN(4)]
			p.mu.Unlock()
		case 14:
			connect(id, []string{"a", "b"}[rng.IntN(2)], uint32(rng.IntN(3)))
		case 15:
			v.Disconnect(id)
		case 16:
			to := peers[rng.IntN(len(peers))]
			say("rename %s", golden.Err(v.Rename(id, to)))
		case 17:
			p.watch(id, rng.IntN(2) == 0, []error{nil, syscall.ECONNREFUSED, van.ErrPeerLost}[rng.IntN(3)])
		case 18:
			q := van.Requests{App: int32(rng.IntN(2)), Customer: int32(rng.IntN(2)), First: max(next[id]-4, 0), Count: int32(rng.IntN(4))}
			v.Cancel(q)
		case 19: // the inner van completes some
			p.mu.Lock()
			free := p.dones
			p.dones = nil
			p.mu.Unlock()
			for _, d := range free {
				if d != nil { // it is nil for an acknowledgement
					d.Sent()
				}
			}
		}
		synctest.Wait()
		for _, s := range p.take() {
			say("sent %d %d %d %t at %d: %d %d", s.receiver, s.meta.Timestamp, s.meta.Control.Cmd, s.meta.Request, s.at.Sub(begun).Milliseconds(), s.meta.Control.MsgSig, len(s.frames[1]))
			if s.meta.Control.Cmd == van.EmptyCmd {
				sent = append(sent, s)
			}
		}
		mu.Lock()
		slices.Sort(events) // several may happen at the same time
		total := 0
		for _, d := range dones {
			total += int(d.Load())
		}
		v.kept.mu.Lock()
		n, listed := 0, 0
		for _, e := range v.kept.byKey {
			for ; e != nil; e = e.behind {
				n++
			}
		}
		for e := v.kept.first; e != nil; e = e.next {
			if listed++; e.next != nil && (e.next.prev != e || e.next.due.Before(e.due)) || e.next == nil && v.kept.last != e {
				t.Error("the list is out of order")
			}
		}
		if v.kept.count != n || listed != len(v.kept.byKey) {
			t.Errorf("%d are kept, %d in the list, want %d and %d", v.kept.count, listed, n, len(v.kept.byKey))
		}
		fmt.Fprintln(w, events, total, v.kept.count, len(v.kept.unresponsive), len(v.kept.conns), enabled)
		v.kept.mu.Unlock()
		events = nil
		mu.Unlock()
	}
	p.mu.Lock()
	p.fail = nil
	p.mu.Unlock()
	if err := v.Close(context.Background()); err != nil {
		t.Error(err)
	}
	for _, d := range p.dones {
		if d != nil {
			d.Sent()
		}
	}
	synctest.Wait()
	mu.Lock()
	fmt.Fprintln(w, time.Since(begun), len(events))
	mu.Unlock()
	v.kept.mu.Lock()
	defer v.kept.mu.Unlock()
	if v.kept.count != 0 || len(v.kept.byKey) != 0 || v.kept.first != nil || v.kept.last != nil {
		t.Errorf("%d are kept at the end", v.kept.count)
	}
	for i, d := range dones {
		if want := map[bool]int32{true: 0, false: 1}[refused[d]]; d.Load() != want {
			t.Errorf("Done of message %d was called %d times, want %d", i, d.Load(), want)
		}
	}
}
