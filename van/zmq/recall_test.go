package zmq

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// gate forwards connections to addr, and nothing while it is shut.
type gate struct {
	sync.Mutex // held while it is shut
	port       int
}

func newGate(t *testing.T, addr string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	g := &gate{port: l.Addr().(*net.TCPAddr).Port}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("tcp", addr)
			if err != nil {
				return
			}
			forward := func(to, from net.Conn) {
				defer to.Close()
				for buf := make([]byte, 64<<10); ; {
					n, err := from.Read(buf)
					g.Lock()
					_, werr := to.Write(buf[:n])
					g.Unlock()
					if err != nil || werr != nil {
						return
					}
				}
			}
			go forward(d, c)
			go forward(c, d)
		}
	}()
	return g
}

// throughGate makes a worker whose data for server goes through a gate.
func throughGate(t *testing.T, server *node, incarnation uint32) (*node, *gate) {
	t.Helper()
	worker := newNode(t, 9, incarnation, nil, nil)
	g := newGate(t, server.self.Addr())
	rec := server.self
	rec.Port = g.port
	if err := worker.Connect(t.Context(), 8, rec); err != nil {
		t.Fatal(err)
	}
	server.connect(t, worker)
	return worker, g
}

func filled(n int, b byte) []byte { return bytes.Repeat([]byte{b}, n) }

// TestRecall: libzmq has sent nothing or only a part of canceled requests, and their memory is overwritten. No receiver
// sees the new contents. Other requests arrive, even from the same
// memory.
func TestRecall(t *testing.T) {
	for name, size := range map[string]int{"copied by libzmq's threads": 100, "small": bundleBelow, "large": 1 << 20} {
		for _, bundles := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, bundles %t", name, bundles), func(t *testing.T) { testRecall(t, size, bundles) })
		}
	}
}

func testRecall(t *testing.T, size int, bundles bool) {
	server := newNode(t, 8, 5, nil, nil)
	if !bundles {
		server.older()
	}
	worker, g := throughGate(t, server, 7)
	worker.must(t, push(8, 0, filled(size, 1)))
	server.next(t)
	g.Lock()
	const n = 60
	vals := make([][]byte, n)
	var done counter
	for i := range n {
		vals[i] = filled(size, byte(i))
		m := push(8, 10+i, vals[i])
		m.More, m.Done = i%7 == 3, &done
		worker.must(t, m)
	}
	shared := push(8, 500, vals[n-1]) // another request, which is not canceled
	worker.must(t, shared)
	worker.Cancel(van.Requests{First: 10, Count: n / 2})
	worker.Cancel(van.Requests{First: 10 + n/2, Count: n/2 - 1})
	worker.Cancel(van.Requests{First: 500, Count: 1, Customer: 1}) // another customer's, and another application's
	worker.Cancel(van.Requests{First: 500, Count: 1, App: 1})
	for i := range n - 1 {
		copy(vals[i], filled(size, 0xff))
	}
	worker.must(t, push(8, 900, filled(size, 9)))
	g.Unlock()
	whole, came := 0, map[int32]bool{}
	for last := int32(0); last != 900; {
		m := server.next(t)
		want := byte(m.Timestamp - 10)
		switch last = m.Timestamp; last {
		case 10 + n - 1, 500:
			want = n - 1
		case 900:
			want = 9
		}
		if b := m.Vals.Host(); !bytes.Equal(b, filled(size, want)) {
			t.Errorf("request %d came with other bytes than it was sent with: %x..., %x", m.Timestamp, b[:8], b[len(b)-1])
		}
		whole++
		came[last] = true
		m.Release()
	}
	if !came[10+n-1] || !came[500] {
		t.Errorf("requests %d and 500 came: %t, %t; they were not given up", 10+n-1, came[10+n-1], came[500])
	}
	t.Logf("%d of %d requests came", whole, n+2)
	until(t, "release of all", func() bool { return done.n.Load() == n })
	until(t, "end of the list", func() bool {
		worker.lent.mu.Lock()
		defer worker.lent.mu.Unlock()
		for _, s := range worker.lent.lent.buckets {
			if s != nil {
				return false
			}
		}
		return true
	})
}

// TestRecalls: lent values are found under their timestamps, for any order of additions and
// removals.
func TestRecalls(t *testing.T) {
	var r recalls
	var in []*lentSlot
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		if len(in) < 2 || len(in) < 20 && rng.IntN(2) == 0 {
			s := &lentSlot{}
			r.add(s, push(8, rng.IntN(3)*len(r.buckets)+rng.IntN(2), nil), true)
			in = append(in, s)
		} else {
			i := rng.IntN(len(in))
			r.remove(in[i])
			in = slices.Delete(in, i, i+1)
		}
		found := 0
		for b := range r.buckets {
			for s := r.buckets[b]; s != nil; s = s.entry.next {
				if found++; !slices.Contains(in, s) || bucket(s.entry.ts) != b {
					t.Fatalf("bucket %d has what is not lent, or belongs to bucket %d", b, bucket(s.entry.ts))
				}
			}
		}
		if found != len(in) {
			t.Fatalf("%d are found, %d are lent", found, len(in))
		}
	}
}

// TestRecallOfOriginal: a node of the original knows no marks. It gets its message, and the
// log says that the bytes may be others.
func TestRecallOfOriginal(t *testing.T) {
	server := newNode(t, 8, 0, nil, nil)
	worker, g := throughGate(t, server, 7)
	g.Lock()
	for i := range 20 {
		worker.must(t, push(8, i, make([]byte, 1<<20)))
	}
	worker.Cancel(van.Requests{First: 0, Count: 20})
	g.Unlock()
	for range 20 {
		server.next(t).Release()
	}
	if n, _ := worker.lent.lent.foreign.Next(); n != 2 {
		t.Errorf("it was said %d times, want once", n-1)
	}
}

// TestMark: a request of a node of this library without a mark behind its values, or with
// a strange one, is dropped.
func TestMark(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	server.connect(t, newNode(t, 9, 7, nil, nil))
	meta, key, value := packed(t, push(8, 1, nil)), make([]byte, 8), filled(100, 3)
	for name, frames := range map[string][][]byte{
		"none":             {key, value},
		"none, long key":   {value, value},
		"none, lengths":    {key, key, value},
		"long":             {key, value, {0, 0}},
		"empty":            {key, value, {}},
		"another":          {key, value, {2}},
		"one frame":        {value, {0}},
		"too many frames":  {key, value, key, {0}, {0}},
		"two marks":        {key, value, key, key, {0}},
		"of small frames":  {key, key, key, {0}},
		"nothing but mark": {{0}},
	} {
		before := server.Stats().Malformed
		r := dialRaw(t, server, "ps9.00000007")
		r.send(append([][]byte{meta}, frames...)...)
		until(t, "refusal of "+name, func() bool { return server.Stats().Malformed == before+1 })
		_ = r.Close()
	}
	r := dialRaw(t, server, "ps9.00000007")
	r.send(meta, key, value, []byte{1})
	r.send(meta, key, value, []byte{0})
	r.send(meta, key, value, key, []byte{0})
	r.send(meta, key, key, key)
	for _, frames := range []int{2, 3, 3} {
		if m := server.next(t); m.Frames != frames {
			t.Errorf("a message of %d frames, want %d", m.Frames, frames)
		}
	}
}
