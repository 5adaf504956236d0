package fakeverbs

import (
	"bytes"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func TestWriteAndSend(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	src, dst := a.memory(100, 0), b.memory(100, remote)
	copy(src.b, "payload")
	msg := a.memory(5, 0)
	copy(msg.b, "start")

	plain := a.write(verbs.OpWrite, 1, 0, src, dst)
	plain.Flags = 0
	a.post(plain, a.write(verbs.OpWriteImm, 2, 0x8001, src, dst), a.send(3, 9, msg))
	if !bytes.Equal(dst.b, src.b) {
		t.Fatalf("written %q", dst.b)
	}
	c := a.poll(2)
	a.wantStatus(c[0], 2, verbs.StatusOK)
	a.wantStatus(c[1], 3, verbs.StatusOK)
	a.quiet()
	c = b.poll(2)
	want := verbs.Completion{Type: verbs.RecvWrite, Cookie: 7, QP: b.qp.Handle(), Imm: 0x8001, Len: 100}
	if c[0] != want {
		t.Errorf("completion %+v, want %+v", c[0], want)
	}
	want = verbs.Completion{Type: verbs.RecvSend, Cookie: 7, QP: b.qp.Handle(), Imm: 9, Len: 5}
	copy(want.Data[:], "start")
	if c[1] != want {
		t.Errorf("completion %+v, want %+v", c[1], want)
	}
}

func TestInline(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	if a.qp.MaxInline() != 512 {
		t.Fatalf("inline %d granted, want 512", a.qp.MaxInline())
	}
	src := a.memory(513, 0)
	check(t, src.Deregister())
	dst := b.memory(513, remote)
	src.b[0] = 1
	wr := a.write(verbs.OpWrite, 1, 0, src, dst)
	wr.Flags |= verbs.Inline
	if n, err := a.dev.Post([]verbs.SendWR{wr}); n != 0 || err == nil {
		t.Fatalf("513 bytes inline: posted %d, %v", n, err)
	} else {
		wantErr(t, err, syscall.EINVAL)
	}
	wr.Len = 512
	w.net.Hold()
	a.post(wr)
	src.b[0] = 2 // the inline bytes were copied
	w.net.Release()
	a.wantStatus(a.poll(1)[0], 1, verbs.StatusOK)
	if dst.b[0] != 1 {
		t.Errorf("written %d, want 1", dst.b[0])
	}
}

func TestRemoteErrors(t *testing.T) {
	tests := []struct {
		name   string
		change func(b *end, wr *verbs.SendWR, dst memory)
		want   verbs.Status
		peer   int // failed receive requests at the peer
	}{
		{"rkey", func(_ *end, wr *verbs.SendWR, _ memory) { wr.RKey++ }, verbs.StatusRemoteAccess, 4},
		{"lkey as rkey", func(_ *end, wr *verbs.SendWR, dst memory) { wr.RKey = dst.LKey() }, verbs.StatusRemoteAccess, 4},
		{"below", func(_ *end, wr *verbs.SendWR, _ memory) { wr.RemoteAddr-- }, verbs.StatusRemoteAccess, 4},
		{"beyond", func(_ *end, wr *verbs.SendWR, _ memory) { wr.RemoteAddr++ }, verbs.StatusRemoteAccess, 4},
		{"wrapped", func(_ *end, wr *verbs.SendWR, _ memory) { wr.RemoteAddr = ^uint64(0) - 5 }, verbs.StatusRemoteAccess, 4},
		{"deregistered", func(b *end, _ *verbs.SendWR, dst memory) { check(b.t, dst.Deregister()) }, verbs.StatusRemoteAccess, 4},
		{"read only", func(b *end, wr *verbs.SendWR, _ memory) {
			m := b.memory(64, verbs.LocalWrite)
			wr.RKey, wr.RemoteAddr = m.RKey(), m.addr()
		}, verbs.StatusRemoteAccess, 4},
		{"lkey", func(_ *end, wr *verbs.SendWR, _ memory) { wr.LKey++ }, verbs.StatusLocalProt, 0},
		{"local bounds", func(_ *end, wr *verbs.SendWR, _ memory) { wr.LocalAddr++ }, verbs.StatusLocalProt, 0},
		{"message too long", func(b *end, wr *verbs.SendWR, _ memory) {
			b.id.(*connID).net.Configure(func(c *Config) { c.MaxMsg = 63 })
		}, verbs.StatusLocalLength, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			a, b := w.pair(options, params)
			src, dst := a.memory(64, 0), b.memory(64, remote)
			src.b[0] = 1
			wr := a.write(verbs.OpWriteImm, 1, 0, src, dst)
			wr.Flags = 0 // a failure completes even so
			test.change(b, &wr, dst)
			after := a.write(verbs.OpWrite, 2, 0, src, dst)
			a.post(wr, after)
			c := a.poll(6)
			a.wantStatus(c[0], 1, test.want)
			a.wantStatus(c[1], 2, verbs.StatusFlushed)
			for _, c := range c[2:] {
				if c.Type != verbs.RecvFailed || c.Status != verbs.StatusFlushed {
					t.Errorf("completion %+v, want a flushed receive request", c)
				}
			}
			for _, c := range b.poll(test.peer) {
				if c.Type != verbs.RecvFailed || c.Status != verbs.StatusFlushed || c.Cookie != 7 {
					t.Errorf("completion %+v, want a flushed receive request", c)
				}
			}
			b.quiet()
			if dst.b[0] != 0 {
				t.Error("written all the same")
			}
			a.post(after)
			a.wantStatus(a.poll(1)[0], 2, verbs.StatusFlushed)
		})
	}
}

func TestSendTooLong(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	a.post(a.send(1, 0, a.memory(verbs.RecvSize+1, 0)))
	a.wantStatus(a.poll(1)[0], 1, verbs.StatusRemoteInvalid)
	if c := b.poll(1)[0]; c.Type != verbs.RecvFailed || c.Status != verbs.StatusLocalLength {
		t.Errorf("completion %+v, want a local length error", c)
	}
}

func TestReceiverNotReady(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	src, dst := a.memory(8, 0), b.memory(8, remote)
	for i := range 6 {
		a.post(a.write(verbs.OpWriteImm, uint64(i), uint32(i), src, dst))
	}
	a.poll(4)
	a.quiet() // two wait for a receive request
	if got := b.poll(1)[0].Imm; got != 0 {
		t.Errorf("immediate %d, want 0", got)
	}
	a.wantStatus(a.poll(1)[0], 4, verbs.StatusOK)
	a.quiet()
	for i, c := range b.poll(5) {
		if c.Imm != uint32(i+1) {
			t.Errorf("immediate %d, want %d", c.Imm, i+1)
		}
	}
	a.wantStatus(a.poll(1)[0], 5, verbs.StatusOK)
}

func TestReceiverNotReadyFails(t *testing.T) {
	for _, retries := range []int{6, 7} {
		t.Run(fmt.Sprint(retries), func(t *testing.T) {
			w := newWorld(t, func(c *Config) { c.RNR = time.Millisecond })
			o, p := options, params
			o.RecvDepth = 1
			a := w.resolved(1, o)
			check(t, a.id.Connect(p))
			p.RNRRetryCount = retries // the other side uses it
			b := w.accept(o, p)
			w.next(w.ca, verbs.Established)
			src := a.memory(8, 0)
			a.post(a.send(1, 1, src), a.send(2, 2, src))
			a.wantStatus(a.poll(1)[0], 1, verbs.StatusOK)
			if retries == 7 {
				b.poll(2)
				a.wantStatus(a.poll(1)[0], 2, verbs.StatusOK)
				return
			}
			a.wantStatus(a.poll(1)[0], 2, verbs.StatusRNRExceeded)
		})
	}
}

func TestSendDepth(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	src, dst := a.memory(8, 0), b.memory(8, remote)
	wrs := make([]verbs.SendWR, 9)
	for i := range wrs {
		wrs[i] = a.write(verbs.OpWrite, uint64(i), 0, src, dst)
		if i != 3 {
			wrs[i].Flags = 0
		}
	}
	n, err := a.dev.Post(wrs)
	if n != 8 {
		t.Fatalf("posted %d, want 8", n)
	}
	wantErr(t, err, verbs.ErrQueueFull)
	_, err = a.dev.Post(wrs[8:])
	wantErr(t, err, verbs.ErrQueueFull) // it has completed, but the completion was not polled
	a.wantStatus(a.poll(1)[0], 3, verbs.StatusOK)
	if n, err = a.dev.Post(slices.Repeat(wrs[8:], 5)); n != 4 {
		t.Fatalf("posted %d, want 4", n)
	}
	wantErr(t, err, verbs.ErrQueueFull)
}

func TestOverrun(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CQE = 3 })
	var reported []error
	w.net.OnError(func(err error) { reported = append(reported, err) })
	o := options
	o.RecvDepth = 0
	a := w.small(1, o)
	check(t, a.id.Connect(params))
	b := w.accept(options, params)
	w.next(w.ca, verbs.Established)
	if got := a.dev.(*device).size; got != 3 {
		t.Fatalf("capacity %d, want 3", got)
	}
	wantErr(t, a.dev.Reserve(40000), syscall.EINVAL)
	src, dst := a.memory(8, 0), b.memory(8, remote)
	for i := range 4 {
		a.post(a.write(verbs.OpWrite, uint64(i), 0, src, dst))
	}
	a.poll(3)
	_, err := a.dev.Poll(make([]verbs.Completion, 1), 0, long)
	wantErr(t, err, syscall.EOVERFLOW)
	if got := w.net.Errors(); len(got) != 1 || len(reported) != 1 {
		t.Errorf("errors %v, reported %v, want one", got, reported)
	}
}

func TestPollWaits(t *testing.T) {
	w := newWorld(t)
	a, b := w.pair(options, params)
	var out [4]verbs.Completion
	if n, err := b.dev.Poll(out[:], time.Microsecond, time.Microsecond); n != 0 || err != nil {
		t.Fatalf("%d completions, error %v", n, err)
	}
	b.dev.Wake() // the next call that waits
	if n, err := b.dev.Poll(out[:], 0, 0); n != 0 || err != nil {
		t.Fatalf("%d completions, error %v", n, err)
	}
	if n, err := b.dev.Poll(out[:], -1, 0); n != 0 || err != nil {
		t.Fatalf("%d completions, error %v", n, err)
	}
	dst := b.memory(8, remote)
	got := make(chan byte)
	go func() {
		var out [4]verbs.Completion
		n, _ := b.dev.Poll(out[:], -1, 0)
		if n == 0 {
			close(got)
			return
		}
		got <- dst.b[0] // no race: the completion orders it
	}()
	src := a.memory(8, 0)
	src.b[0] = 42
	a.post(a.write(verbs.OpWriteImm, 1, 1, src, dst))
	if v := <-got; v != 42 {
		t.Errorf("read %d, want 42", v)
	}
}

func TestCheckSource(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(src memory)
		want int
	}{
		{"kept", func(memory) {}, 0},
		{"changed", func(src memory) { src.b[0] = 1 }, 2},
		{"deregistered", func(src memory) { must(0, src.Deregister()) }, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) { c.CheckSource = true })
			a, b := w.pair(options, params)
			src, dst := a.memory(8, 0), b.memory(8, remote)
			plain := a.write(verbs.OpWrite, 1, 0, src, dst)
			plain.Flags = 0
			inline := a.write(verbs.OpWrite, 2, 0, src, dst)
			inline.Flags |= verbs.Inline
			a.post(plain, a.write(verbs.OpWrite, 3, 0, src, dst), inline)
			test.do(src)
			a.poll(2)
			if e := w.net.Errors(); len(e) != test.want {
				t.Errorf("errors %v, want %d", e, test.want)
			}
			src.b[0] = 2
			a.quiet()
			if e := w.net.Errors(); len(e) != test.want {
				t.Errorf("errors %v after the completions, want %d", e, test.want)
			}
		})
	}
}
