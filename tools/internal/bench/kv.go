package bench

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

// kvSpec is one measurement of key-value traffic: all keys are pushed and pulled
// once in each round, in requests of batch keys, flight of them at a time.
type kvSpec struct {
	keys, values, batch, flight, rounds int
}

// bytes is the size of a request of n keys: keys and values.
func (s *kvSpec) bytes(n int) int { return n * (8 + 4*s.values) }

// kvReport is the JSON line of bench kv.
type kvReport struct {
	Van      string `json:"van"`
	Keys     int    `json:"keys"`
	Values   int    `json:"values"`
	Batch    int    `json:"batch"`
	Flight   int    `json:"flight"`
	Requests int    `json:"requests"`
	tail
	Bps        float64            `json:"bytes_per_s"`
	FloorBps   float64            `json:"floor_bytes_per_s"`
	Ratio      float64            `json:"ratio_bytes_per_s"`
	Floor      string             `json:"floor"` // "TCP" or "verbs"
	FloorP50   float64            `json:"floor_p50_us"`
	FloorP99   float64            `json:"floor_p99_us"`
	CPU        map[string]float64 `json:"cpu_s"`
	WorkerPart float64            `json:"worker_measured_cpu_s"`
	Checked    bool               `json:"checked"`

	floor tail
}

func runKV(c *cli.Context) error {
	s := &kvSpec{c.Int("keys"), c.Int("values"), c.Int("batch"), c.Int("flight"), c.Int("rounds")}
	if s.keys < 1 || s.values < 1 || s.batch < 1 || s.flight < 1 || s.rounds < 1 || s.bytes(min(s.batch, s.keys)) > 1<<30 {
		return exit.Usage("bench kv: --keys %d, --values %d, --batch %d, --flight %d, --rounds %d: want positive numbers, and a request of at most 1 GiB", s.keys, s.values, s.batch, s.flight, s.rounds)
	}
	s.batch = min(s.batch, s.keys)
	r, err := newRun(c)
	if err != nil {
		return err
	}
	floor := "TCP"
	if r.rdma != nil {
		floor = "verbs"
	}
	batches := (s.keys + s.batch - 1) / s.batch
	var base, push, pull *row
	cpu, err := runCluster(c, r.host, place{}, 1, 1, true, func(_ *group, _, workers processes) error {
		base, push, pull = workers.row(askFloor, "-", 0), workers.row(askPush, "-", 0), workers.row(askPull, "-", 0)
		return inTurns(slices.Repeat([]int{batches}, s.rounds+1), nil, base, push, pull, workers.row(askCheck, "-", 0))
	}, "kv", s.keys, s.values, s.batch, s.flight)
	if err != nil {
		return err
	}
	ours, floorQ := summarize(slices.Concat(push.ns[0], pull.ns[0])), summarize(base.ns[0])
	out, in := s.floorBytes()
	rep := &kvReport{Van: c.String("van"), Keys: s.keys, Values: s.values, Batch: s.batch, Flight: s.flight, Requests: len(push.ns[0]) + len(pull.ns[0]),
		tail: ours.tail, Bps: float64(s.rounds*(2*s.bytes(s.keys)+8*s.keys)) / (push.took[0] + pull.took[0]).Seconds(),
		FloorBps: float64(out+in) / floorQ.Mean * 1e6, Floor: floor, FloorP50: floorQ.P50, FloorP99: floorQ.P99,
		CPU: cpu, WorkerPart: (push.cpu[0] + pull.cpu[0]).Seconds(), Checked: true, floor: floorQ.tail}
	rep.Ratio = rep.Bps / rep.FloorBps
	return show(c, rep)
}

func (r *kvReport) print(w io.Writer) error {
	fmt.Fprintf(w, "push and pull of %d float32 keys with %d values over %s, %d keys a request, %d in flight, all sums checked: %t\n",
		r.Keys, r.Values, r.Van, r.Batch, r.Flight, r.Checked)
	fmt.Fprintf(w, "%-16s %10s %10s %10s %10s %14s\n", "", "p50 us", "p90 us", "p99 us", "max us", "MB/s")
	for _, x := range []struct {
		name string
		q    tail
		bps  float64
	}{{"request", r.tail, r.Bps}, {"floor (" + r.Floor + ")", r.floor, r.FloorBps}} {
		fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f %14.0f\n", x.name, x.q.P50, x.q.P90, x.q.P99, x.q.Max, x.bps/1e6)
	}
	fmt.Fprintf(w, "bytes per second: %.2f of the floor, which sends a push and a pull's keys and reads back a pull's values\n", r.Ratio)
	_, err := fmt.Fprintf(w, "CPU seconds: scheduler %.2f, server %.2f, worker %.2f (start-up and floor included)\n", r.CPU["scheduler"], r.CPU["server"], r.CPU["worker"])
	return err
}

// floorBytes are the bytes that the floor sends and reads for one push and one pull.
func (s *kvSpec) floorBytes() (out, in int) {
	return s.bytes(s.batch) + 8*s.batch, s.bytes(s.batch)
}

// Measurements of bench kv: all pushes or all pulls of a round, and the check of the pulled sums.
const (
	askPush  = "push"
	askPull  = "pull"
	askCheck = "check"
)

func childKV(c *cli.Context, node *postoffice.Node) error {
	var s kvSpec
	if err := arguments(c, &s.keys, &s.values, &s.batch, &s.flight); err != nil {
		return err
	}
	out, in := s.floorBytes()
	return childWithFloor(c, node, floors{push: out, pull: in, clients: 1, pairs: 1}, func(node *postoffice.Node) (end, error) {
		if node.Role() == van.Worker {
			return newKVWorker(s, node)
		}
		server, err := kv.NewServer[float32](node, kv.ServerOptions{})
		if err != nil {
			return nil, err
		}
		var sums kv.SummingHandler[float32]
		return nil, server.Handle(sums.Handle)
	})
}

// kvWorker pushes and pulls all keys in rounds.
type kvWorker struct {
	kvSpec
	w         *kv.Worker[float32]
	keys      []kv.Key
	vals, got []float32
	round     int
}

func newKVWorker(s kvSpec, node *postoffice.Node) (end, error) {
	w, err := kv.NewWorker[float32](node, kv.WorkerOptions{})
	if err != nil {
		return nil, err
	}
	x := &kvWorker{kvSpec: s, w: w, keys: make([]kv.Key, s.keys), vals: make([]float32, s.keys*s.values), got: make([]float32, s.keys*s.values)}
	for i := range x.keys {
		x.keys[i] = kv.Key(i) * (math.MaxUint64 / kv.Key(s.keys))
	}
	for i := range x.vals {
		x.vals[i] = float32(i % 251)
	}
	return x, nil
}

func (x *kvWorker) close() { x.w.Close() }

func (x *kvWorker) do(ctx context.Context, what, _ string, _ time.Duration, batches int) ([]int64, error) {
	switch what {
	case askPush:
		x.round++
		return x.pass(ctx, batches, func(lo, hi int) (kv.Call, error) {
			return x.w.Push(x.keys[lo:hi], x.vals[lo*x.values:hi*x.values], kv.NoCopy)
		})
	case askPull:
		return x.pass(ctx, batches, func(lo, hi int) (kv.Call, error) {
			dst := x.got[lo*x.values : hi*x.values]
			return x.w.Pull(x.keys[lo:hi], &dst, kv.NoCopy)
		})
	}
	for i, v := range x.got {
		if want := x.vals[i] * float32(x.round); v != want {
			return nil, fmt.Errorf("round %d: key %d value %d: got %g, want %g", x.round-1, x.keys[i/x.values], i%x.values, v, want)
		}
		x.got[i] = -1
	}
	return nil, nil
}

// pass sends all batches, with flight requests in flight, and returns the time of each from its call to the end of its
// Wait.
func (s *kvSpec) pass(ctx context.Context, batches int, send func(lo, hi int) (kv.Call, error)) ([]int64, error) {
	ns := make([]int64, 0, batches)
	type request struct {
		call  kv.Call
		start time.Time
	}
	var flight []request
	for sent := 0; len(ns) < batches; {
		if sent < batches && len(flight) < s.flight {
			start := time.Now()
			call, err := send(sent*s.batch, min((sent+1)*s.batch, s.keys))
			if err != nil {
				return nil, err
			}
			flight = append(flight, request{call, start})
			sent++
			continue
		}
		if err := flight[0].call.Wait(ctx); err != nil {
			return nil, err
		}
		ns = append(ns, int64(time.Since(flight[0].start)))
		flight = flight[1:]
	}
	return ns, nil
}
