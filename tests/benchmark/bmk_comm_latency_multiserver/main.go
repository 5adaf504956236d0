// Command bmk_comm_latency_multiserver measures where the time of a push_pull goes:
// it pushes a matrix of bfloat16 numbers and one int32 to every server, pulls one
// matrix of the same size from each, and takes the stamps of each message apart.
//
// The matrix has -rows x -cols numbers; the defaults suit a CPU, the Python
// original's are 1024 x 7168. The number of rounds is -rounds, else BENCHMARK_ITER,
// else 1000; 0 is endless. A report is printed every -report rounds and at the end.
package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"os"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
)

const microBatches = 3

var (
	rows   = flag.Int("rows", 128, "rows of the matrix")
	cols   = flag.Int("cols", 7168, "columns of the matrix")
	rounds = flag.Int("rounds", -1, "rounds to run, 0 is endless (default BENCHMARK_ITER, else 1000)")
	every  = flag.Int("report", 500, "rounds of each report")
)

// The keys are those of the original: private key + micro-batch<<8 + rank<<16,
// pulls + 1<<24.
func pushKey(i, mb, rank int) uint64 { return uint64(i + mb<<8 + rank<<16) }
func pullKey(i, mb, rank int) uint64 { return pushKey(i, mb, rank) + 1<<24 }

func main() {
	flag.Parse()
	if *rows < 1 || *cols < 1 || *every < 1 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "want -rows, -cols and -report of at least 1, and no other arguments")
		os.Exit(2)
	}
	prog.Main(prog.Program{FServer: true, RoleBarrier: true, Serve: serve, Worker: work})
}

// serve answers at once, with the first rows of a buffer filled beforehand.
func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	buffer, err := n.Tensor(af.BFloat16, int64(*rows), int64(*cols))
	if err != nil {
		return nil, err
	}
	if err := n.Put(buffer, contents(n.Topology().GroupRank)); err != nil {
		return nil, err
	}
	return func(b af.Batch) error {
		out := make([]af.KeyTensor, len(b.Pulls()))
		for i, p := range b.Pulls() {
			out[i] = af.KeyTensor{Key: p.Key, Val: buffer}
		}
		return b.Respond(out, af.ByKey)
	}, nil
}

// contents is the answer of the server with a group rank.
func contents(groupRank int) []byte {
	b := make([]byte, 2**rows**cols)
	prog.FillBytes(prog.Random(groupRank), b)
	return b
}

type buffers struct {
	push []af.KeyTensor
	pull [][]af.KeyTensor // one of each server
}

func makeBuffers(n *prog.Node, mb int) (b buffers, err error) {
	matrix := func() (t af.Tensor) {
		if err == nil {
			t, err = n.Tensor(af.BFloat16, int64(*rows), int64(*cols))
		}
		return t
	}
	rank := max(n.Config().NodeRank, 0)
	b.push = []af.KeyTensor{{Key: pushKey(0, mb, rank), Val: matrix()}}
	for s := range n.Topology().NumServers {
		b.pull = append(b.pull, []af.KeyTensor{{Key: pullKey(s, mb, rank), Val: matrix()}})
	}
	if err != nil {
		return b, err
	}
	count, err := n.Tensor(af.Int32, 1)
	if err != nil {
		return b, err
	}
	if err := n.Put(count, binary.LittleEndian.AppendUint32(nil, uint32(*rows))); err != nil {
		return b, err
	}
	b.push = append(b.push, af.KeyTensor{Key: pushKey(1, mb, rank), Val: count})
	return b, nil
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	var all [microBatches]buffers
	for mb := range all {
		var err error
		if all[mb], err = makeBuffers(n, mb); err != nil {
			return err
		}
	}
	total := *rounds
	if total < 0 {
		total = n.Iterations(1000)
	}
	fmt.Printf("start to run %d\n", total)
	r := newReport(n.Config().GPU)
	defer r.print(os.Stdout)
	for i := range prog.Rounds(total) {
		b := all[i%microBatches]
		start := clock.Now()
		h, err := w.PushPull(b.push, b.pull)
		if err != nil {
			return err
		}
		if err := h.Wait(ctx); err != nil {
			return err
		}
		end := clock.Now()
		r.add(h.Traces(), start, end)
		if r.len() == *every {
			r.print(os.Stdout)
		}
	}
	used := microBatches
	if total > 0 {
		used = min(used, total)
	}
	return verify(n, all[:used])
}

// verify compares the last results with the tensors of the servers. Comparing each round
// would be most of its time.
func verify(n *prog.Node, all []buffers) error {
	for s := range n.Topology().NumServers {
		want := contents(s)
		for mb := range all {
			if err := n.Equal(fmt.Sprintf("micro-batch %d, server %d", mb, s), all[mb].pull[s][0].Val, want); err != nil {
				return err
			}
		}
	}
	return nil
}
