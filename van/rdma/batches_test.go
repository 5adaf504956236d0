package rdma

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// pushMany makes a push of several keys, which is packed.
func pushMany(to *testNode, keys, ts int, v []byte) *van.Message {
	m := push(to, 0, ts, v)
	k, lens := make([]byte, 8*keys), make([]byte, 4*keys)
	for i := range keys {
		le.PutUint64(k[8*i:], uint64(ts*1000+i))
		le.PutUint32(lens[4*i:], uint32(len(v)/keys))
	}
	m.Frames, m.Keys, m.Lens = 3, backend.Bytes(k), backend.Bytes(lens)
	m.DataTypes = append(m.DataTypes, van.TypeInt32)
	m.DataSize = int32(len(k) + len(v) + len(lens))
	return m
}

// sendMore queues m as Send does. With more it does not post the work requests: another call, or push, follows.
func (n *testNode) sendMore(m *van.Message, more bool) error {
	p := (*n.tables.peers.Load())[m.Receiver]
	var done van.Completion
	p.mu.Lock()
	err := whyRefused(p, m)
	if err == nil {
		done, err = p.queue(m)
	}
	if err == nil {
		p.pump()
	}
	if !more || err != nil {
		p.flush()
	}
	p.mu.Unlock()
	if done != nil {
		done.Sent()
	}
	if err != nil {
		return n.sendError(m, p, err)
	}
	return nil
}

// push posts the work requests of earlier calls of sendMore.
func (n *testNode) push(id int) {
	p := (*n.tables.peers.Load())[id]
	p.mu.Lock()
	p.flush()
	p.mu.Unlock()
}

// equal is bytes.Equal for a receive buffer, which a later push may overwrite meanwhile. The race detector does not check it.
//
//go:norace
func equal(x, y []byte) bool {
	same := len(x) == len(y)
	for i := range min(len(x), len(y)) {
		same = same && x[i] == y[i]
	}
	return same
}

// randomPull is a pull request in flight.
type randomPull struct {
	dst      []byte
	n        int
	lens     []int // of a batch
	canceled bool
}

// right reports whether the answer m has the right values, or has put them into the pull tensor. The values of a batch follow from first.
func (p *randomPull) right(m *van.Message, ts, first int) bool {
	if p.lens == nil {
		return bytes.Equal(p.dst, value(p.n, ts)) || bytes.Equal(m.Vals.Host(), value(p.n, ts))
	}
	at, k := 0, 0
	for i, n := range p.lens {
		if n >= 0 {
			continue
		}
		want := value(-n, answerSeed+first+i)
		if k >= len(m.Parts) || !bytes.Equal(p.dst[at:at-n], want) && !bytes.Equal(m.Parts[k].Vals.Host(), want) {
			return false
		}
		at, k = at-n, k+1
	}
	return k == len(m.Parts)
}

// answerSeed distinguishes the values of answers to batches from those of their pushes.
const answerSeed = 1000

// randomLens returns the lengths of the batch that begins at timestamp ts; pulls are negative.
func randomLens(ts int) (lens []int) {
	rng := rand.New(rand.NewPCG(uint64(ts), 7))
	for range 1 + rng.IntN(6) {
		n := 1 + rng.IntN([]int{100, 700, 4000, 20000}[rng.IntN(4)])
		if rng.IntN(3) == 0 {
			n = -n
		}
		lens = append(lens, n)
	}
	slices.SortFunc(lens, func(x, y int) int { return cmp.Compare(min(y, 0), min(x, 0)) })
	return lens
}

// TestRandomBatches sends random batches in both directions, holds their values for random times, breaks connections and cancels requests. All
// bytes are right for as long as they are held, each message arrives once and in order, no control message is lost, and no slot is lost.
func TestRandomBatches(t *testing.T) {
	const rounds, seed = 150, 1
	for _, s := range []struct {
		name     string
		fails    bool
		options  func(*env.Config)
		network  func(*fakeverbs.Config)
		revoking bool
	}{
		{name: "plain"},
		{name: "few slots", options: func(c *env.Config) { c.AddressPoolSize = 24 }},
		{name: "split", options: func(c *env.Config) { c.SplitQPLag = true }, network: func(c *fakeverbs.Config) { c.Jitter = 200 * time.Microsecond }},
		{name: "no inline", network: func(c *fakeverbs.Config) { c.MaxInline = 0; c.CheckSource = true }},
		{name: "much inline", network: func(c *fakeverbs.Config) { c.MaxInline = 1000; c.CheckSource = true }},
		{name: "shallow", options: func(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth = 16, 16 }},
		{name: "fails", fails: true},
		{name: "fails, few slots, split", fails: true, options: func(c *env.Config) { c.AddressPoolSize, c.SplitQPLag = 24, true }},
		{name: "revoking", fails: true, revoking: true},
	} {
		t.Run(s.name, func(t *testing.T) {
			var options []func(*fakeverbs.Config)
			if s.network != nil {
				options = append(options, s.network)
			}
			r := newRig(t, options...)
			if s.options == nil {
				s.options = func(*env.Config) {}
			}
			w, v := r.pair(s.options)
			if err := v.RegisterRecvBuffer(9, 9, backend.Bytes(make([]byte, 4096))); err != nil {
				t.Fatal(err)
			}
			runRandom(r, w, v, rounds, rand.New(rand.NewPCG(seed, seed)), s.fails, s.revoking)
		})
	}
}

func runRandom(r *rig, w, s *testNode, rounds int, rng *rand.Rand, fails, revoking bool) {
	var failing atomic.Bool
	var broken, bad atomic.Int64
	fault := func(format string, args ...any) {
		if bad.Add(1) < 10 {
			r.Errorf(format, args...)
		}
	}
	r.net.FailWR(func(wr fakeverbs.WR) verbs.Status {
		if failing.Load() && rand.N(400) == 0 {
			broken.Add(1)
			return []verbs.Status{verbs.StatusRetryExceeded, verbs.StatusRemoteAccess, verbs.StatusRemoteOp, verbs.StatusRetryExceeded}[rand.N(4)]
		}
		return verbs.StatusOK
	})
	failing.Store(fails)

	var mu sync.Mutex
	kinds := map[int]int{}  // length of each sent message, by timestamp; -1 - n: a pull of n
	starts := map[int]int{} // first timestamp of a batch, by that of its answer
	pulls := map[int]*randomPull{}
	stop := make(chan bool)
	var all, releases sync.WaitGroup
	hold := func(m *van.Message, check func(string), rng *rand.Rand) {
		switch k := rng.IntN(10); {
		case k < 5:
			m.Release()
		default:
			d := time.Duration(rng.IntN(3000)) * time.Microsecond
			if k < 7 {
				d = 0
			}
			releases.Add(1)
			time.AfterFunc(d, func() {
				defer releases.Done()
				check("when it is released")
				m.Release()
			})
		}
	}
	var controlsIn [2]atomic.Int64
	var newest atomic.Int64   // the last push to the registered buffer
	controlsOut := 0          // to the server
	var sentBack atomic.Int64 // to the worker
	controlsIn[0].Store(-1)
	controlsIn[1].Store(-1)
	var dataIn, answersIn atomic.Int64
	serve := rand.New(rand.NewPCG(rng.Uint64(), 1))
	all.Go(func() { // the server
		last := -1
		for {
			var m *van.Message
			select {
			case m = <-s.in:
			case <-stop:
				return
			}
			ts := int(m.Timestamp)
			if m.IsControl() {
				if was := controlsIn[0].Swap(int64(ts)); was+1 != int64(ts) {
					fault("control message %d came to the server after %d", ts, was)
				}
				m.Release()
				continue
			}
			if ts <= last {
				fault("message %d came after %d", ts, last)
			}
			if !fails && ts != last+1 {
				fault("message %d came after %d, nothing failed", ts, last)
			}
			last = ts + max(len(m.Parts), 1) - 1
			dataIn.Add(int64(max(len(m.Parts), 1)))
			mu.Lock()
			n, known := kinds[ts]
			mu.Unlock()
			if !known {
				fault("message %d was not sent", ts)
			}
			if m.IsBatch() {
				lens := randomLens(ts)
				check := func(when string) {
					for i := range m.Parts {
						if p := &m.Parts[i]; p.Push && !equal(p.Vals.Host(), value(lens[i], ts+i)) {
							if p.Key == 9 && p.Placed && newest.Load() != int64(ts) {
								continue // a later push has overwritten the buffer
							}
							fault("part %d of batch %d has %d bytes, or wrong ones, want %d, %s", i, ts, p.Vals.Len(), lens[i], when)
						}
					}
				}
				if len(m.Parts) != len(lens) {
					fault("batch %d has %d parts, want %d", ts, len(m.Parts), len(lens))
				}
				check("when it comes")
				a := push(w, m.Key, ts, nil)
				if a.Request = false; !m.Parts[len(lens)-1].Push {
					a = answerTo(9, answerSeed+ts, m.Parts)
				}
				_ = s.sendMore(a, serve.IntN(2) == 0)
				hold(m, check, serve)
			} else if n >= 0 {
				check := func(when string) {
					if m.Vals.Len() != n || n > 0 && n <= 4096 && m.Key == 9 && !m.Placed || n > 0 && !equal(m.Vals.Host(), value(n, ts)) {
						if m.Vals.Len() == n && m.Placed && newest.Load() != int64(ts) {
							return // a later push has overwritten the buffer
						}
						fault("message %d has %d bytes, or wrong ones, want %d, %s", ts, m.Vals.Len(), n, when)
					}
				}
				check("when it comes")
				if m.Frames == 3 && m.Keys.Len() > 8 && le.Uint64(m.Keys.Host()) != uint64(ts*1000) {
					fault("message %d has wrong keys", ts)
				}
				a := push(w, m.Key, ts, nil)
				a.Request = false
				_ = s.sendMore(a, serve.IntN(2) == 0)
				hold(m, check, serve)
			} else {
				_ = s.sendMore(answer(m, value(-1-n, ts)), serve.IntN(2) == 0)
				m.Release()
			}
			if serve.IntN(20) == 0 {
				c := control(w, int(sentBack.Load()))
				if s.Send(c) == nil {
					sentBack.Add(1)
				}
			}
			if len(s.in) == 0 {
				s.push(9)
			}
		}
	})
	took := rand.New(rand.NewPCG(rng.Uint64(), 2))
	all.Go(func() { // the answers
		last := -1
		for {
			var m *van.Message
			select {
			case m = <-w.in:
			case <-stop:
				return
			}
			ts := int(m.Timestamp)
			if m.IsControl() {
				if was := controlsIn[1].Swap(int64(ts)); was+1 != int64(ts) {
					fault("control message %d came to the worker after %d", ts, was)
				}
				m.Release()
				continue
			}
			if ts <= last {
				fault("answer %d came after %d", ts, last)
			}
			last = ts
			mu.Lock()
			p, first := pulls[ts], ts
			if n, of := starts[ts]; of {
				first = n
				answersIn.Add(int64(len(randomLens(n))))
			} else {
				answersIn.Add(1)
			}
			if p != nil && !p.canceled && !p.right(m, ts, first) {
				fault("answer %d: wrong bytes in the pull tensor of %d", ts, p.n)
			}
			delete(pulls, ts)
			mu.Unlock()
			hold(m, func(string) {}, took)
		}
	})
	giveUp := func(ts int, p *randomPull) { // mu is not held
		w.Invalidate(backend.Bytes(p.dst))
		mu.Lock()
		p.canceled = true
		for i := range p.dst {
			p.dst[i] = 0xee
		}
		mu.Unlock()
	}
	peerOf := func(n *testNode, id int) *peer { return (*n.tables.peers.Load())[id] }
	up := func(n *testNode, id int) bool {
		p := peerOf(n, id)
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.link != nil && !p.state.lost && !p.state.oneWay && p.sender.Waiting() == 0 && p.link.queue.Idle()
	}
	var given []*randomPull
	ts := 0
	for range rounds {
		n := 1 + rng.IntN(8)
		for k := range n {
			if rng.IntN(12) == 0 {
				c := control(s, controlsOut)
				if w.sendMore(c, k+1 < n) == nil {
					controlsOut++
				}
				continue
			}
			size := rng.IntN(700)
			if rng.IntN(5) == 0 {
				size = rng.IntN(4001)
			}
			if rng.IntN(6) == 0 {
				size = 0
			}
			if rng.IntN(200) == 0 {
				size = 20000
			}
			var m *van.Message
			var p *randomPull
			kind, parts, answered := size, 1, ts
			switch rng.IntN(6) {
			case 4, 5:
				lens := randomLens(ts)
				m, parts, size = batch(s, ts, ts, lens...), len(lens), 0
				if m.Parts[0].Push && rng.IntN(4) == 0 {
					m.Parts[0].Key = 9
					m.WriteDirectory()
					newest.Store(int64(ts))
				}
				for _, n := range lens {
					size -= min(n, 0)
				}
				p = &randomPull{dst: make([]byte, size), n: size, lens: lens}
				at := 0
				for i := range m.Parts {
					if x := &m.Parts[i]; !x.Push {
						x.Into = backend.Bytes(p.dst[at:][:x.Len])
						x.Addr = x.Into.Addr()
						at += x.Len
					} else if size > 0 {
						answered = ts + i + 1
					}
				}
			case 0:
				p = &randomPull{dst: make([]byte, size), n: size}
				m = pull(s, uint64(rng.IntN(4)), ts, p.dst)
				kind = -1 - size
			case 1:
				keys := 1 + rng.IntN(5)
				m = pushMany(s, keys, ts, value(size, ts))
			default:
				m = push(s, uint64(rng.IntN(4)), ts, value(size, ts))
			}
			if m.Push && m.Frames == 2 && rng.IntN(10) == 0 {
				m.Key = 9 // it has a registered buffer
				le.PutUint64(m.Keys.Host(), 9)
				newest.Store(int64(ts))
			} else if !m.IsBatch() && rng.IntN(30) == 0 {
				m.Body = make([]byte, rng.IntN(3000))
			}
			more := k+1 < n || rng.IntN(4) == 0
			mu.Lock()
			kinds[ts] = kind
			if p != nil && size > 0 {
				pulls[answered] = p
			}
			if parts > 1 || answered > ts {
				starts[answered] = ts
			}
			mu.Unlock()
			if err := w.sendMore(m, more); err != nil {
				mu.Lock()
				delete(pulls, answered)
				mu.Unlock()
				if !fails {
					fault("Send: %v", err)
					continue
				}
				ts += parts
				r.until("the worker is connected again", func() bool { w.push(8); return up(w, 8) })
				continue
			}
			if p != nil && size > 0 && revoking && rng.IntN(6) == 0 {
				giveUp(ts, p)
				given = append(given, p)
			}
			ts += parts
		}
		if rng.IntN(3) == 0 {
			w.push(8)
		}
		if !fails {
			w.push(8)
			r.until("the server has taken most", func() bool { return ts-int(dataIn.Load()) <= 60 })
		}
		if rng.IntN(8) == 0 {
			r.until("everything has left", func() bool { w.push(8); return up(w, 8) })
		}
	}
	failing.Store(false)
	w.push(8)
	r.until("both are connected and have sent all", func() bool {
		w.push(8)
		s.push(9)
		return up(w, 8) && up(s, 9) && len(w.in) == 0 && len(s.in) == 0
	})
	r.until("all control messages have come to the server", func() bool { return controlsIn[0].Load()+1 == int64(controlsOut) })
	r.until("all control messages have come to the worker", func() bool { return controlsIn[1].Load()+1 == sentBack.Load() })
	if !fails {
		r.until("all have come", func() bool { return int(dataIn.Load()) == ts && int(answersIn.Load()) == ts })
	}
	// No slot is lost: each end returns all its slots when it is asked to. Messages may still be in flight.
	for _, e := range []struct {
		from, to *testNode
		id       int
	}{{w, s, 8}, {s, w, 9}} {
		left := ""
		defer func() {
			if left != "" {
				r.Logf("%s\n%s\n%s", left, e.from.logged.String(), e.to.logged.String())
			}
		}()
		r.until(van.NodeName(e.id)+" has all its slots back", func() bool {
			p := peerOf(e.from, e.id)
			p.mu.Lock()
			l := p.link
			p.mu.Unlock()
			if l == nil {
				left = "there is no connection"
				return false
			}
			p.handleReclaim(l, &reclaimRequest{slots: maxIndex, bytes: 1 << 40})
			if left = ""; e.to.budget.slots.Len() > 0 {
				left = slotsLeft(e.to, p)
			}
			return left == ""
		})
	}
	close(stop)
	all.Wait()
	releases.Wait()
	for _, p := range given {
		for _, b := range p.dst {
			if b != 0xee {
				fault("memory of a canceled request was written to")
				break
			}
		}
	}
	if n := w.Stats().Malformed + s.Stats().Malformed; n > 0 {
		fault("%d malformed messages\n%s\n%s", n, w.logged.String(), s.logged.String())
	}
	r.Logf("%d messages, %d came, %d answers, %d faults of the network", ts, dataIn.Load(), answersIn.Load(), broken.Load())
}

// slotsLeft describes the slots that n has granted, and the state of p, their user.
func slotsLeft(n *testNode, p *peer) string {
	var b strings.Builder
	n.device0().exclusive(func() { // a new slot is in the table before it is complete
		n.budget.slots.Each(func(l *receiveSlot) {
			in := l.Owner.(*inbound)
			in.mu.Lock()
			owed := slices.Contains(in.owed.credits, uint16(l.Index()))
			in.mu.Unlock()
			fmt.Fprintf(&b, "slot %d: %+v, %d bytes, one-shot %v, %d holders; credit owed: %v; connection %d, gone: %v, superseded: %v\n",
				l.Index(), l.Route, l.Data, l.OneShot, l.Holders(), owed, in.handshake.epoch, in.failed.Load(), in.process.superseded.Load())
		})
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != nil {
		fmt.Fprintf(&b, "its user: connection %d, %d messages wait, returns %v, idle: %v", p.link.epoch, p.sender.Waiting(), p.sender.Returns(), p.link.queue.Idle())
	}
	return b.String()
}
