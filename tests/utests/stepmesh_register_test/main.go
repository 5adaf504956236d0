// Command stepmesh_register_test measures push_pull with receive buffers that the
// server has registered: three micro-batches of BENCHMARK_SIZE bytes in turn.
// DMLC_ROLE says which part the process plays. The server checks that the pushes
// lie in its buffers and returns them; the worker compares.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

const microBatches = 3

// Keys of a micro-batch.
func pushKey(mb int) uint64 { return uint64(mb) }
func pullKey(mb int) uint64 { return 1<<16 | uint64(mb) }

func main() {
	prog.Main(prog.Program{Serve: serve, Worker: work, Ready: van.ServerGroup | van.WorkerGroup})
}

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	size := n.Config().Bench.Size
	buffers := make([]af.Tensor, n.Topology().NumWorkers)
	for rank := range buffers {
		var err error
		if buffers[rank], err = n.Tensor(af.Uint8, int64(microBatches*size)); err != nil {
			return nil, err
		}
		var keys []uint64
		for mb := range microBatches {
			keys = append(keys, pushKey(mb))
		}
		if err := s.RegisterRecvTensor(buffers[rank], []int{rank, rank, rank}, keys); err != nil {
			return nil, err
		}
	}
	return func(b af.Batch) error {
		return answer(b, buffers[b.Worker()], size)
	}, nil
}

func answer(b af.Batch, buffer af.Tensor, size int) error {
	pushes, pulls := b.Pushes(), b.Pulls()
	if len(pushes) != 1 || len(pulls) != 1 || pushes[0].Key >= microBatches {
		b.Release()
		return fmt.Errorf("batch of %d pushes and %d pulls, want one of each, with a push key below %d", len(pushes), len(pulls), microBatches)
	}
	place := buffer.Mem().Addr() + pushes[0].Key*uint64(size)
	if addr := pushes[0].Val.Mem().Addr(); addr != place {
		b.Release()
		return fmt.Errorf("push with key %d lies at %#x, want the registered %#x", pushes[0].Key, addr, place)
	}
	return b.Respond([]af.KeyTensor{{Key: pulls[0].Key, Val: pushes[0].Val}}, af.ByKey)
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	size := n.Config().Bench.Size
	data, zero := make([]byte, size), make([]byte, size)
	r := prog.Random(n.Rank())
	push := make([]af.KeyTensor, microBatches)
	pull := make([][]af.KeyTensor, microBatches)
	for mb := range push {
		push[mb].Key = pushKey(mb)
		var err error
		if push[mb].Val, err = n.Tensor(af.Uint8, int64(size)); err != nil {
			return err
		}
		if pull[mb], err = n.Pulls(pullKey(mb), af.Uint8, int64(size)); err != nil {
			return err
		}
	}
	// A round of the original is all micro-batches, and a line is ten rounds.
	_, err := n.Measure(ctx, "pushpull", 10*microBatches, microBatches, func(i int) (time.Duration, error) {
		mb := i % microBatches
		prog.FillBytes(r, data)
		if err := n.Put(push[mb].Val, data); err != nil {
			return 0, err
		}
		if err := n.PutAll(pull[mb], zero); err != nil {
			return 0, err
		}
		took, err := prog.PushPull(ctx, w, push[mb:mb+1], pull[mb])
		if err != nil {
			return 0, err
		}
		for s, p := range pull[mb] {
			if err := n.Equal(fmt.Sprintf("round %d: answer of server %d", i, s), p.Val, data); err != nil {
				return 0, err
			}
		}
		return took, nil
	})
	return err
}
