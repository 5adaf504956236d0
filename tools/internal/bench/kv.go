package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
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
	Van        string             `json:"van"`
	Keys       int                `json:"keys"`
	Values     int                `json:"values"`
	Batch      int                `json:"batch"`
	Flight     int                `json:"flight"`
	Requests   int                `json:"requests"`
	P50        float64            `json:"p50_us"`
	P90        float64            `json:"p90_us"`
	P99        float64            `json:"p99_us"`
	Max        float64            `json:"max_us"`
	Bps        float64            `json:"bytes_per_s"`
	FloorBps   float64            `json:"floor_bytes_per_s"`
	Ratio      float64            `json:"ratio_bytes_per_s"`
	Floor      string             `json:"floor"` // "TCP" or "verbs"
	FloorP50   float64            `json:"floor_p50_us"`
	FloorP99   float64            `json:"floor_p99_us"`
	CPU        map[string]float64 `json:"cpu_s"`
	WorkerPart float64            `json:"worker_measured_cpu_s"`
	Checked    bool               `json:"checked"`
}

func runKV(c *cli.Context) error {
	s := &kvSpec{c.Int("keys"), c.Int("values"), c.Int("batch"), c.Int("flight"), c.Int("rounds")}
	if s.keys < 1 || s.values < 1 || s.batch < 1 || s.flight < 1 || s.rounds < 1 || s.bytes(min(s.batch, s.keys)) > 1<<30 {
		return exit.Usage("bench kv: --keys %d, --values %d, --batch %d, --flight %d, --rounds %d: want positive numbers, and a request of at most 1 GiB", s.keys, s.values, s.batch, s.flight, s.rounds)
	}
	s.batch = min(s.batch, s.keys)
	rdma, host, err := rdmaOf(c)
	if err != nil {
		return err
	}
	floor := "TCP"
	if rdma != nil {
		floor = "verbs"
	}
	r, cpu, err := runCluster(c, host, place{}, 1, true, "kv", s.keys, s.values, s.batch, s.flight, s.rounds)
	if err != nil {
		return err
	}
	return printKV(c.App.Writer, c.Bool("json"), c.String("van"), floor, s, r, cpu)
}

func printKV(w io.Writer, asJSON bool, van, floorName string, s *kvSpec, r *result, cpu map[string]float64) error {
	ours, floor := summarize(r.Ours), summarize(r.Floor)
	rep := kvReport{Van: van, Keys: s.keys, Values: s.values, Batch: s.batch, Flight: s.flight, Requests: len(r.Ours),
		P50: ours.P50, P90: ours.P90, P99: ours.P99, Max: ours.Max, Bps: float64(r.Bytes) / r.Seconds, FloorBps: r.FloorBps,
		Floor: floorName, FloorP50: floor.P50, FloorP99: floor.P99, CPU: cpu, WorkerPart: r.CPU, Checked: r.Checked}
	rep.Ratio = rep.Bps / rep.FloorBps
	if asJSON {
		return json.NewEncoder(w).Encode(rep)
	}
	fmt.Fprintf(w, "push and pull of %d float32 keys with %d values over %s, %d keys a request, %d in flight, all sums checked: %t\n",
		s.keys, s.values, van, s.batch, s.flight, r.Checked)
	fmt.Fprintf(w, "%-16s %10s %10s %10s %10s %14s\n", "", "p50 us", "p90 us", "p99 us", "max us", "MB/s")
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f %14.0f\n", "request", ours.P50, ours.P90, ours.P99, ours.Max, rep.Bps/1e6)
	fmt.Fprintf(w, "%-16s %10.1f %10.1f %10.1f %10.1f %14.0f\n", "floor ("+floorName+")", floor.P50, floor.P90, floor.P99, floor.Max, rep.FloorBps/1e6)
	fmt.Fprintf(w, "bytes per second: %.2f of the floor, which sends a push and a pull's keys and reads back a pull's values\n", rep.Ratio)
	fmt.Fprintf(w, "CPU seconds: scheduler %.2f, server %.2f, worker %.2f (start-up and floor included)\n", cpu["scheduler"], cpu["server"], cpu["worker"])
	return nil
}

// floorBytes are the bytes that the floor sends and reads for one push and one pull.
func (s *kvSpec) floorBytes() (out, in int) {
	return s.bytes(s.batch) + 8*s.batch, s.bytes(s.batch)
}

func childKV(c *cli.Context, node *postoffice.Node) error {
	var s kvSpec
	if err := arguments(c, &s.keys, &s.values, &s.batch, &s.flight, &s.rounds); err != nil {
		return err
	}
	out, in := s.floorBytes()
	return childWithFloor(c, node, floors{push: out, pull: in, pairs: 1}, serveKV, s.measure)
}

func serveKV(node *postoffice.Node) error {
	server, err := kv.NewServer[float32](node, kv.ServerOptions{})
	if err != nil {
		return err
	}
	var sums kv.SummingHandler[float32]
	return server.Handle(sums.Handle)
}

// measure runs the rounds, in turns with the floor's, after one round to warm up.
func (s *kvSpec) measure(ctx context.Context, node *postoffice.Node, floor, _ baseline) (*result, error) {
	w, err := kv.NewWorker[float32](node, kv.WorkerOptions{})
	if err != nil {
		return nil, err
	}
	defer w.Close()
	keys := make([]kv.Key, s.keys)
	vals := make([]float32, s.keys*s.values)
	got := make([]float32, s.keys*s.values)
	for i := range keys {
		keys[i] = kv.Key(i) * (math.MaxUint64 / kv.Key(s.keys))
	}
	for i := range vals {
		vals[i] = float32(i % 251)
	}
	r := &result{Checked: true}
	batches := (s.keys + s.batch - 1) / s.batch
	floorSeconds := 0.0
	for round := range s.rounds + 1 {
		ns, err := floor.measure(batches)
		if err != nil {
			return nil, err
		}
		cpu, start := cpuTime(), time.Now()
		pushed, err := s.pass(ctx, batches, func(lo, hi int) (kv.Call, error) {
			return w.Push(keys[lo:hi], vals[lo*s.values:hi*s.values], kv.NoCopy)
		})
		if err != nil {
			return nil, fmt.Errorf("round %d: push: %w", round, err)
		}
		pulled, err := s.pass(ctx, batches, func(lo, hi int) (kv.Call, error) {
			dst := got[lo*s.values : hi*s.values]
			return w.Pull(keys[lo:hi], &dst, kv.NoCopy)
		})
		if err != nil {
			return nil, fmt.Errorf("round %d: pull: %w", round, err)
		}
		seconds := time.Since(start).Seconds()
		cpu = cpuTime() - cpu
		for i, v := range got {
			if want := vals[i] * float32(round+1); v != want {
				return nil, fmt.Errorf("round %d: key %d value %d: got %g, want %g", round, keys[i/s.values], i%s.values, v, want)
			}
			got[i] = -1
		}
		if round == 0 {
			continue
		}
		for _, n := range ns {
			floorSeconds += float64(n) / 1e9
		}
		r.Floor = append(r.Floor, ns...)
		r.Ours = append(append(r.Ours, pushed...), pulled...)
		r.Seconds += seconds
		r.CPU += cpu.Seconds()
		r.Bytes += int64(2*s.bytes(s.keys) + 8*s.keys)
	}
	out, in := s.floorBytes()
	r.FloorBps = float64(s.rounds*batches) * float64(out+in) / floorSeconds
	return r, nil
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
	await := func() error {
		q := flight[0]
		flight = flight[1:]
		err := q.call.Wait(ctx)
		ns = append(ns, int64(time.Since(q.start)))
		return err
	}
	for b := range batches {
		if len(flight) == s.flight {
			if err := await(); err != nil {
				return nil, err
			}
		}
		start := time.Now()
		call, err := send(b*s.batch, min((b+1)*s.batch, s.keys))
		if err != nil {
			return nil, err
		}
		flight = append(flight, request{call, start})
	}
	for len(flight) > 0 {
		if err := await(); err != nil {
			return nil, err
		}
	}
	return ns, nil
}
