package bench

import (
	"bytes"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/simgpu"
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
		x := floors{push: size[0], pull: size[1], clients: 1}
		s, err := deviceFloor{x, sd}.serve()
		if err != nil {
			t.Fatal(err)
		}
		c, err := deviceFloor{x, cd}.dial([]string{s.addr})
		if err != nil {
			s.close()
			t.Fatal(err)
		}
		e := c.(*deviceFloorClient).ends[0]
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
	x := floors{push: 10, pull: 10, clients: 1}
	start := func() (*floorServer, *deviceFloorClient) {
		s, err := deviceFloor{x, sd}.serve()
		if err != nil {
			t.Fatal(err)
		}
		c, err := deviceFloor{x, cd}.dial([]string{s.addr})
		if err != nil {
			t.Fatal(err)
		}
		return s, c.(*deviceFloorClient)
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
	if s, err := (deviceFloor{x, sd}).serve(); err != nil {
		t.Error(err)
	} else {
		s.close() // no client has connected
	}
	sd.Leaks(t)
	cd.Leaks(t)
	if _, err := newDeviceEnd(backend.NewCPU(), nil, nil, 0, 0, 1, 1); err == nil || !strings.Contains(err.Error(), "this node's backend is CPU") {
		t.Errorf("on host memory: %v", err)
	}
}
