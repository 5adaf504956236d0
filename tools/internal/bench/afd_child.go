package bench

// The processes of bench afd. The parent tells them what to measure in lines: a worker makes round trips with all servers
// and decode steps, a server answers, and each can run the computation of a decode step alone.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// childAFD is a node of bench afd.
func childAFD(c *cli.Context, node *postoffice.Node) error {
	a := &afdShape{}
	if err := arguments(c, &a.push, &a.pull, &a.microBatches, &a.layers); err != nil {
		return err
	}
	a.image = make([]byte, max(a.push, a.pull))
	fill(a.image)
	at := node.Topology()
	x := floors{push: a.push, pull: a.pull, shared: node.Config().EnableIPC == 1, clients: at.NumWorkers, pairs: at.NumWorkers * at.NumServers}
	return childWithFloor(c, node, x, func(node *postoffice.Node) (end, error) {
		switch {
		case node.Role() == van.Server && onGPU(node):
			return newAFDDeviceServer(a, node)
		case node.Role() == van.Server:
			return newAFDServer(a, node)
		case onGPU(node):
			return newAFDDeviceWorker(a, node)
		}
		return newAFDWorker(a, node)
	})
}

// afdWorker makes the round trips of a worker.
type afdWorker struct {
	*afdShape
	w     *af.Worker
	rank  int
	count uint32 // of round trips
	all   []*microBatch
}

// microBatch has the tensors of a micro-batch and its call in flight.
type microBatch struct {
	push     []af.KeyTensor   // one
	pull     [][]af.KeyTensor // one by server
	prepared *af.Prepared
	call     af.Call
	seq      uint64 // the stamp of the latest round trip
}

// bytes returns the bytes of the push.
func (m *microBatch) bytes() []byte { return m.push[0].Val.Bytes() }

func newAFDWorker(a *afdShape, node *postoffice.Node) (_ *afdWorker, err error) {
	x := &afdWorker{afdShape: a, rank: node.Rank()}
	if x.w, err = af.NewWorker(node, af.WorkerOptions{}); err != nil {
		return nil, err
	}
	tensor := func(key uint64, n int) []af.KeyTensor {
		t, e := newTensor(node.Backend(), key, n)
		err = cmp.Or(err, e)
		return []af.KeyTensor{t}
	}
	for k := range a.microBatches {
		m := &microBatch{push: tensor(pushKey(k), a.push)}
		for range node.Topology().NumServers {
			m.pull = append(m.pull, tensor(pullKey(k), a.pull))
		}
		if err == nil {
			m.prepared, err = x.w.Prepare(m.push, m.pull)
		}
		if err != nil {
			x.close()
			return nil, err
		}
		copy(m.bytes(), a.image)
		x.all = append(x.all, m)
	}
	return x, nil
}

func (x *afdWorker) close() {
	for _, m := range x.all {
		m.prepared.Close()
	}
	x.w.Close()
}

// do makes n of the measurements that the parent asks for, and returns the nanoseconds of each.
func (x *afdWorker) do(ctx context.Context, what, form string, d time.Duration, n int) ([]int64, error) {
	once := func() (int64, error) { return x.trip(ctx, x.all[0], form) }
	switch what {
	case askAlone:
		return x.alone(d, n, func(k int) error {
			m := x.all[k]
			err := x.consume(m, false)
			x.stamp(m.bytes(), m.seq)
			return err
		})
	case askSteps:
		once = func() (int64, error) { return x.step(ctx, form, d) }
	}
	ns := make([]int64, n)
	for i := range ns {
		var err error
		if ns[i], err = once(); err != nil {
			return nil, err
		}
	}
	return ns, x.checkAll(ctx, form)
}

// produce writes the stamp of the next round trip into the push tensor. every is stampAll if both sides check every byte, otherwise 0.
func (x *afdWorker) produce(m *microBatch, every uint64) {
	x.count++
	m.seq = every | uint64(x.rank)<<stampWorker | uint64(x.count)
	x.stamp(m.bytes(), m.seq)
}

// consume checks the pulled tensors.
func (x *afdWorker) consume(m *microBatch, all bool) error {
	for server, t := range m.pull {
		if err := x.check(t[0].Val.Bytes(), answerTo(m.seq, server), all); err != nil {
			return err
		}
	}
	return nil
}

// start begins the round trip.
func (x *afdWorker) start(m *microBatch, form string) (err error) {
	if form == formPrepared {
		m.call, err = m.prepared.Start()
	} else {
		m.call, err = x.w.PushPull(m.push, m.pull)
	}
	return err
}

// trip makes one round trip, checks its values, and returns its nanoseconds.
func (x *afdWorker) trip(ctx context.Context, m *microBatch, form string) (int64, error) {
	x.produce(m, 0)
	start := time.Now()
	err := x.start(m, form)
	if err == nil {
		err = m.call.Wait(ctx)
	}
	ns := int64(time.Since(start))
	if err == nil {
		err = x.consume(m, false)
	}
	return ns, err
}

// step makes a decode step, and returns its nanoseconds: from the first computation to the end of the last round trip.
// The computation of a micro-batch checks the tensors of its former round trip and makes those of its next one. The
// other micro-batches are in flight meanwhile.
func (x *afdWorker) step(ctx context.Context, form string, d time.Duration) (int64, error) {
	start := time.Now()
	for layer := range x.layers {
		for _, m := range x.all {
			if layer > 0 {
				if err := m.call.Wait(ctx); err != nil {
					return 0, err
				}
			}
			if err := compute(d, func() (err error) {
				if layer > 0 {
					err = x.consume(m, false)
				}
				x.produce(m, 0)
				return err
			}); err != nil {
				return 0, err
			}
			if err := x.start(m, form); err != nil {
				return 0, err
			}
		}
	}
	for _, m := range x.all {
		if err := m.call.Wait(ctx); err != nil {
			return 0, err
		}
	}
	ns := int64(time.Since(start))
	for _, m := range x.all {
		if err := x.consume(m, false); err != nil {
			return 0, err
		}
	}
	return ns, nil
}

// checkAll makes a round trip of each micro-batch in which both sides check every byte.
func (x *afdWorker) checkAll(ctx context.Context, form string) error {
	for _, m := range x.all {
		for _, t := range m.pull {
			clear(t[0].Val.Bytes())
		}
		x.produce(m, stampAll)
		if err := x.start(m, form); err != nil {
			return err
		}
	}
	for _, m := range x.all {
		if err := m.call.Wait(ctx); err != nil {
			return err
		}
		if err := x.consume(m, true); err != nil {
			return err
		}
	}
	return nil
}

// afdServer answers the workers: at once, or as FFN processes do in a decode step. There it waits until it has a
// micro-batch of all workers, computes once, and answers all of them. It computes one micro-batch at a time.
type afdServer struct {
	*afdShape
	node    *postoffice.Node
	rank    int
	compute atomic.Int64 // the nanoseconds of a computation, or atOnce
	ready   chan af.Batch
	answers [][]af.KeyTensor // by micro-batch and worker
	// The tensors of computations alone.
	ownPush, ownAnswer []byte
}

func newAFDServer(a *afdShape, node *postoffice.Node) (*afdServer, error) {
	workers := node.Topology().NumWorkers
	s := &afdServer{afdShape: a, node: node, rank: node.Rank(), ready: make(chan af.Batch, workers*a.microBatches),
		ownPush: bytes.Clone(a.image[:a.push]), ownAnswer: make([]byte, a.pull)}
	s.compute.Store(int64(atOnce))
	s.stamp(s.ownPush, 0)
	for k := range a.microBatches {
		of := make([]af.KeyTensor, workers)
		for i := range of {
			var err error
			if of[i], err = newTensor(node.Backend(), pullKey(k), a.pull); err != nil {
				return nil, err
			}
			copy(of[i].Val.Bytes(), a.image)
		}
		s.answers = append(s.answers, of)
	}
	server, err := af.NewServer(node, af.ServerOptions{})
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	(*cluster.Node)(node).App().OnExit(func() { close(ended) })
	go s.serve(workers, ended)
	return s, server.Handle(func(b af.Batch) {
		if s.compute.Load() != int64(atOnce) {
			s.ready <- b // a worker has each micro-batch in flight once, so there is capacity
			return
		}
		k, err := s.microBatch(b)
		if err == nil {
			err = s.prepare(b, k)
		}
		s.respond(b, k, err)
	})
}

// serve answers the micro-batches of decode steps until the node has ended.
func (s *afdServer) serve(workers int, ended <-chan struct{}) {
	waiting := make([][]af.Batch, s.microBatches)
	errs := make([]error, workers)
	for {
		var b af.Batch
		select {
		case b = <-s.ready:
		case <-ended:
			return
		}
		k, err := s.microBatch(b)
		if err != nil {
			s.respond(b, k, err)
			continue
		}
		if waiting[k] = append(waiting[k], b); len(waiting[k]) < workers {
			continue
		}
		_ = compute(time.Duration(s.compute.Load()), func() error {
			for i, b := range waiting[k] {
				errs[i] = s.prepare(b, k)
			}
			return nil
		})
		for i, b := range waiting[k] {
			s.respond(b, k, errs[i])
		}
		waiting[k] = waiting[k][:0]
	}
}

// microBatch returns the number of a batch's micro-batch.
func (s *afdServer) microBatch(b af.Batch) (int, error) {
	p := b.Pushes()
	if len(p) != 1 || len(b.Pulls()) != 1 || p[0].Val.Len() != s.push {
		return 0, fmt.Errorf("a batch of %d pushes and %d pulls, want one push of %d bytes and one pull", len(p), len(b.Pulls()), s.push)
	}
	if k := int(p[0].Key-timedKey) / 2; k >= 0 && k < s.microBatches && p[0].Key == pushKey(k) {
		return k, nil
	}
	return 0, fmt.Errorf("key %d of a push is not one of %d micro-batches", p[0].Key, s.microBatches)
}

// prepare checks the push of micro-batch k and writes the stamps of its answer.
func (s *afdServer) prepare(b af.Batch, k int) error {
	push := b.Pushes()[0].Val.Bytes()
	seq := binary.LittleEndian.Uint64(push)
	if from := int(seq &^ stampAll >> stampWorker); from != b.Worker() || seq>>stampServer&0xffff != 0 {
		return fmt.Errorf("a push of worker %d has the stamp of %s", b.Worker(), stampText(seq))
	}
	if err := s.check(push, seq, seq&stampAll != 0); err != nil {
		return fmt.Errorf("push to server %d: %w", s.rank, err)
	}
	s.stamp(s.answers[k][b.Worker()].Val.Bytes(), answerTo(seq, s.rank))
	return nil
}

// respond answers the prepared micro-batch k, or refuses it.
func (s *afdServer) respond(b af.Batch, k int, err error) {
	if err != nil {
		err = b.Refuse(err)
	} else {
		w := b.Worker()
		err = b.Respond(s.answers[k][w : w+1])
	}
	if err != nil {
		s.node.Log().Error("respond", "err", err)
	}
}

// do times computations alone, or sets the computation of the next decode steps.
func (s *afdServer) do(_ context.Context, what, _ string, d time.Duration, n int) ([]int64, error) {
	if what != askAlone {
		s.compute.Store(int64(d))
		return nil, nil
	}
	return s.alone(d, n, func(k int) error {
		for range s.answers[k] {
			if err := s.check(s.ownPush, 0, false); err != nil {
				return err
			}
			s.stamp(s.ownAnswer, 0)
		}
		return nil
	})
}

func (*afdServer) close() {}
