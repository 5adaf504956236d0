package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// This file tests workers that use some of the servers, and servers that take any batches: push_pull(servers=[...]) and get_batch(any=True), by the core of the Python
// module.

// Keys of a batch. The first push has the sender's process and round.
const (
	headKey = 1
	bodyKey = 2
)

// mostBatches is the number of batches that a server takes at a time.
const mostBatches = 2

// serveAny makes n a server that answers each batch with values that depend on all of it, until ctx ends.
func serveAny(ctx context.Context, n *postoffice.Node) error {
	s, err := core.Open(ctx, n)
	if err != nil {
		return err
	}
	type from struct{ process, round uint64 }
	newest, replaced := map[int]from{}, map[uint64]bool{}
	var items []core.Item
	for ctx.Err() == nil {
		items, err = s.GetAny(items[:0], mostBatches, 50*time.Millisecond)
		if errors.Is(err, core.ErrPending) {
			continue
		}
		if err != nil {
			return err
		}
		if len(items) > mostBatches {
			return fmt.Errorf("%d batches at once, want at most %d", len(items), mostBatches)
		}
		for _, it := range items {
			head, last := it.Pushes()[0].Val.Bytes(), newest[it.Worker()]
			x := from{binary.LittleEndian.Uint64(head), binary.LittleEndian.Uint64(head[8:])}
			if x.process == last.process && x.round <= last.round || replaced[x.process] {
				return fmt.Errorf("worker %d: round %d of process %d behind round %d of process %d", it.Worker(), x.round, x.process, last.round, last.process)
			}
			if x.process != last.process {
				replaced[last.process] = true
			}
			newest[it.Worker()] = x
			d, out := digest(it.Pushes()), make([]af.KeyTensor, len(it.Pulls()))
			for i, p := range it.Pulls() {
				b := make([]byte, p.Len)
				fill(b, seed(d, n.Topology().GroupRank, p.Key))
				if out[i], err = keyed(p.Key, b); err != nil {
					return err
				}
			}
			if _, err := s.Answer(af.Complete, it.ID, out, nil); err != nil {
				return fmt.Errorf("answer to worker %d: %w", it.Worker(), err)
			}
			it.Release()
		}
	}
	return nil
}

func keyed(key uint64, b []byte) (af.KeyTensor, error) {
	x, err := af.FromSlice(b)
	return af.KeyTensor{Key: key, Val: x}, err
}

// picker is a worker that chooses the servers of each batch.
type picker struct {
	s              *core.Session
	rank           int
	servers        int
	process, round uint64
}

func newPicker(ctx context.Context, n *postoffice.Node) (*picker, error) {
	s, err := core.Open(ctx, n)
	at := n.Topology()
	return &picker{s: s, rank: at.GroupRank, servers: at.NumServers, process: uint64(os.Getpid())<<8 | uint64(at.GroupRank)}, err
}

// pickers makes pickers of the workers in this process.
func (c *cluster) pickers() []*picker {
	c.t.Helper()
	all := make([]*picker, 0, len(c.Workers))
	for _, n := range c.Workers {
		if n != nil {
			all = append(all, &picker{})
		}
	}
	nodetest.Together(c.t, c.Workers[:len(all)], func(n *postoffice.Node) error {
		p, err := newPicker(c.t.Context(), n)
		if err == nil {
			*all[p.rank] = *p
		}
		return err
	})
	return all
}

// Name returns the node's name.
func (p *picker) Name() string { return p.s.Name() }

// turn returns the servers of a worker's ith batch: one after the other, two in descending order, all.
func (p *picker) turn(i int) []int {
	switch first := (p.rank + i) % p.servers; i % 3 {
	case 0:
		return []int{first}
	case 1:
		return []int{max(first, (first+1)%p.servers), min(first, (first+1)%p.servers)}
	}
	return nil
}

// picked is a batch for some servers, or, if they are nil, for all.
type picked struct {
	to         []int
	push, pull []af.KeyTensor
	digest     uint64
}

// batch makes a batch in new memory.
func (p *picker) batch(to []int, size int) (*picked, error) {
	b := &picked{to: to}
	if to == nil {
		for i := range p.servers {
			b.to = append(b.to, i)
		}
	}
	add := func(list *[]af.KeyTensor, key uint64, n int) error {
		x, err := keyed(key, make([]byte, n))
		*list = append(*list, x)
		return err
	}
	err := errors.Join(add(&b.push, headKey, 16), add(&b.push, bodyKey, size))
	for range b.to {
		err = errors.Join(err, add(&b.pull, headKey, 100), add(&b.pull, bodyKey, size))
	}
	return b, err
}

// write gives b the contents of the next round.
func (p *picker) write(b *picked) {
	p.round++
	head := b.push[0].Val.Bytes()
	binary.LittleEndian.PutUint64(head, p.process)
	binary.LittleEndian.PutUint64(head[8:], p.round)
	fill(b.push[1].Val.Bytes(), mix(p.process, p.round))
	b.digest = digest(b.push)
	for i := range b.pull {
		clear(b.pull[i].Val.Bytes())
	}
}

// check checks the answers: those of each server, in the order of the request.
func (b *picked) check() error {
	for i, x := range b.pull {
		server, want := b.to[i/2], make([]byte, x.Val.Len())
		fill(want, seed(b.digest, server, x.Key))
		if !bytes.Equal(x.Val.Bytes(), want) {
			return fmt.Errorf("to servers %d: the answer of server %d under key %d, of %d bytes, is wrong", b.to, server, x.Key, len(want))
		}
	}
	return nil
}

// wait calls one, which waits for a slice of time, until the batch is complete.
func wait(one func(limit, slice time.Duration) error) error {
	for {
		if err := one(20*time.Second, time.Second); !errors.Is(err, core.ErrPending) {
			return err
		}
	}
}

// ask sends a batch. end waits for the answers and checks them.
func (p *picker) ask(to []int, size int) (end func() error, err error) {
	b, err := p.batch(to, size)
	if err != nil {
		return nil, err
	}
	p.write(b)
	var h int32
	if to == nil {
		h, err = p.s.PushPull(af.Complete, nil, b.push, b.pull)
	} else {
		h, err = p.s.PushPull(af.Complete, to, b.push, b.pull)
	}
	return func() error {
		if err := wait(func(limit, slice time.Duration) error { return p.s.Wait(int64(h), limit, slice) }); err != nil {
			return err
		}
		return b.check()
	}, err
}

// exchange sends a batch, and waits for its answers.
func (p *picker) exchange(to []int, size int) error {
	end, err := p.ask(to, size)
	if err != nil {
		return err
	}
	return end()
}

// pickedSize returns the size of the ith batch.
func pickedSize(i int) int { return []int{1, 100, 5000, 64 << 10}[i%4] }

// turns keeps three batches in flight.
func (p *picker) turns(n int) error {
	var flying []func() error
	for i := range n {
		end, err := p.ask(p.turn(i), pickedSize(i))
		if err != nil {
			return fmt.Errorf("turn %d: %w", i, err)
		}
		if flying = append(flying, end); len(flying) == 3 {
			if err := flying[0](); err != nil {
				return fmt.Errorf("turn %d: %w", i-2, err)
			}
			flying = flying[1:]
		}
	}
	for _, end := range flying {
		if err := end(); err != nil {
			return fmt.Errorf("one of the last turns: %w", err)
		}
	}
	return nil
}

// prepared does the same with one prepared exchange, one call at a time.
func (p *picker) prepared(to []int, n int) error {
	b, err := p.batch(to, 5000)
	if err != nil {
		return err
	}
	x, err := p.s.Prepare(to, b.push, b.pull)
	if err != nil {
		return err
	}
	defer x.Close()
	for i := range n {
		p.write(b)
		_, err := x.Start(af.Complete, false, core.AllRows)
		if err == nil {
			err = wait(func(limit, slice time.Duration) error { return x.Wait(af.Complete, limit, slice) })
		}
		if err == nil {
			err = b.check()
		}
		if err != nil {
			return fmt.Errorf("prepared for servers %d, round %d: %w", to, i, err)
		}
	}
	return nil
}

// startPicking starts a cluster with two servers that take any batches. If picking is not negative, worker picking is a child.
func startPicking(t *testing.T, workers, picking int) *cluster {
	return start(t, options{workers: workers, servers: 2, place: func(role string, rank int) place {
		if role == "worker" && rank == picking {
			return place{what: picks}
		}
		return map[string]place{"server": {what: anyone}}[role]
	}})
}

// TestSubsets: one or three workers, two servers. Each batch goes to one server, to both, or to all, in any order.
func TestSubsets(t *testing.T) {
	notShort(t)
	for _, workers := range []int{1, 3} {
		t.Run(fmt.Sprintf("%dA2F", workers), func(t *testing.T) {
			c := startPicking(t, workers, -1)
			nodetest.Together(t, c.pickers(), func(p *picker) error {
				return errors.Join(p.turns(24), p.prepared([]int{p.rank % 2}, 6), p.prepared([]int{1, 0}, 6), p.turns(6))
			})
			c.end()
		})
	}
}

// TestSubsetsServerKilled: a worker that does not use a server does not notice that it is killed. A worker that uses it gets an error that names it, until another
// process has replaced it.
func TestSubsetsServerKilled(t *testing.T) {
	notShort(t)
	c := startPicking(t, 3, -1)
	all := c.pickers()
	nodetest.Together(t, all, func(p *picker) error { return p.turns(6) })
	stop := nodetest.Repeat(t, all[0].Name(), func(i int) error { return all[0].exchange([]int{0}, pickedSize(i)) })
	failed, under := make(chan error, 1), make(chan struct{})
	go func() {
		for i := 0; ; i++ {
			if err := all[1].exchange([]int{1}, pickedSize(i)); err != nil {
				failed <- err
				return
			}
			if i == 0 {
				close(under)
			}
		}
	}()
	select {
	case <-under:
	case err := <-failed:
		t.Fatal(err)
	}
	c.child("server", 1).Kill()
	lost(t, failed, time.Now(), all[1].Name(), "server 1")
	for i, to := range [][]int{{0}, {1}, nil, {1, 0}, {0}} {
		err := all[2].exchange(to, pickedSize(i))
		if len(to) == 1 && to[0] == 0 {
			// An answer of server 0 to the previous, failed call may arrive after that call was canceled. The connection then breaks, and is restored.
			for end := time.Now().Add(10 * time.Second); i > 0 && errors.Is(err, van.ErrPeerLost) && time.Now().Before(end); {
				err = all[2].exchange(to, pickedSize(i))
			}
			if err != nil {
				t.Errorf("to server 0, which lives: %v", err)
			}
		} else {
			vantest.Fails(t, err, van.ErrPeerLost, "server 1")
		}
	}
	var next *nodetest.Process
	nodetest.Returns(t, c.Workers, van.ServerID(1), func() { next = c.spawn("server", 1, anyone, 1) })
	next.Ready()
	stop()
	nodetest.Together(t, all, func(p *picker) error { return p.turns(9) })
}

// TestSubsetsWorkerKilled: a worker that is killed with batches at some of the servers does not disturb servers or other workers, and its replacement gets its own
// answers.
func TestSubsetsWorkerKilled(t *testing.T) {
	notShort(t)
	c := startPicking(t, 3, 2)
	all := c.pickers()
	victim := c.child("worker", 2)
	for range 2 {
		victim.Expect(picks)
		victim.Kill()
		nodetest.Together(t, all, func(p *picker) error { return p.turns(9) })
		victim = c.spawn("worker", 2, picks, 1)
	}
	victim.Expect(picks)
	nodetest.Together(t, all, func(p *picker) error { return p.turns(9) })
}
