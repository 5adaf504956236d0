package bench

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

type pretended = simgpu.Device

// sharing is a simulated device whose memory starts after the start of its allocation.
type sharing struct {
	*pretended
	copies  atomic.Int32 // calls of CopyAsync
	corrupt atomic.Bool  // copies to the host lose a byte
}

func newSharing(t *testing.T, id int) *sharing {
	d := &sharing{pretended: simgpu.New(id)}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *sharing) CopyAsync(dst, src backend.Mem, stream uintptr) error {
	d.copies.Add(1)
	return d.pretended.CopyAsync(dst, src, stream)
}

func (d *sharing) Copy(dst, src backend.Mem) error {
	err := d.pretended.Copy(dst, src)
	if d.corrupt.Load() && dst.OnHost() && dst.Len() > 0 {
		simgpu.Raw(dst)[dst.Len()/2] ^= 1
	}
	return err
}

func (d *sharing) Alloc(n int) (backend.Mem, error) {
	m, err := d.pretended.Alloc(n + inside + 1)
	if err != nil {
		return m, err
	}
	return m.Sub(inside, n), nil
}

const inside = 64

func (d *sharing) Free(m backend.Mem) error {
	return d.pretended.Free(backend.At(unsafe.Add(m.Ptr(), -inside), m.Len()+inside, m.Device(), m.Owner()))
}

// TestDeviceFloor does rounds of several sizes between two devices of one process.
func TestDeviceFloor(t *testing.T) {
	for _, size := range [][2]int{{1, 1}, {0, 4096}, {100, 0}, {1 << 20, 3}, {2<<20 + 1, 1 << 10}} {
		sd, cd := newSharing(t, 1), newSharing(t, 0)
		s, err := newDeviceServer(sd, 1, size[0], size[1])
		if err != nil {
			t.Fatal(err)
		}
		c, err := dialDeviceFloor(cd, []string{s.addr}, size[0], size[1])
		if err != nil {
			s.close()
			t.Fatal(err)
		}
		e := c.ends[0]
		fill(simgpu.Raw(e.send))
		for _, n := range []int{0, 3, 1} {
			ns, err := c.measure(n)
			if err != nil || len(ns) != n {
				t.Errorf("push %d, pull %d: %d of %d rounds, %v", size[0], size[1], len(ns), n, err)
			}
			for _, x := range ns {
				if x <= 0 {
					t.Errorf("a round took %d ns", x)
				}
			}
		}
		copied := make(chan struct{})
		cd.Queue(e.stream, func() { close(copied) })
		<-copied
		if got := simgpu.Raw(e.dst); !bytes.Equal(got, simgpu.Raw(e.src)) || len(got) != size[0] {
			t.Errorf("push %d: the server does not have it", size[0])
		}
		if a, b := cd.copies.Load(), sd.copies.Load(); a != 4 || b != 4 {
			t.Errorf("%d and %d copies, want 4 each", a, b)
		}
		c.close()
		s.close()
		sd.Leaks(t)
		cd.Leaks(t)
	}
}

// TestDeviceFloorEnds: if one end disappears, the other end frees everything.
func TestDeviceFloorEnds(t *testing.T) {
	sd, cd := newSharing(t, 1), newSharing(t, 0)
	start := func() (*floorServer, *deviceFloorClient) {
		s, err := newDeviceServer(sd, 1, 10, 10)
		if err != nil {
			t.Fatal(err)
		}
		c, err := dialDeviceFloor(cd, []string{s.addr}, 10, 10)
		if err != nil {
			t.Fatal(err)
		}
		return s, c
	}
	s, c := start()
	s.close()
	if _, err := c.measure(1); err == nil {
		t.Error("rounds without a server")
	}
	c.close()
	s, c = start()
	_ = c.ends[0].conn.Close() // the client dies
	<-s.ended
	s.close()
	c.close()
	if s, err := newDeviceServer(sd, 1, 10, 10); err != nil {
		t.Error(err)
	} else {
		s.close() // no client has connected
	}
	sd.Leaks(t)
	cd.Leaks(t)
	if _, err := newDeviceEnd(backend.NewCPU(), nil, -1, 0, 0, 1, 1); err == nil || !strings.Contains(err.Error(), "backend CPU cannot share memory") {
		t.Errorf("on host memory: %v", err)
	}
}

// counting is a floor that does nothing.
type counting struct{ n int }

func (c *counting) measure(n int) ([]int64, error) { c.n += n; return make([]int64, n), nil }
func (c *counting) close()                         {}

// TestDeviceLatency measures between simulated devices, with and without a stream.
func TestDeviceLatency(t *testing.T) {
	for _, l := range []*latency{
		{push: 9000, pull: 20000, iters: 25, warmup: 3, rounds: 4},
		{push: 9000, pull: 20001, iters: 25, warmup: 2, rounds: 3, stream: true},
		{push: 9000, pull: 20002, iters: 25, warmup: 3, rounds: 4, both: true},
		{push: 0, pull: 5000, iters: 5, warmup: 1, rounds: 1},
		{push: 5000, pull: 0, iters: 5, warmup: 0, rounds: 1},
		{push: 1, pull: 1, iters: 5, warmup: 1, rounds: 2},
	} {
		t.Run(fmt.Sprintf("%d,%d", l.push, l.pull), func(t *testing.T) {
			worker, server, err := runDevices(t, l, new(counting))
			if err != nil {
				t.Fatal(err)
			}
			if n := len(worker.Ours); n != l.iters || len(worker.Floor) != n || !worker.Checked {
				t.Errorf("%d round trips beside %d of the floor, checked: %t; want %d", n, len(worker.Floor), worker.Checked, l.iters)
			}
			if n := server.Streams() == 1; n != l.stream {
				t.Errorf("the server has a stream: %t, want %t", n, l.stream)
			}
		})
	}
}

// TestDeviceValues: wrong answers are detected.
func TestDeviceValues(t *testing.T) {
	l := &latency{push: 9000, pull: 20000, iters: 4, warmup: 1, rounds: 2}
	_, _, err := runDevices(t, l, &spoiling{})
	if err == nil || !strings.Contains(err.Error(), "the answer is not the one to this request") {
		t.Errorf("got %v", err)
	}
}

// spoiling is a floor that makes the worker's device lose bytes.
type spoiling struct {
	counting
	d *sharing
}

func (s *spoiling) measure(n int) ([]int64, error) {
	s.d.corrupt.Store(true)
	return s.counting.measure(n)
}

func runDevices(t *testing.T, l *latency, floor baseline) (*result, *sharing, error) {
	t.Helper()
	worker, server := newSharing(t, 0), newSharing(t, 1)
	if s, ok := floor.(*spoiling); ok {
		s.d = worker
	}
	c := testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": worker, "server": server}[role]
	}})
	if err := l.serveDevice(c.Servers[0]); err != nil {
		t.Fatal(err)
	}
	r, err := l.measureDevice(context.Background(), c.Workers[0], floor, none{})
	return r, server, err
}
