package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// A server's answer depends on all tensors pushed with the request or, without any, on the last ones that the same worker has pushed. Keys from echoed on are answered
// with the push tensor of the same key instead.
const echoed = 1000

// mix is one step of a hash.
func mix(h, x uint64) uint64 {
	h = (h ^ x) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}

// fill writes bytes derived from seed.
func fill(b []byte, seed uint64) {
	var last [8]byte
	for i := 0; i < len(b); i += 8 {
		seed = mix(seed, uint64(i))
		if len(b)-i >= 8 {
			binary.LittleEndian.PutUint64(b[i:], seed)
			continue
		}
		binary.LittleEndian.PutUint64(last[:], seed)
		copy(b[i:], last[:])
	}
}

// digest hashes tensors: their order, keys, shapes and bytes.
func digest(all []af.KeyTensor) uint64 {
	h := uint64(len(all))
	for i := range all {
		h = mix(mix(h, all[i].Key), uint64(all[i].Val.Len()))
		for _, d := range all[i].Val.Dims() {
			h = mix(h, uint64(d))
		}
		b := all[i].Val.Bytes()
		for ; len(b) >= 8; b = b[8:] {
			h = mix(h, binary.LittleEndian.Uint64(b))
		}
		for _, c := range b {
			h = mix(h, uint64(c))
		}
	}
	return h
}

// seed returns the seed of server's answer under key.
func seed(digest uint64, server int, key uint64) uint64 { return mix(mix(digest, uint64(server)), key) }

// Registered receive buffers: slotKeys for each of slotWorkers.
const (
	slotKeys    = 2
	slotWorkers = 2
	slotSize    = 1 << 18
)

// serveAnswers makes n a server with the answers described above.
func serveAnswers(n *postoffice.Node, registered bool, fail func(error)) error {
	s, err := af.NewServer(n, af.ServerOptions{})
	if err != nil {
		return err
	}
	var buf []byte
	if registered {
		buf = make([]byte, slotWorkers*slotKeys*slotSize)
		x, err := af.FromSlice(buf)
		if err != nil {
			return err
		}
		var workers []int
		var keys []uint64
		for w := range slotWorkers {
			for k := range slotKeys {
				workers, keys = append(workers, w), append(keys, uint64(1+k))
			}
		}
		if err := s.RegisterRecvTensor(x, workers, keys); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	last := map[int]uint64{}
	return s.Handle(func(b af.Batch) {
		pushes, pulls := b.Pushes(), b.Pulls()
		if registered {
			if err := inSlots(buf, b); err != nil {
				fail(err)
			}
		}
		mu.Lock()
		if len(pushes) > 0 {
			last[b.Worker()] = digest(pushes)
		}
		d := last[b.Worker()]
		mu.Unlock()
		out := make([]af.KeyTensor, len(pulls))
		for i := range pulls {
			out[i].Key = pulls[i].Key
			if out[i].Key >= echoed {
				for k := range pushes {
					if pushes[k].Key == out[i].Key {
						out[i].Val = pushes[k].Val
					}
				}
				continue
			}
			x := make([]byte, pulls[i].Len)
			fill(x, seed(d, n.Topology().GroupRank, pulls[i].Key))
			if out[i].Val, err = af.FromSlice(x); err != nil {
				fail(err)
			}
		}
		if err := b.Respond(out, af.ByKey); err != nil && !errors.Is(err, van.ErrPeerLost) { // of a killed worker
			fail(fmt.Errorf("batch of %d pushes and %d pulls of worker %d: %w", len(pushes), len(pulls), b.Worker(), err))
		}
	})
}

// inSlots checks that the tensors pushed under the first keys are in its slot.
func inSlots(buf []byte, b af.Batch) error {
	for _, x := range b.Pushes() {
		if x.Key > slotKeys || x.Val.Len() == 0 || b.Worker() >= slotWorkers {
			continue
		}
		want := &buf[(b.Worker()*slotKeys+int(x.Key-1))*slotSize]
		if got := unsafe.SliceData(x.Val.Bytes()); got != want {
			return fmt.Errorf("the push of worker %d under key %d lies at %p, want its registered buffer at %p", b.Worker(), x.Key, got, want)
		}
	}
	return nil
}

// client is a worker that checks its answers.
type client struct {
	n      *postoffice.Node
	w      *af.Worker
	round  uint64
	digest uint64 // of the last pushed tensors
}

func newClient(t testing.TB, n *postoffice.Node) *client {
	t.Helper()
	return &client{n: n, w: nodetest.Worker(t, n)}
}

// Name returns the node's name.
func (c *client) Name() string { return c.n.Name() }

// part is one tensor of a batch.
type part struct {
	key  uint64
	size int
}

// request is a batch in flight.
type request struct {
	call   af.Call
	push   []af.KeyTensor
	pulls  []part
	pull   []af.KeyTensor // server by server
	digest uint64
}

// begin makes a push_pull with new memory.
func (c *client) begin(push, pull []part) (*request, error) {
	r := &request{pulls: pull}
	for _, p := range push {
		c.round++
		b := make([]byte, p.size)
		fill(b, mix(c.round, uint64(c.n.ID())))
		x, err := af.FromSlice(b)
		if err != nil {
			return nil, err
		}
		r.push = append(r.push, af.KeyTensor{Key: p.key, Val: x})
	}
	for range c.n.Topology().NumServers {
		for _, p := range pull {
			b := bytes.Repeat([]byte{0xee}, p.size)
			x, err := af.FromSlice(b)
			if err != nil {
				return nil, err
			}
			r.pull = append(r.pull, af.KeyTensor{Key: p.key, Val: x})
		}
	}
	return r, c.send(r)
}

// send sends r.
func (c *client) send(r *request) (err error) {
	if len(r.push) > 0 {
		c.digest = digest(r.push)
	}
	r.digest = c.digest
	r.call, err = c.w.PushPull(r.push, testcluster.PerServer(r.pull, c.n.Topology().NumServers))
	return err
}

// end waits for the answers and checks them.
func (c *client) end(ctx context.Context, r *request) error {
	if err := r.call.Wait(ctx); err != nil {
		return err
	}
	for i, x := range r.pull {
		p, server := r.pulls[i%len(r.pulls)], i/len(r.pulls)
		want := make([]byte, p.size)
		if p.key < echoed {
			fill(want, seed(r.digest, server, p.key))
		} else {
			for k := range r.push {
				if r.push[k].Key == p.key {
					want = r.push[k].Val.Bytes()
				}
			}
		}
		if got := x.Val.Bytes(); !bytes.Equal(got, want) {
			at := 0
			for at < len(got) && got[at] == want[at] {
				at++
			}
			return fmt.Errorf("%d pushes, %d pulls: server %d, key %d, %d bytes: byte %d is %#x, want %#x", len(r.push), len(r.pulls), server, p.key, p.size,
				at, got[at], want[at])
		}
	}
	return nil
}

// exchange makes a push_pull, and waits for its answers.
func (c *client) exchange(ctx context.Context, push, pull []part) error {
	r, err := c.begin(push, pull)
	if err != nil {
		return err
	}
	return c.end(ctx, r)
}

// mixed exchanges batches of different forms, depending on i.
func (c *client) mixed(ctx context.Context, i int) error {
	sizes := []int{1, 100, 1 << 10, 5000, 64 << 10}
	size := func(k int) int { return sizes[(i+k)%len(sizes)] }
	one := []part{{1, size(0)}}
	many := []part{{1, size(1)}, {2, size(2)}, {uint64(10 + i%64), size(3)}, {echoed, size(4)}}
	for _, b := range []struct{ push, pull []part }{{one, nil}, {nil, one}, {one, one}, {many, many}, {many, one}} {
		if err := c.exchange(ctx, b.push, b.pull); err != nil {
			return err
		}
	}
	return nil
}
