// Command gather_overlap measures whether servers that all need the pushes of every worker
// gain by handing each push on to their siblings when it arrives.
//
// Each worker pushes one part of its tensor to each server; then every server is to have all
// parts of all workers. That is done in four ways, in blocks of calls that take turns:
//
//   - gather: a server waits for all pushes, then all servers call AllGather;
//   - gather each: a server calls AllGatherV for each push when it has come, and waits for all of these in
//     the end. Each worker's have a communicator of their own, since servers need not see workers in one order;
//   - hand on: a server sends each push to its siblings as soon as it has come, which puts it where
//     it is wanted, without asking and without a copy that AllGather would not make;
//   - push to all: workers push whole tensors to all servers, and nothing is to be gathered.
//
// The time of a call is from its first push, at whichever worker, to when the last server has
// everything, by the clock of the host, which all processes must share. With -pieces each part is
// pushed in so many requests, of which each is handed on by itself.
//
// The processes of a cluster are started by stepaf launch -n 2 -s 2 -- gather_overlap. The first
// worker prints the figures. Ends of all parts are checked in each call, every byte in the last
// one of a block, outside the time.
package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
)

var (
	sizes  = flag.String("sizes", "4096,65536,917504,16777216", "bytes of a worker's tensor, separated by commas")
	calls  = flag.Int("calls", 0, "measured calls of each way and size (default: by size)")
	rounds = flag.Int("rounds", 20, "blocks in which they are made")
	pieces = flag.Int("pieces", 1, "requests in which each part is pushed")
)

// Ways.
const (
	gather = iota
	gatherEach
	handOn
	pushToAll
	ways
)

var wayNames = [ways]string{"gather", "gather each", "hand on", "push to all"}

// The first and the last 8 bytes of a piece (ends) are the time when its call began, and the number of
// the call, with isLast in the last one of a block.
const (
	ends   = 16
	isLast = 1 << 63
)

// key is that of a piece pushed by any worker, for a size, in a way.
func key(size, way, piece int) uint64 { return uint64(size)<<16 | uint64(way)<<12 | uint64(piece) }

func parseKey(k uint64) (size, way, piece int) {
	return int(k >> 16), int(k >> 12 & 15), int(k & 0xfff)
}

func main() {
	flag.Parse()
	if *calls < 0 || *rounds < 1 || *pieces < 1 || *pieces > 64 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "want -calls and -rounds of at least 1, -pieces from 1 to 64, and no other arguments")
		os.Exit(2)
	}
	prog.Main(prog.Program{Ready: van.ServerGroup | van.WorkerGroup, Serve: serve, Worker: work})
}

// parseSizes reads -sizes: they must divide evenly, and leave room for the ends of pieces.
func parseSizes(servers int) (list []int, err error) {
	for word := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(word)
		if by := servers * *pieces; err != nil || n%(8*by) != 0 || n/by < ends || n > math.MaxInt32/4 {
			return nil, fmt.Errorf("-sizes %q: want a multiple of %d, from %d to %d", word, 8*by, ends*by, math.MaxInt32/4)
		}
		list = append(list, n)
	}
	return list, nil
}

// contents is the tensor of a worker, but for the ends of pieces.
func contents(worker, size int) []byte {
	b := make([]byte, size)
	prog.FillBytes(prog.Random(worker, size), b)
	return b
}

// cut is b in n parts.
func cut(b []byte, n int) [][]byte { return slices.Collect(slices.Chunk(b, len(b)/n)) }

// tensor is a view on b.
func tensor(b []byte) af.Tensor {
	t, err := af.FromBytes(b, af.Uint8, int64(len(b)))
	if err != nil {
		panic(err) // its arguments fit
	}
	return t
}

// request is one PushPull of a call.
type request struct {
	piece []byte // that it pushes
	push  []af.KeyTensor
	pull  [][]af.KeyTensor
	to    []af.CallOption
}

// worker makes the calls.
type worker struct {
	n       *prog.Node
	w       *af.Worker
	servers int
	seq     uint64
	answers []byte // of the servers: 8 bytes each
	flying  []af.Call
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	list, err := parseSizes(n.Topology().NumServers)
	if err != nil {
		return err
	}
	x := &worker{n: n, w: w, servers: n.Topology().NumServers}
	x.answers = make([]byte, 8*x.servers)
	first := n.Topology().GroupRank == 0
	if first {
		fmt.Printf("%d workers, %d servers, %d pieces over %s; microseconds until the last server has everything, and of the round trip\n", n.Topology().NumWorkers,
			x.servers, *pieces, n.PathTo(n.Topology().ServerInstances()[0]).Over)
		fmt.Printf("%9s %-12s %6s %9s %9s %9s %9s %9s   %s\n", "bytes", "", "calls", "p50", "p90", "p99", "trip p50", "p99",
			"p50 / gather's; median of the blocks' (least to most)")
	}
	for i, size := range list {
		f, err := x.measure(ctx, i, size)
		if err != nil {
			return err
		}
		if first {
			f.print(size)
		}
	}
	return nil
}

// requests are those of a call: pieces of b, which lies as every server wants it in the end.
func (x *worker) requests(size, way int, b []byte) (all []request) {
	pull := func(s, p int) (l []af.KeyTensor) {
		if p == *pieces-1 {
			l = append(l, af.KeyTensor{Key: key(size, way, p), Val: tensor(x.answers[8*s : 8*s+8])})
		}
		return l
	}
	if way == pushToAll {
		for p, piece := range cut(b, *pieces) {
			r := request{piece: piece, push: []af.KeyTensor{{Key: key(size, way, p), Val: tensor(piece)}}}
			for s := range x.servers {
				r.pull = append(r.pull, pull(s, p))
			}
			all = append(all, r)
		}
		return all
	}
	parts := cut(b, x.servers)
	for p := range *pieces {
		for i := range x.servers {
			s := (i + x.n.Topology().GroupRank) % x.servers // not all begin with the same one
			piece := cut(parts[s], *pieces)[p]
			all = append(all, request{piece, []af.KeyTensor{{Key: key(size, way, p), Val: tensor(piece)}}, [][]af.KeyTensor{pull(s, p)}, []af.CallOption{af.To{s}}})
		}
	}
	return all
}

// call makes one call and returns the nanoseconds until the last server had everything, and of the round trip.
func (x *worker) call(ctx context.Context, all []request, last bool) (done, trip int64, err error) {
	number := x.seq
	if x.seq++; last {
		number |= isLast
	}
	x.flying = x.flying[:0]
	start := clock.Now()
	for _, r := range all {
		binary.LittleEndian.PutUint64(r.piece, start)
		binary.LittleEndian.PutUint64(r.piece[len(r.piece)-8:], number)
		c, err := x.w.PushPull(r.push, r.pull, r.to...)
		if err != nil {
			return 0, 0, err
		}
		x.flying = append(x.flying, c)
	}
	for _, c := range x.flying {
		if err := c.Wait(ctx); err != nil {
			return 0, 0, err
		}
	}
	trip = int64(clock.Now() - start)
	for s := range x.servers {
		done = max(done, int64(binary.LittleEndian.Uint64(x.answers[8*s:])))
	}
	return done, trip, nil
}

// figures are nanoseconds of one size.
type figures struct {
	done, trip [ways][]int64
	ratios     [ways][]float64 // of a block's median to that of the gather way in the same round
}

// measure makes the calls of one size.
func (x *worker) measure(ctx context.Context, i, size int) (*figures, error) {
	var all [ways][]request
	for way := range all {
		all[way] = x.requests(i, way, contents(x.n.Topology().GroupRank, size))
	}
	total := *calls
	if total == 0 {
		total = min(max(1<<31/(size*x.servers+1<<19), 100), 2000)
	}
	each := max(total / *rounds, 2)
	f := &figures{}
	for round := -1; round < *rounds; round++ {
		var medians [ways]float64
		for k := range ways {
			way := (k + round + 1) % ways
			var done []int64
			for c := range each + 1 { // the call that checks every byte does not count
				d, trip, err := x.call(ctx, all[way], c == each)
				if err != nil {
					return nil, fmt.Errorf("%d bytes, %s: %w", size, wayNames[way], err)
				}
				if round >= 0 && c < each {
					done = append(done, d)
					f.trip[way] = append(f.trip[way], trip)
				}
			}
			if round >= 0 {
				f.done[way] = append(f.done[way], done...)
				medians[way] = quantile(done, 0.5)
			}
		}
		for way := range ways {
			if round >= 0 {
				f.ratios[way] = append(f.ratios[way], medians[way]/medians[gather])
			}
		}
	}
	return f, nil
}

// quantile is in microseconds. It sorts ns.
func quantile(ns []int64, q float64) float64 {
	slices.Sort(ns)
	return float64(ns[min(int(q*float64(len(ns))), len(ns)-1)]) / 1e3
}

func (f *figures) print(size int) {
	base := quantile(f.done[gather], 0.5)
	for way := range ways {
		d, t, r := f.done[way], f.trip[way], f.ratios[way]
		slices.Sort(r)
		fmt.Printf("%9d %-12s %6d %9.1f %9.1f %9.1f %9.1f %9.1f   %.2f; %.2f (%.2f to %.2f)\n", size, wayNames[way], len(d), quantile(d, 0.5), quantile(d, 0.9),
			quantile(d, 0.99), quantile(t, 0.5), quantile(t, 0.99), quantile(d, 0.5)/base, r[len(r)/2], r[0], r[len(r)-1])
	}
}
