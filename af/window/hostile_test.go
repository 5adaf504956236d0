package window

// Messages of lying, stale and confused ranks have no effect.

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// lie sends a message from rank 0 to rank 1 of r as no window would.
func (r *rig) lie(body []byte, data []byte, ts int32) {
	r.Helper()
	p := r.windows[0].peers[1]
	m := p.message(&van.Message{}, &note{}, true, ts)
	m.Body = body
	if data != nil {
		datamsg.SetData(m, keyMem, backend.Bytes(data), backend.Mem{}, van.TypeOther)
		m.ValLen = int32(len(data))
	}
	if err := r.windows[0].base.app.Send(m); err != nil {
		r.Fatal(err)
	}
}

// refuses waits until rank 1 has refused n messages.
func (r *rig) refuses(n uint64) {
	r.Helper()
	for end := time.Now().Add(testTime); r.windows[1].Refused() < n; {
		if time.Now().After(end) {
			r.Fatalf("%d messages were refused, want %d", r.windows[1].Refused(), n)
		}
		r.windows[1].base.app.Poll(func() bool { return r.windows[1].Refused() >= n })
	}
}

// TestLiar: messages that make no sense are refused and counted, write nothing and signal nothing. Honest messages
// still arrive.
func TestLiar(t *testing.T) {
	transports(t, func(t *testing.T, o testcluster.Options) {
		const size = 64
		r := newRig(t, o, 2, Options{Size: size, Signals: 1})
		w := r.windows[0]
		honest := note{verb: verbPut, window: w.base.child.Number, epoch: w.base.child.Epoch, signal: 0}
		bad := func(change func(n *note)) []byte {
			n := honest
			change(&n)
			return n.append(nil)
		}
		data := bytes.Repeat([]byte{0xEE}, 40)
		// The first of them take a number each, the others do not count as messages of the window.
		lies := []struct {
			body []byte
			data []byte
		}{
			{bad(func(n *note) { n.offset = size - 39 }), data},
			{bad(func(n *note) { n.seq, n.offset = 1, size+1 }), nil},
			{bad(func(n *note) { n.seq, n.offset = 2, ^uint64(0)-20 }), data},
			{bad(func(n *note) { n.seq, n.offset = 3, 1<<63 }), data},
			{bad(func(n *note) { n.seq, n.signal = 4, 1 }), data},
			{bad(func(n *note) { n.seq, n.signal = 5, noSignal-1 }), nil},
			{bad(func(n *note) { n.seq, n.epoch = 6, n.epoch-1 }), data},
			{bad(func(n *note) { n.seq, n.window = 6, n.window+1 }), data},
			{bad(func(n *note) { n.seq = 5 }), data}, // a number again
			{bad(func(n *note) { n.seq = 6 + ring }), data},
			{bad(func(n *note) { n.seq = 1 << 63 }), data},
			{bad(func(n *note) { n.seq, n.verb = 6, lastVerb+1 }), data},
			{bad(func(n *note) { n.seq, n.verb = 6, 0 }), data},
			{bad(func(n *note) { n.verb, n.taken = verbTaken, 1 }), nil},
			{bad(func(n *note) { n.verb, n.bytes = verbTaken, 1 }), nil},
			{honest.append(nil)[:noteLen-1], data},
			{nil, data},
			{append([]byte{9}, honest.append(nil)[1:]...), data},
		}
		for i, l := range lies {
			r.lie(l.body, l.data, int32(1000+2*i)) // a transport that sends again must not take them for others
			r.refuses(uint64(i + 1))
		}
		if !bytes.Equal(r.windows[1].Bytes(), make([]byte, size)) {
			t.Errorf("the window has become %x", r.windows[1].Bytes())
		}
		if n := r.windows[1].peers[0].in.signals[0].Load(); n != 0 {
			t.Errorf("%d signals were counted", n)
		}
		p := w.peers[1]
		p.out.next.Store(6) // the lies that were messages
		p.out.bytes.Store(r.windows[1].peers[0].in.takenBytes.Load())
		want := content(40, 1)
		if err := w.PutSignal(t.Context(), 1, 24, tensor(want), 0); err != nil {
			t.Fatal(err)
		}
		if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil || !bytes.Equal(r.windows[1].Bytes()[24:], want) {
			t.Errorf("an honest put: %v", err)
		}
		if err := w.Flush(t.Context(), 1); err != nil {
			t.Error(err)
		}
	})
}

// TestOrder: messages that arrive in another order than they were sent take effect in the right one.
func TestOrder(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 2, Options{Size: 8, Signals: 1})
	w := r.windows[0]
	n := note{verb: verbPut, window: w.base.child.Number, epoch: w.base.child.Epoch, signal: noSignal}
	with := func(seq uint64, signal uint16) []byte {
		m := n
		m.seq, m.signal = seq, signal
		return m.append(nil)
	}
	r.lie(with(2, 0), nil, 4)
	r.lie(with(1, noSignal), []byte("22222222"), 2)
	r.lie(with(1, noSignal), []byte("xxxxxxxx"), 2)
	r.refuses(1) // the double
	if n := r.windows[1].peers[0].in.signals[0].Load(); n != 0 {
		t.Fatal("a signal was seen before what was put before it")
	}
	r.lie(with(0, noSignal), []byte("11111111"), 0)
	if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil || string(r.windows[1].Bytes()) != "22222222" {
		t.Errorf("got %q, %v", r.windows[1].Bytes(), err)
	}
}

// TestStranger: a node that is no rank, and a rank in a window that was closed, write nothing.
func TestStranger(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 2, Options{Size: 8, Signals: 1})
	memory := r.windows[1].Bytes()
	w := r.windows[0]
	n := note{verb: verbPut, window: w.base.child.Number, epoch: w.base.child.Epoch, signal: 0}
	server := (*cluster.Node)(r.c.Servers[0]).App()
	m := &van.Message{}
	w.peers[1].message(m, &note{}, true, 0)
	m.Body = n.append(m.Body[:0])
	datamsg.SetData(m, keyMem, backend.Bytes([]byte("stranger")), backend.Mem{}, van.TypeOther)
	m.Receiver = int(r.c.Workers[1].ID())
	if err := server.Send(m); err != nil {
		t.Fatal(err)
	}
	r.refuses(1)
	if err := r.windows[1].Close(); err != nil {
		t.Fatal(err)
	}
	r.lie(n.append(nil), []byte("too late"), 0)
	r.refuses(2)
	if !bytes.Equal(memory, make([]byte, 8)) {
		t.Errorf("the memory has become %q", memory)
	}
	if err := r.windows[1].WaitSignal(t.Context(), 0, 0); !errors.Is(err, van.ErrClosed) {
		t.Errorf("a signal of a closed window: %v", err)
	}
}

// FuzzNote: no body makes the parser panic, and every accepted body is written the same way.
func FuzzNote(f *testing.F) {
	f.Add((&note{verb: verbPut, signal: 3, window: 4, epoch: 5, seq: 6, offset: 7}).append(nil))
	f.Add((&note{verb: verbClose, signal: noSignal, taken: 1 << 63, bytes: ^uint64(0)}).append(nil))
	f.Add(shape{1, 2, 3, true, false, true}.append(nil))
	f.Add(append(shape{1, 2, 3, true, false, false}.append(nil)[:shapeLen-1], 8))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := parse(b); err == nil {
			if got := n.append(nil); !bytes.Equal(got, b) {
				t.Errorf("%x becomes %x", b, got)
			}
		} else if !errors.Is(err, van.ErrMalformed) {
			t.Errorf("%x: %v, want ErrMalformed", b, err)
		}
		if s, err := parseShape(b); err == nil {
			if got := s.append(nil); !bytes.Equal(got, b) {
				t.Errorf("shape %x becomes %x", b, got)
			}
		}
	})
}
