package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Windows on GPUs. One way is the time from before the PutSignal until the CPU of the other rank sees the data, by the
// clock of the host: its WaitSignal returns, or, in streams, it sees the end of the waiting stream. The floor is that
// of bench latency: a copy into the other process's memory and then a flag for its CPU; one way is half a round trip.
// Ahead is the average of one way in streams when both ranks have queued all round trips of a block, so that no CPU
// takes part.

// windowGPUGoals are ratios of one way to the floor's, at p50, for the attention payload in both directions.
var windowGPUGoals = map[int]float64{917504: 1.2, 1835008: 1.2}

var windowGPUSizes = []int{1 << 10, 917504, 1835008, 16 << 20}

// Requests to a rank, besides askFloor: size and number; rank 0 answers with the nanoseconds of each round trip.
const (
	askTrips   = "trips"   // size and number: the begin or the end of each way from rank 0, and on rank 0 the nanoseconds of each round trip
	askStreams = "streams" // the same in streams
	askAhead   = "ahead"   // size and number: on rank 0 the nanoseconds of all
)

// windowGPUReport is the JSON line of bench window --device gpu. Quantiles are in microseconds.
type windowGPUReport struct {
	Van string `json:"van"`
	where
	Bytes    int       `json:"bytes"`
	Iters    int       `json:"iters"`
	OneWay   quantiles `json:"one_way"`
	Trip     quantiles `json:"round_trip"`
	Streams  quantiles `json:"one_way_streams"`
	Ahead    quantiles `json:"one_way_ahead"` // of blocks
	Floor    quantiles `json:"floor_one_way"`
	RatioP50 float64   `json:"ratio_p50"` // of one way
	RatioP99 float64   `json:"ratio_p99"`
	Goal     float64   `json:"goal_ratio_p50,omitempty"`
	Missed   bool      `json:"missed,omitempty"`
	Checked  bool      `json:"checked"`
}

func (r *windowGPUReport) String() string {
	return fmt.Sprintf("PutSignal of %d bytes of a GPU", r.Bytes)
}

// measureWindowGPU measures one size, in blocks.
func measureWindowGPU(c *cli.Context, workers processes, at place, size int) (*windowGPUReport, error) {
	iters := cmp.Or(c.Int("iters"), min(max(8<<30/(size+1<<20), 100), 4000))
	r := &windowGPUReport{Van: c.String("van"), where: at.where(), Bytes: size, Iters: iters, Checked: true}
	var trips, ways, streams, floors, ahead []int64
	for block, n := range blocks(iters, c.Int("rounds")) {
		var got [4][]answer
		for i, what := range []string{askFloor, askTrips, askStreams, askAhead} {
			var err error
			if got[i], err = workers.askEach(fmt.Sprint(what, " ", size, n)); err != nil {
				return nil, err
			}
		}
		if block == 0 {
			continue
		}
		for i := range n {
			floors = append(floors, got[0][0].NS[i]/2)
			trips = append(trips, got[1][0].NS[i])
			ways = append(ways, got[1][1].At[i]-got[1][0].At[i])
			streams = append(streams, got[2][1].At[i]-got[2][0].At[i])
		}
		ahead = append(ahead, got[3][0].NS[0]/int64(2*n))
	}
	r.Trip, r.OneWay, r.Streams, r.Floor, r.Ahead = summarize(trips), summarize(ways), summarize(streams), summarize(floors), summarize(ahead)
	r.RatioP50, r.RatioP99 = r.OneWay.P50/r.Floor.P50, r.OneWay.P99/r.Floor.P99
	return r, nil
}

func (r *windowGPUReport) judge(v *verdict) {
	r.Goal = windowGPUGoals[r.Bytes]
	r.Missed = v.judge(r, goal{of: ourFloor, limit: r.Goal}, r.RatioP50)
}

const windowGPUHead = "two ranks, one GPU each, microseconds, data checked\n   bytes   iters     one way      p99       trip      p99   streams      p99   ahead    floor p50      p99  ratio goal\n"

func (r *windowGPUReport) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%9d %6d   %9.1f %9.1f  %9.1f %9.1f %9.1f %9.1f %7.1f   %9.1f %9.1f %6.2f %s\n", r.Bytes, r.Iters,
		r.OneWay.P50, r.OneWay.P99, r.Trip.P50, r.Trip.P99, r.Streams.P50, r.Streams.P99, r.Ahead.P50, r.Floor.P50, r.Floor.P99,
		r.RatioP50, goalText("-", r.Goal, r.Missed))
	if r.Note != "" {
		fmt.Fprintln(w, "note:", r.Note)
	}
	return err
}

// deviceTripper is a rank that makes round trips.
type deviceTripper struct {
	w      *window.Window
	comm   *collective.Comm
	back   backend.Backend
	stream af.Stream
	event  backend.Event
	src    backend.Mem
	block  byte // added to all bytes of a block
	floor  *deviceFloorClient
	server *floorServer
	size   int // of the floor
}

// answerOnGPU answers the requests to a rank of bench window --device gpu.
func answerOnGPU(c *cli.Context, w *window.Window, comm *collective.Comm, b backend.Backend, most int) error {
	t, err := newDeviceTripper(w, comm, b, most)
	if err != nil {
		return err
	}
	var what string
	var size, n int
	if err := answerLines(c, func() (*answer, error) {
		return t.do(c.Context, what, size, n)
	}, &what, &size, &n); err != nil {
		return err
	}
	return t.endFloor(c.Context)
}

func newDeviceTripper(w *window.Window, comm *collective.Comm, b backend.Backend, most int) (*deviceTripper, error) {
	a, ok := b.(backend.AsyncCopier)
	if !ok {
		return nil, fmt.Errorf("bench window: backend %s has no streams", b.Name())
	}
	t := &deviceTripper{w: w, comm: comm, back: b}
	s, err := a.NewStream()
	t.stream = af.Stream(s)
	if err == nil {
		t.event, err = b.NewEvent()
	}
	if err == nil {
		t.src, err = b.Alloc(most)
	}
	return t, err
}

func (t *deviceTripper) do(ctx context.Context, what string, size, n int) (*answer, error) {
	if what == askFloor {
		return t.doFloor(ctx, size, n)
	}
	src, err := t.prepare(ctx, size)
	if err != nil {
		return nil, err
	}
	a := &answer{}
	switch what {
	case askTrips:
		err = t.trips(ctx, src, n, a, af.Complete, func() error { return t.w.WaitSignal(ctx, 1-t.w.Rank(), 0) })
	case askStreams:
		err = t.trips(ctx, src, n, a, t.stream, func() error { return errors.Join(t.wait(ctx), t.arrived(ctx)) })
	case askAhead:
		err = t.ahead(ctx, src, n, a)
	default:
		err = fmt.Errorf("bench child: %q", what)
	}
	if err != nil {
		return nil, err
	}
	return a, t.check(size)
}

// image returns the data that rank r puts in this block.
func (t *deviceTripper) image(r, size int) []byte {
	b := make([]byte, size)
	fill(b)
	for i := range b {
		b[i] ^= t.block*2 + byte(r)
	}
	return b
}

// prepare fills the source, clears the window, and waits for the other rank.
func (t *deviceTripper) prepare(ctx context.Context, size int) (src af.Tensor, err error) {
	t.block++
	m := t.w.Tensor()
	if err = t.back.Copy(m.Mem().Sub(0, size), backend.Bytes(make([]byte, size))); err == nil {
		err = t.back.Copy(t.src.Sub(0, size), backend.Bytes(t.image(t.w.Rank(), size)))
	}
	if err == nil {
		err = t.comm.Barrier(ctx)
	}
	if err != nil {
		return src, err
	}
	return af.NewTensor(t.src.Sub(0, size), af.Uint8, int64(size))
}

// check compares the window with the other rank's puts.
func (t *deviceTripper) check(size int) error {
	got := make([]byte, size)
	m := t.w.Tensor()
	if err := t.back.Copy(backend.Bytes(got), m.Mem().Sub(0, size)); err != nil {
		return err
	}
	if !bytes.Equal(got, t.image(1-t.w.Rank(), size)) {
		return fmt.Errorf("PutSignal of %d bytes of a GPU: wrong data in block %d", size, t.block)
	}
	return t.w.Check()
}

func (t *deviceTripper) put(ctx context.Context, src af.Tensor, s af.Stream) error {
	return t.w.PutSignal(ctx, 1-t.w.Rank(), 0, src, 0, s)
}

func (t *deviceTripper) wait(ctx context.Context) error {
	return t.w.WaitSignal(ctx, 1-t.w.Rank(), 0, t.stream)
}

// arrived waits until the stream has ended.
func (t *deviceTripper) arrived(ctx context.Context) error {
	if err := t.event.Record(uintptr(t.stream)); err != nil {
		return err
	}
	return t.event.Sync(ctx)
}

// trips makes n round trips. The rank puts in stream, and waits by wait.
func (t *deviceTripper) trips(ctx context.Context, src af.Tensor, n int, a *answer, stream af.Stream, wait func() error) (err error) {
	a.NS, a.At = make([]int64, n), make([]int64, n)
	for i := range n {
		begun := clock.Now()
		if t.w.Rank() == 0 {
			a.At[i] = int64(begun)
			err = errors.Join(t.put(ctx, src, stream), wait())
		} else {
			err = wait()
			a.At[i] = int64(clock.Now())
			err = errors.Join(err, t.put(ctx, src, stream))
		}
		if err != nil {
			return err
		}
		a.NS[i] = int64(clock.Now() - begun)
	}
	return t.arrived(ctx)
}

func (t *deviceTripper) ahead(ctx context.Context, src af.Tensor, n int, a *answer) (err error) {
	begun := clock.Now()
	for range n {
		if t.w.Rank() == 0 {
			err = errors.Join(t.put(ctx, src, t.stream), t.wait(ctx))
		} else {
			err = errors.Join(t.wait(ctx), t.put(ctx, src, t.stream))
		}
		if err != nil {
			return err
		}
	}
	if err = t.arrived(ctx); err != nil {
		return err
	}
	a.NS = []int64{int64(clock.Now() - begun)}
	return nil
}

// doFloor measures the floor, of which rank 1 is the server.
func (t *deviceTripper) doFloor(ctx context.Context, size, n int) (*answer, error) {
	if t.size != size {
		err := t.endFloor(ctx)
		if err == nil {
			err = t.beginFloor(ctx, size)
		}
		if err != nil {
			return nil, err
		}
	}
	if t.floor == nil {
		return &answer{NS: make([]int64, n)}, nil
	}
	return times(t.floor.measure(n))
}

func (t *deviceTripper) beginFloor(ctx context.Context, size int) (err error) {
	var at string
	if t.w.Rank() == 1 {
		if t.server, err = newDeviceServer(t.back, 1, size, size); err != nil {
			return err
		}
		at = t.server.addr
	}
	all, err := t.comm.AllGatherBytes(ctx, []byte(at))
	if err == nil && t.w.Rank() == 0 {
		t.floor, err = dialDeviceFloor(t.back, []string{string(all[1])}, size, size)
	}
	t.size = size
	return err
}

// endFloor ends it, the client first, and waits for the other rank.
func (t *deviceTripper) endFloor(ctx context.Context) error {
	if t.floor != nil {
		t.floor.close()
	}
	err := t.comm.Barrier(ctx)
	if t.server != nil {
		t.server.close()
	}
	t.floor, t.server, t.size = nil, nil, 0
	return err
}
