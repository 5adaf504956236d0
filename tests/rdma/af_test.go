package rdma

import (
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/van/env"
	"golang.org/x/sys/unix"
)

var sizes = []int{0, 1, 63, 1 << 10, 4001, 64 << 10, 1 << 20}

// forms exchanges batches of all forms with tensors of all sizes. The forms use the same keys, so every tensor is at another address than when its key was last used.
func forms(t *testing.T, c *client, parts func(n int, first uint64, size func(i int) int) []part) error {
	for k := range sizes {
		same := func(int) int { return sizes[k] }
		small := func(i int) int { return sizes[(i+k)%4] }
		mixed := func(i int) int { return sizes[(i+k)%len(sizes)] }
		for _, b := range []struct {
			name       string
			push, pull []part
		}{
			{"push", parts(1, 1, same), nil},
			{"pull", nil, parts(1, 1, same)},
			{"one of each", parts(1, 1, same), parts(1, 1, same)},
			{"pushes", parts(3, 1, mixed), nil},
			{"pulls", nil, parts(3, 1, mixed)},
			{"many", parts(5, 1, mixed), parts(4, 3, mixed)},
			{"echo", parts(4, echoed, mixed), parts(4, echoed, mixed)},
			{"very many", parts(40, 1, small), parts(30, 5, small)},
		} {
			if err := c.exchange(t.Context(), b.push, b.pull); err != nil {
				return fmt.Errorf("%s, from %d bytes on: %w", b.name, sizes[k], err)
			}
		}
	}
	return nil
}

func parts(n int, first uint64, size func(i int) int) (all []part) {
	for i := range n {
		all = append(all, part{first + uint64(i), size(i)})
	}
	return all
}

// TestValues: all forms of batches in clusters of different shapes.
func TestValues(t *testing.T) {
	for _, tt := range []struct {
		name  string
		o     options
		full  bool // all forms, otherwise some
		short bool // also under -short
	}{
		{"1x1", options{}, true, true},
		{"group 2", options{workers: 2, servers: 1, group: 2}, false, false},
		{"split, few places", options{set: func(c *postoffice.Config) { c.SplitQPLag, c.AddressPoolSize = true, 32 },
			env: []string{"STEPMESH_SPLIT_QP_LAG=1", "BYTEPS_ADDRESS_POOL_SIZE=32"}}, false, false},
		{"one queue pair, always block", options{set: func(c *postoffice.Config) { c.QPNum, c.BusyPoll = 1, env.AlwaysBlock },
			env: []string{"STEPAF_QP_NUM=1", "STEPAF_BUSY_POLL_ENABLE=0"}}, false, false},
		{"worker processes", options{workers: 2, servers: 2, place: func(role string, _ int) place {
			return map[string]place{"server": {what: answers}, "worker": {what: works}}[role]
		}}, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if !tt.short {
				notShort(t)
			}
			c := start(t, tt.o)
			for _, p := range c.children {
				if c.Workers[0] == nil && p.What == works {
					p.Expect("works")
				}
			}
			nodetest.Together(t, c.clients(), func(c *client) error {
				if tt.full {
					return forms(t, c, parts)
				}
				for i := range 6 {
					if err := c.mixed(t.Context(), i); err != nil {
						return fmt.Errorf("round %d: %w", i, err)
					}
				}
				return c.exchange(t.Context(), []part{{1, 1 << 20}}, []part{{1, 1 << 20}, {2, 1}})
			})
			c.end()
		})
	}
}

// TestRegistered: pushes are received in registered receive buffers, and other pushes do not disturb them.
func TestRegistered(t *testing.T) {
	for _, split := range []bool{false, true} {
		t.Run(fmt.Sprintf("split %t", split), func(t *testing.T) {
			if !split {
				notShort(t)
			}
			c := start(t, options{workers: 2, servers: 2, env: []string{fmt.Sprintf("STEPMESH_SPLIT_QP_LAG=%d", map[bool]int{true: 1}[split])},
				set:   func(c *postoffice.Config) { c.SplitQPLag = split },
				place: func(role string, _ int) place { return map[string]place{"server": {what: slots}}[role] }})
			nodetest.Together(t, c.clients(), func(c *client) error {
				for _, n := range []int{1, slotSize, 64 << 10, 100, slotSize} { // shrinks and grows
					push := []part{{3, n}, {1, n}, {4, 77}, {2, slotSize - n + 1}}
					if err := c.exchange(t.Context(), push, []part{{1, n}}); err != nil {
						return fmt.Errorf("%d bytes: %w", n, err)
					}
				}
				return nil
			})
			c.end()
		})
	}
}

// TestResized: the tensor of one key grows and shrinks, in both directions.
func TestResized(t *testing.T) {
	notShort(t)
	c := start(t, options{})
	w := c.clients()[0]
	for i, n := range []int{100, 1 << 20, 3, 64 << 10, 1<<20 + 1, 0, 5000, 3 << 20, 1, 4096, 4097} {
		for range 2 {
			if err := w.exchange(t.Context(), []part{{7, n}}, []part{{7, n}, {8, 3<<20 - n}}); err != nil {
				t.Fatalf("step %d, %d bytes: %v", i, n, err)
			}
		}
	}
	c.end()
}

// TestNewKeys: new keys among known ones do not change the order of a batch. In the original, the known ones overtake.
func TestNewKeys(t *testing.T) {
	notShort(t)
	c := start(t, options{workers: 2, servers: 2})
	nodetest.Together(t, c.clients(), func(c *client) error {
		known := []part{{1, 1 << 10}, {2, 64 << 10}, {3, 1}}
		if err := c.exchange(t.Context(), known, known); err != nil {
			return err
		}
		for i := range 8 {
			fresh := uint64(100 + 10*i)
			b := []part{known[0], {fresh, 200}, known[1], {fresh + 1, 100 << 10}, {fresh + 2, 0}, known[2]}
			switch i % 3 {
			case 1: // a new key first
				b[0], b[1] = b[1], b[0]
			case 2: // and a new key last
				b[4], b[5] = b[5], b[4]
			}
			if err := c.exchange(t.Context(), b, b); err != nil {
				return fmt.Errorf("batch %d: %w", i, err)
			}
		}
		return nil
	})
	c.end()
}

// TestInFlight: many requests under the same keys at once, with new ones among them.
func TestInFlight(t *testing.T) {
	c := start(t, options{workers: 2, servers: 2})
	nodetest.Together(t, c.clients(), func(c *client) error {
		for round := range 3 {
			var all []*request
			for i := range 24 {
				r, err := c.begin([]part{{1, 100 + i}, {uint64(200 + i), 3000 * round}, {2, 20000 + round*30000 + i}}, []part{{1, 30000 - i}, {2, i}})
				if err != nil {
					return fmt.Errorf("round %d, request %d: %w", round, i, err)
				}
				all = append(all, r)
			}
			for i := range all { // in reverse order
				if err := c.end(t.Context(), all[len(all)-1-i]); err != nil {
					return fmt.Errorf("round %d, request %d: %w", round, len(all)-1-i, err)
				}
			}
		}
		return nil
	})
	c.end()
}

// TestForeignMemory: tensors in memory outside of the Go heap.
func TestForeignMemory(t *testing.T) {
	c := start(t, options{})
	w := c.clients()[0]
	b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	tensor := func(at, n int) af.Tensor {
		x, err := af.FromSlice(b[at : at+n])
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	for i := range 10 {
		r := &request{pulls: []part{{1, 70001}, {2, 1}}}
		fill(b[:100003], uint64(i))
		clear(b[200000:])
		r.push = []af.KeyTensor{{Key: 1, Val: tensor(3, 100000)}}
		r.pull = []af.KeyTensor{{Key: 1, Val: tensor(200001+i, 70001)}, {Key: 2, Val: tensor(400000, 1)}}
		if err := w.send(r); err != nil {
			t.Fatal(err)
		}
		if err := w.end(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{200000 + i, 270002 + i} {
			if b[at] != 0 {
				t.Errorf("round %d: byte %d beside the pull tensor was written", i, at)
			}
		}
	}
	c.end()
	if err := unix.Munmap(b); err != nil {
		t.Error(err)
	}
}
