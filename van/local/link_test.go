package local

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// done counts completions.
type done struct {
	mu sync.Mutex
	n  int
	c  chan struct{}
}

func (d *done) Sent() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.n++
	if d.c != nil {
		close(d.c)
		d.c = nil
	}
}

func (d *done) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.n
}

// TestFullRing: messages to a receiver that has not started wait in order, up to a bound, and then arrive.
func TestFullRing(t *testing.T) {
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, mode.set)
			worker.start()
			worker.connect(server)
			server.connect(worker)
			var sent int
			for {
				size := []int{100, 5000, 100_000, 3 << 20}[sent%4]
				err := worker.Send(data(8, sent, pattern(sent, size)))
				if errors.Is(err, van.ErrQueueFull) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if sent++; sent > 2*queueLen {
					t.Fatal("the queue has no bound")
				}
				if sent == 60 { // enough: the bound is tested below
					break
				}
			}
			server.start()
			for i := range sent {
				m := server.next()
				if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), pattern(i, []int{100, 5000, 100_000, 3 << 20}[i%4])) {
					t.Fatalf("message %d came when %d was due, or its values differ", m.Timestamp, i)
				}
				m.Release()
			}
			eventually(t, "everything pinned is given back", func() bool { return worker.Stats().LentValues == 0 })
		})
	}
}

func TestQueueFull(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, nil)
	worker.start()
	worker.connect(server)
	server.connect(worker)
	value := make([]byte, streamFrom-1)
	sent := 0
	for err := error(nil); ; sent++ {
		if err = worker.Send(data(8, sent, value)); err != nil {
			if !errors.Is(err, van.ErrQueueFull) {
				t.Fatal(err)
			}
			break
		}
		if sent > queueLen+ringLen {
			t.Fatal("the queue has no bound")
		}
	}
	server.start()
	for i := range sent {
		m := server.next()
		if int(m.Timestamp) != i {
			t.Fatalf("message %d came when %d was due", m.Timestamp, i)
		}
		m.Release()
	}
	worker.must(data(8, sent, value))
	server.next().Release()
}

// TestDoneOfLostLink: memory that a peer will never acknowledge is released.
func TestDoneOfLostLink(t *testing.T) {
	for name, set := range map[string]func(*Van){"pinned": nil, "queued": StreamOnly} {
		t.Run(name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker, server := newNode(t, n, 9, set), newNode(t, n, 8, set)
			worker.start()
			worker.connect(server)
			server.connect(worker)
			const each = 50
			dones := make([]done, each)
			for i := range dones {
				m := data(8, i, make([]byte, 2<<20))
				m.Done = &dones[i]
				worker.must(m)
			}
			if set == nil && worker.Stats().LentValues == 0 {
				t.Error("nothing is pinned to a receiver that takes nothing")
			}
			if err := server.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			worker.event(8, false)
			eventually(t, "all messages are done", func() bool {
				for i := range dones {
					if dones[i].count() != 1 {
						return false
					}
				}
				return true
			})
			// It is counted behind the call that says so.
			eventually(t, "nothing is pinned", func() bool { return worker.Stats().LentValues == 0 })
		})
	}
}

// answer makes the answer to a pull.
func answer(q *van.Message, vals []byte) *van.Message {
	m := data(q.Sender, int(q.Timestamp), vals)
	m.Request, m.Push, m.AppID, m.CustomerID = false, false, q.AppID, q.CustomerID
	return m
}

// pull makes a request whose answer shall land in dst.
func pull(to, ts int, dst []byte) *van.Message {
	m := data(to, ts, nil)
	m.Push, m.Into = false, backend.Bytes(dst)
	return m
}

// TestInto: answers land where the request says, and only those that fit.
func TestInto(t *testing.T) {
	for _, c := range []struct {
		name         string
		room, answer int
		placed       bool
	}{
		{"same length", 1 << 20, 1 << 20, true},
		{"longest of a record", streamFrom - 1, streamFrom - 1, false}, // the copying goroutine is unknown
		{"shortest of its own", streamFrom, streamFrom, true},
		{"longer than the ring", 5 << 20, 5 << 20, true},
		{"too long", 1 << 20, 1<<20 + 1, false},
		{"too short", 1 << 20, 1<<20 - 1, false},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/stream=%t", c.name, stream), func(t *testing.T) {
				n := inproc.NewNetwork()
				set := func(v *Van) { v.acceptor.streamOnly = stream }
				worker, server := newNode(t, n, 9, set), newNode(t, n, 8, set)
				worker.start()
				server.start()
				worker.connect(server)
				server.connect(worker)
				dst := make([]byte, c.room)
				worker.must(pull(8, 5, dst))
				q := server.next()
				server.must(answer(q, pattern(5, c.answer)))
				q.Release()
				m := worker.next()
				if !bytes.Equal(m.Vals.Host(), pattern(5, c.answer)) {
					t.Error("other values than were sent")
				}
				if in := m.Vals.Addr() == backend.Bytes(dst).Addr(); m.Placed != c.placed || in != c.placed {
					t.Errorf("placed %t, in the tensor %t, want %t", m.Placed, in, c.placed)
				}
				if !c.placed && !bytes.Equal(dst, make([]byte, c.room)) {
					t.Error("the tensor was written to")
				}
				m.Release()
			})
		}
	}
}

// TestRevoke: an answer that arrives after its memory was invalidated is stored elsewhere.
func TestRevoke(t *testing.T) {
	worker, server := pair(t)
	dst := make([]byte, 1<<20)
	worker.must(pull(8, 5, dst))
	q := server.next()
	worker.Invalidate(backend.Bytes(dst[100:200]))
	server.must(answer(q, pattern(5, len(dst))))
	q.Release()
	m := worker.next()
	if m.Placed || !bytes.Equal(dst, make([]byte, len(dst))) || !bytes.Equal(m.Vals.Host(), pattern(5, len(dst))) {
		t.Error("the answer was placed, or differs")
	}
	m.Release()
	// An unrelated range leaves it alone.
	worker.must(pull(8, 6, dst))
	q = server.next()
	worker.Invalidate(backend.Bytes(make([]byte, 1<<20)))
	server.must(answer(q, pattern(6, len(dst))))
	q.Release()
	if m = worker.next(); !m.Placed || !bytes.Equal(dst, pattern(6, len(dst))) {
		t.Error("the answer was not placed")
	}
	m.Release()
}

// TestRevokeWithinStream: of an answer that is on its way in pieces nothing more is
// written, however long it takes, and it is not handed up.
func TestRevokeWithinStream(t *testing.T) {
	n := inproc.NewNetwork()
	set := func(v *Van) { v.acceptor.streamOnly = true }
	worker, server := newNode(t, n, 9, set), newNode(t, n, 8, set)
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	vals := pattern(7, 20<<20)
	dst := make([]byte, len(vals))
	worker.must(pull(8, 7, dst))
	q := server.next()
	worker.rx.feed.Lock() // only this test receives
	server.must(answer(q, vals))
	q.Release()
	if p := worker.receiver.scan(true); p != nil {
		t.Fatalf("%v fits into the ring", &p.msg.Meta)
	}
	some := bytes.Clone(dst)
	if !bytes.Equal(some[:maxChunk], vals[:maxChunk]) || bytes.Equal(some, vals) {
		t.Fatal("want a part of the answer in the tensor")
	}
	worker.Invalidate(backend.Bytes(dst))
	worker.rx.feed.Unlock()
	server.must(data(9, 8, []byte("next")))
	if m := worker.next(); string(m.Vals.Host()) != "next" || !bytes.Equal(dst, some) {
		t.Error("the answer was written or handed up after Invalidate")
	}
}

// TestRevokeRaces: while answers arrive, Invalidate waits for the one that is being
// written, and nothing is written afterwards.
func TestRevokeRaces(t *testing.T) {
	worker, server := pair(t)
	vals := pattern(1, 4<<20)
	go func() {
		for m := range server.in {
			a := answer(m, vals)
			if m.Push {
				a = data(9, 0, nil) // all answers before it have arrived or been dropped
			}
			_ = server.Send(a) // the link may be closed already
			m.Release()
		}
	}()
	defer close(server.in)
	defer func() { _ = server.Close(context.Background()) }()
	for i := range 30 {
		dst := make([]byte, len(vals))
		worker.must(pull(8, i, dst))
		timer := time.NewTimer(time.Duration(i) * 50 * time.Microsecond)
		<-timer.C
		worker.Invalidate(backend.Bytes(dst))
		now := bytes.Clone(dst)
		worker.must(data(8, i, nil))
		for m := worker.next(); m.Push != true; m = worker.next() {
			m.Release()
		}
		if !bytes.Equal(now, dst) {
			t.Fatalf("round %d: the memory was written to after Invalidate", i)
		}
	}
}

// TestRegisteredBuffer: pushes land in the buffer registered for them.
func TestRegisteredBuffer(t *testing.T) {
	worker, server := pair(t)
	dst := make([]byte, 1<<20)
	if err := server.RegisterRecvBuffer(9, 1, backend.Bytes(dst)); err != nil {
		t.Fatal(err)
	}
	for i, size := range []int{1 << 20, 100_000, 1<<20 + 1, 1 << 20} {
		worker.must(data(8, i, pattern(i, size)))
		m := server.next()
		fits := size <= len(dst)
		if m.Placed != fits || fits && m.Vals.Addr() != backend.Bytes(dst).Addr() || !bytes.Equal(m.Vals.Host(), pattern(i, size)) {
			t.Errorf("%d bytes: placed %t, want %t, or the values differ", size, m.Placed, fits)
		}
		m.Release()
	}
	other := data(8, 9, pattern(9, 1<<20))
	binary.LittleEndian.PutUint64(other.Keys.Host(), 2)
	worker.must(other)
	if m := server.next(); m.Placed {
		t.Error("a push under another key was placed")
	}
}

// TestLargeMeta: bodies of any length pass.
func TestLargeMeta(t *testing.T) {
	worker, server := pair(t)
	for _, size := range []int{0, 1000, streamFrom, 3 << 20} {
		m := data(8, size, pattern(1, 100_000))
		m.SimpleApp, m.Body = true, pattern(size, size)
		worker.must(m)
		got := server.next()
		if !bytes.Equal(got.Body, pattern(size, size)) || !bytes.Equal(got.Vals.Host(), pattern(1, 100_000)) {
			t.Errorf("a body of %d bytes arrived with %d, or the values differ", size, len(got.Body))
		}
		got.Release()
	}
}

// TestUnlike: with peers that cannot be reached through memory, data goes over the
// van inside, and the log says why.
func TestUnlike(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(x *token)
		log    string
	}{
		{"another user", func(x *token) { x.uid++ }, "runs as user"},
		{"a container", func(x *token) { x.space[0]++ }, "namespace"},
		{"gone", func(x *token) { x.name[0]++ }, "connection refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			var log vantest.Log
			worker, server := newNode(t, n, 9, func(v *Van) { v.logTo(log.Logger()) }), newNode(t, n, 8, nil)
			worker.start()
			server.start()
			x := server.own.token
			c.change(&x)
			server.self.Endpoint = Endpoint(x.encode())
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			if worker.Linked(8) {
				t.Error("linked")
			}
			worker.must(data(8, 3, []byte("over the van inside")))
			m := server.next()
			if string(m.Vals.Host()) != "over the van inside" {
				t.Errorf("received %q", m.Vals.Host())
			}
			m.Release()
			if text := log.String(); strings.Count(text, "peer=\"server 0") != 1 || !strings.Contains(text, c.log) {
				t.Errorf("log %q, want one line with %q", text, c.log)
			}
		})
	}
}

// TestNoMemory: a link for which there is no memory is done without.
func TestNoMemory(t *testing.T) {
	n := inproc.NewNetwork()
	var log vantest.Log
	worker, server := newNode(t, n, 9, func(v *Van) { v.logTo(log.Logger()) }), newNode(t, n, 8, nil)
	worker.start()
	server.start()
	worker.tx.memory.make = func(int, int) (int, error) { return -1, fmt.Errorf("no shared memory: %w", syscall.ENOMEM) }
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	if worker.Linked(8) {
		t.Error("linked")
	}
	worker.must(data(8, 3, []byte("x")))
	server.next().Release()
	if text := log.String(); !strings.Contains(text, "cannot allocate memory") {
		t.Errorf("log %q, want what failed", text)
	}
}

// TestGreetRefuses: a hello that makes no sense is refused, with a reason, and the
// node still serves others.
func TestGreetRefuses(t *testing.T) {
	worker, server := pair(t)
	good := func() []byte {
		b := append([]byte(helloMagic), make([]byte, helloLen-4)...)
		binary.LittleEndian.PutUint32(b[4:], tokenVersion)
		binary.LittleEndian.PutUint32(b[8:], 9)
		binary.LittleEndian.PutUint32(b[32:], segmentLen)
		binary.LittleEndian.PutUint32(b[36:], slotCount)
		return b
	}
	seg, err := memfd.New(segmentLen)
	if err != nil {
		t.Fatal(err)
	}
	small, err := memfd.New(4096)
	if err != nil {
		t.Fatal(err)
	}
	soft, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(soft, segmentLen); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	defer closeAll([]int{seg, small, soft})
	for _, c := range []struct {
		name string
		text []byte
		fds  []int
		want string
	}{
		{"garbage", []byte("hello?"), []int{seg, small}, "protocol"},
		{"no files", good(), nil, "0 files"},
		{"one file", good(), []int{seg}, "1 files"},
		{"a segment that can shrink", good(), []int{soft, small}, "not a sealed memory file"},
		{"a segment of another length", good(), []int{small, small}, "not a sealed memory file"},
		{"a bell of another length", good(), []int{seg, seg}, "not a sealed memory file"},
		{"not memory", good(), []int{int(null.Fd()), small}, "not a sealed memory file"},
		{"no id", func() []byte { b := good(); binary.LittleEndian.PutUint32(b[8:], van.Empty); return b }(), []int{seg, small}, "node id"},
		{"other slots", func() []byte { b := good(); b[36]++; return b }(), []int{seg, small}, "protocol"},
		{"too long", append(good(), 0), []int{seg, small}, "longer than"},
	} {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: server.own.token.address(), Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		var oob []byte
		if c.fds != nil {
			oob = unix.UnixRights(c.fds...)
		}
		if _, _, err := conn.WriteMsgUnix(c.text, oob, nil); err != nil {
			t.Fatal(err)
		}
		b, fds, err := receive(conn, replyHead+2*maxWhy)
		closeAll(fds)
		switch {
		case err != nil:
			t.Errorf("%s: %v", c.name, err)
		case len(b) < replyHead || b[4] != verdictNo || b[5] != 0 || !strings.Contains(string(b[replyHead:]), c.want):
			t.Errorf("%s: reply %q, want a refusal with %q", c.name, b, c.want)
		}
		_ = conn.Close()
	}
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
}

// TestSilentPeer: a peer that listens and does not answer does not hold up Connect.
func TestSilentPeer(t *testing.T) {
	n := inproc.NewNetwork()
	const linkTime = 5 * time.Second // Connect returns earlier, also after a pause of the machine
	worker, server := newNode(t, n, 9, func(v *Van) { v.own.linkTime = linkTime }), newNode(t, n, 8, nil)
	worker.start()
	server.start()
	x := server.own.token
	x.name[0]++
	l, err := listen(&x)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	server.self.Endpoint = Endpoint(x.encode())
	begun := time.Now()
	if err := worker.Connect(t.Context(), 8, server.self); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(begun); d >= linkTime {
		t.Errorf("Connect took %s", d)
	}
	if linked, d := worker.Linked(8), time.Since(begun); linked || d < linkTime || d > linkTime+10*time.Second {
		t.Errorf("linked %t after %s, want no link after %s", linked, d, linkTime)
	}
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
}

// TestIdle: nodes that wait do not poll, and wake up.
func TestIdle(t *testing.T) {
	worker, server := pair(t)
	for i := range 100 {
		worker.must(data(8, i, []byte("x")))
		server.next().Release()
	}
	<-time.After(50 * time.Millisecond) // for spinning to end
	vantest.Idle(t, "two nodes", os.Getpid(), 600)
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
}

// TestNothingIsLeft: closed vans leave no files, mappings or sockets.
func TestNothingIsLeft(t *testing.T) {
	count := func() (fds, maps int) {
		dir, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return len(dir), strings.Count(string(text), "memfd:stepaf")
	}
	round := func() {
		n := inproc.NewNetwork()
		worker, server := newNode(t, n, 9, nil), newNode(t, n, 8, nil)
		worker.start()
		server.start()
		worker.connect(server)
		server.connect(worker)
		worker.must(data(8, 1, make([]byte, 3<<20)))
		server.next().Release()
		for _, x := range []*node{worker, server} {
			if err := x.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	round() // the runtime does not close its own files
	fds, _ := count()
	for range 5 {
		round()
	}
	eventually(t, "files are closed and mappings gone", func() bool {
		f, m := count()
		return f <= fds && m == 0
	})
}
