//go:build linux && cgo && !nordma

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"
)

// inline makes a SEND of b, which must be pinned.
func inline(b []byte, imm uint32) SendWR {
	return SendWR{ID: uint64(imm), Op: OpSendImm, Flags: Signaled | Inline, Imm: imm, LocalAddr: addr(b), Len: uint32(len(b))}
}

// find returns the only completion of the type.
func find(t *testing.T, cs []Completion, typ CompletionType) Completion {
	t.Helper()
	var found []Completion
	for _, c := range cs {
		if c.Type == typ {
			found = append(found, c)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d completions of type %d, want 1: %+v", len(found), typ, cs)
	}
	return found[0]
}

func TestSendBothWays(t *testing.T) {
	r := newRig(t)
	a, b := r.usualPair()
	d := a.dev()
	if d != b.dev() {
		t.Fatal("two Devices for IDs of one channel on one device")
	}
	buf := r.memory(RecvSize)
	for i := range buf {
		buf[i] = byte(i + 1)
	}
	mr := r.register(d, buf, 0)
	for _, c := range []struct{ from, to *end }{{a, b}, {b, a}} {
		for _, n := range []int{0, 1, RecvSize} {
			for _, flags := range []uint32{Signaled, Signaled | Inline} {
				w := SendWR{ID: 1<<62 + 5, Op: OpSendImm, Flags: flags, Imm: 0x01020304, LocalAddr: addr(buf), Len: uint32(n)}
				if flags&Inline == 0 {
					w.LKey = mr.LKey()
				}
				c.from.post(w)
				cs := r.poll(d, 2)
				s, v := find(t, cs, SendDone), find(t, cs, RecvSend)
				if s.Status != StatusOK || s.ID != 1<<62+5 {
					t.Errorf("%d bytes: sent %+v", n, s)
				}
				if v.Status != StatusOK || v.Imm != 0x01020304 || int(v.Len) != n || v.QP != c.to.qp.Handle() || v.Cookie != c.to.cookie ||
					!bytes.Equal(v.Data[:n], buf[:n]) {
					t.Errorf("%d bytes: received %+v", n, v)
				}
			}
		}
	}
	r.none(d)
}

func TestWrite(t *testing.T) {
	const n = 100_000
	r := newRig(t)
	a, b := r.usualPair()
	d := a.dev()
	mapped, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	r.must(err)
	t.Cleanup(func() {
		if err := syscall.Munmap(mapped); err != nil {
			t.Error(err)
		}
	})
	src := r.memory(n)
	for i := range src {
		src[i] = byte(i*7 + i>>8)
	}
	lkey := r.register(d, src, 0).LKey()
	for name, dst := range map[string][]byte{"mmap": mapped, "heap": r.memory(n)} {
		rkey := r.register(d, dst, RemoteWrite).RKey()
		// One chain: the value, unsignaled, and then its end with an immediate.
		a.post(SendWR{Op: OpWrite, LocalAddr: addr(src), LKey: lkey, Len: n - 10, RemoteAddr: addr(dst), RKey: rkey},
			SendWR{ID: 7, Op: OpWriteImm, Flags: Signaled, Imm: 0x8001, LocalAddr: addr(src) + n - 10, LKey: lkey, Len: 10,
				RemoteAddr: addr(dst) + n - 10, RKey: rkey})
		cs := r.poll(d, 2)
		if s := find(t, cs, SendDone); s.ID != 7 || s.Status != StatusOK {
			t.Errorf("%s: sent %+v", name, s)
		}
		v := find(t, cs, RecvWrite)
		if v.Status != StatusOK || v.Imm != 0x8001 || v.Len != 10 || v.QP != b.qp.Handle() || v.Cookie != b.cookie {
			t.Errorf("%s: received %+v", name, v)
		}
		if !bytes.Equal(src, dst) {
			t.Errorf("%s: other bytes have come", name)
		}
	}
	r.none(d)
}

// More messages than the queues hold, with few of them signaled.
func TestManyMessages(t *testing.T) {
	const total = 3000
	r := newRig(t)
	o := QPOptions{SendDepth: 24, RecvDepth: 16, Inline: 8}
	a, b := r.pair(r.listener(), o, o, param(""), param(""))
	d := a.dev()
	buf := r.memory(8)
	var out [16]Completion
	sent, done, got := 0, 0, 0
	var wrs [5]SendWR
	for deadline := time.Now().Add(2 * patience); got < total; {
		if time.Now().After(deadline) {
			t.Fatalf("%d sent, %d received of %d", sent, got, total)
		}
		k := min(len(wrs), total-sent)
		for i := range k {
			wrs[i] = inline(buf, uint32(sent+i))
			wrs[i].QP = a.qp.Handle()
			if (sent+i)%8 != 7 {
				wrs[i].Flags &^= Signaled
			}
		}
		n, err := d.Post(wrs[:k])
		if err != nil && !errors.Is(err, ErrQueueFull) {
			t.Fatal(err)
		}
		sent += n
		n, err = d.Poll(out[:], 0, time.Second)
		r.must(err)
		for _, c := range out[:n] {
			switch {
			case c.Type == SendDone && c.Status == StatusOK && c.ID%8 == 7:
				done++
			case c.Type == RecvSend && c.Status == StatusOK && c.Imm == uint32(got) && c.QP == b.qp.Handle():
				got++
			default:
				t.Fatalf("after %d: %+v", got, c)
			}
		}
	}
	for ; done < total/8; done++ {
		if c := r.poll(d, 1)[0]; c.Type != SendDone {
			t.Fatalf("%+v", c)
		}
	}
	r.none(d)
}

func TestQueueFull(t *testing.T) {
	r := newRig(t)
	a, _ := r.pair(r.listener(), QPOptions{SendDepth: 5, RecvDepth: 16, Inline: 8}, usual, param(""), param(""))
	d := a.dev()
	buf := r.memory(8)
	var wrs [7]SendWR
	for i := range wrs {
		wrs[i] = inline(buf, uint32(i))
		wrs[i].QP = a.qp.Handle()
	}
	for round := range 3 {
		n, err := d.Post(wrs[:])
		if n != 5 || !errors.Is(err, ErrQueueFull) {
			t.Fatalf("round %d: Post = %d, %v, want 5 and a full queue", round, n, err)
		}
		if n, err = d.Post(wrs[:1]); n != 0 || !errors.Is(err, ErrQueueFull) {
			t.Fatalf("round %d: Post = %d, %v, want a full queue", round, n, err)
		}
		r.poll(d, 10)
	}
	r.none(d)
}

func TestBadRequests(t *testing.T) {
	r := newRig(t)
	a, _ := r.usualPair()
	d := a.dev()
	h := a.qp.Handle()
	buf := r.memory(4096)
	good := inline(buf[:8], 1)
	good.QP = h
	for name, c := range map[string]struct {
		w    SendWR
		want error
	}{
		"no handle":            {SendWR{Op: OpWrite}, ErrClosed},
		"another device":       {SendWR{Op: OpWrite, QP: h ^ 1<<60}, ErrClosed},
		"another generation":   {SendWR{Op: OpWrite, QP: h + 1<<20}, ErrClosed},
		"another index":        {SendWR{Op: OpWrite, QP: h + 3}, ErrClosed},
		"an index far out":     {SendWR{Op: OpWrite, QP: h | 1<<20 - 1}, ErrClosed},
		"everything":           {SendWR{Op: OpWrite, QP: ^Handle(0)}, ErrClosed},
		"too much inline":      {SendWR{Op: OpSendImm, Flags: Inline, QP: h, LocalAddr: addr(buf), Len: uint32(a.qp.MaxInline() + 1)}, syscall.EMSGSIZE},
		"an opcode of no kind": {SendWR{Op: 77, QP: h}, nil},
		"no opcode":            {SendWR{QP: h}, nil},
	} {
		n, err := d.Post([]SendWR{good, c.w, good})
		if n != 1 || err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: Post = %d, %v, want 1 and %v", name, n, err, c.want)
		}
		r.poll(d, 2)
	}
	if n, err := d.Post(nil); n != 0 || err != nil {
		t.Errorf("Post of nothing = %d, %v", n, err)
	}
	r.none(d)
}

func TestPostBeforeConnection(t *testing.T) {
	r := newRig(t)
	a := r.resolve(r.listener().id.LocalAddr())
	a.create(usual)
	w := inline(r.memory(8), 1)
	w.QP = a.qp.Handle()
	if n, err := a.dev().Post([]SendWR{w}); n != 0 || !errors.Is(err, syscall.ENOTCONN) {
		t.Fatalf("Post = %d, %v, want ENOTCONN", n, err)
	}
}

// A write with a wrong key breaks the queue pair on both sides.
func TestRemoteAccess(t *testing.T) {
	r := newRig(t)
	a, b := r.usualPair()
	d := a.dev()
	buf := r.memory(64)
	mr := r.register(d, buf, RemoteWrite)
	a.post(SendWR{ID: 1, Op: OpWrite, Flags: Signaled, LocalAddr: addr(buf), LKey: mr.LKey(), Len: 8, RemoteAddr: addr(buf),
		RKey: mr.RKey() + 12345},
		SendWR{ID: 2, Op: OpWrite, LocalAddr: addr(buf), LKey: mr.LKey(), Len: 8, RemoteAddr: addr(buf), RKey: mr.RKey()})
	seen := map[uint64]Status{}
	for range 2 {
		for {
			c := r.poll(d, 1)[0]
			if c.Type == SendDone {
				seen[c.ID] = c.Status
				break
			}
			if c.Type != RecvFailed || c.Status == StatusOK {
				t.Fatalf("%+v", c)
			}
		}
	}
	if seen[1] != StatusRemoteAccess || seen[2] != StatusFlushed {
		t.Errorf("statuses %v, want %v, %v", seen, StatusRemoteAccess, StatusFlushed)
	}
	r.must(a.id.Disconnect())
	r.must(b.id.Disconnect())
}

// Every receive request is flushed exactly once when a connection ends.
func TestDisconnectFlushes(t *testing.T) {
	r := newRig(t)
	o := QPOptions{SendDepth: 8, RecvDepth: 10, Inline: 8}
	a, b := r.pair(r.listener(), o, o, param(""), param(""))
	d := a.dev()
	r.must(a.id.Disconnect())
	b.next(Disconnected)
	r.must(b.id.Disconnect())
	a.next(Disconnected)
	count := map[Handle]int{}
	for _, c := range r.poll(d, 20) {
		if c.Type != RecvFailed || c.Status != StatusFlushed || (c.QP == a.qp.Handle()) != (c.Cookie == a.cookie) {
			t.Fatalf("%+v", c)
		}
		count[c.QP]++
	}
	if count[a.qp.Handle()] != 10 || count[b.qp.Handle()] != 10 {
		t.Errorf("flushed %v, want 10 of each", count)
	}
	a.post(SendWR{ID: 9, Op: OpWrite})
	if c := r.poll(d, 1)[0]; c.Type != SendDone || c.ID != 9 || c.Status != StatusFlushed {
		t.Errorf("posted afterwards: %+v", c)
	}
	r.none(d)
}

// The connection to a peer without receive requests breaks after the permitted number of retries.
func TestReceiverNotReady(t *testing.T) {
	r := newRig(t)
	p := param("")
	p.RNRRetryCount = 1
	a, _ := r.pair(r.listener(), QPOptions{SendDepth: 8, Inline: 8}, QPOptions{SendDepth: 8}, p, p)
	a.post(inline(r.memory(8), 1))
	if c := r.poll(a.dev(), 1)[0]; c.Type != SendDone || c.ID != 1 || c.Status != StatusRNRExceeded {
		t.Errorf("%+v, want %v", c, StatusRNRExceeded)
	}
	r.none(a.dev())
}

// One receive request serves many messages, since a sender with endless retries waits until it is posted again.
func TestReceiverSlow(t *testing.T) {
	r := newRig(t)
	a, _ := r.pair(r.listener(), usual, QPOptions{SendDepth: 8, RecvDepth: 1}, param(""), param(""))
	buf := r.memory(8)
	a.post(inline(buf, 1), inline(buf, 2), inline(buf, 3))
	for _, c := range r.poll(a.dev(), 6) {
		if c.Status != StatusOK {
			t.Errorf("%+v", c)
		}
	}
}

func TestTwoQueuePairsConcurrently(t *testing.T) {
	const each, posters = 200, 4
	r := newRig(t)
	l := r.listener()
	o := QPOptions{SendDepth: 32, RecvDepth: 64, Inline: 8}
	a1, b1 := r.pair(l, o, o, param(""), param(""))
	a2, b2 := r.pair(l, o, o, param(""), param(""))
	d := a1.dev()
	if a1.qp.Handle() == a2.qp.Handle() || a1.qp.Num() == a2.qp.Num() {
		t.Fatal("the same queue pair twice")
	}
	buf := r.memory(8)
	var wg sync.WaitGroup
	errs := make(chan error, posters)
	for p := range posters {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := 0; i < each; {
				w := [2]SendWR{inline(buf, uint32(p*each+i)), inline(buf, uint32(p*each+i))}
				w[0].QP, w[1].QP = a1.qp.Handle(), a2.qp.Handle()
				var n int
				var err error
				for n < 2 { // a queue may be full: until both are posted
					var k int
					k, err = d.Post(w[n:])
					if n += k; err != nil && !errors.Is(err, ErrQueueFull) {
						errs <- err
						return
					}
				}
				i++
			}
		}()
	}
	got := map[Handle]map[uint32]bool{b1.qp.Handle(): {}, b2.qp.Handle(): {}}
	for range 2 * 2 * each * posters {
		c := r.poll(d, 1)[0]
		if c.Status != StatusOK {
			t.Fatalf("%+v", c)
		}
		if c.Type == RecvSend {
			if got[c.QP][c.Imm] {
				t.Fatalf("twice: %+v", c)
			}
			got[c.QP][c.Imm] = true
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	for h, m := range got {
		if len(m) != each*posters {
			t.Errorf("queue pair %#x: %d received, want %d", h, len(m), each*posters)
		}
	}
	r.none(d)
}

// Posting, polling and destroying concurrently gives completions or errors, but no completion of a destroyed queue pair.
func TestDestroyWhilePosting(t *testing.T) {
	r := newRig(t)
	l := r.listener()
	buf := r.memory(8)
	keep, _ := r.pair(l, usual, usual, param(""), param(""))
	d := keep.dev()
	for round := range 8 {
		a, b := r.pair(l, usual, usual, param(""), param(""))
		w := inline(buf, 1)
		w.QP = a.qp.Handle()
		var wg sync.WaitGroup
		errs := make(chan error, 3)
		started := make(chan struct{}, 64)
		for range 3 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for {
					_, err := d.Post([]SendWR{w})
					if errors.Is(err, ErrClosed) {
						return
					}
					if err != nil && !errors.Is(err, ErrQueueFull) {
						errs <- fmt.Errorf("round %d: %w", round, err)
						return
					}
					select {
					case started <- struct{}{}:
					default:
					}
				}
			}()
		}
		<-started
		<-started
		r.poll(d, 2)
		if round%2 == 0 {
			r.must(b.id.Destroy())
		}
		r.must(a.id.Destroy())
		r.must(b.id.Destroy())
		wg.Wait()
		close(errs)
		for err := range errs {
			t.Error(err)
		}
		if n, err := d.Post([]SendWR{w}); n != 0 || !errors.Is(err, ErrClosed) {
			t.Errorf("Post on a destroyed queue pair = %d, %v", n, err)
		}
		r.none(d) // although its completions may be in the queue
	}
}

func TestPostAndPollDoNotAllocate(t *testing.T) {
	r := newRig(t)
	a, _ := r.usualPair()
	d := a.dev()
	buf := r.memory(8)
	wrs := []SendWR{inline(buf, 1)}
	wrs[0].QP = a.qp.Handle()
	out := make([]Completion, 8)
	posts, polls := d.(CallCounter).Calls()
	rounds := uint64(0)
	if n := testing.AllocsPerRun(50, func() {
		rounds++
		if n, err := d.Post(wrs); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		for got := 0; got < 2; {
			n, err := d.Poll(out, time.Second, time.Second)
			if err != nil || n == 0 {
				t.Fatal(n, err)
			}
			got += n
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
	p, q := d.(CallCounter).Calls()
	if p-posts != rounds || q-polls > 2*rounds || q == polls {
		t.Errorf("%d posts and %d polls for %d messages", p-posts, q-polls, rounds)
	}
}
