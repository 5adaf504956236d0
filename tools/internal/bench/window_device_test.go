package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

// startTrippers starts two ranks with windows of most bytes, in host memory or on devices. The returned function runs f
// at both.
func startTrippers(t *testing.T, devices []*sharing, most int) (both [2]*tripper, all func(f func(ctx context.Context, t *tripper) error) error) {
	t.Helper()
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Backend: func(role string, rank int) backend.Backend {
		if role != "worker" || devices == nil {
			return nil
		}
		return devices[rank]
	}})
	each := func(f func(ctx context.Context, r int) error) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		var errs [2]error
		for r := range errs {
			wg.Go(func() {
				if errs[r] = f(ctx, r); errs[r] != nil {
					cancel() // ends the rank that still waits
				}
			})
		}
		wg.Wait()
		return errors.Join(errs[:]...)
	}
	if err := each(func(ctx context.Context, r int) error {
		comm, err := collective.New(ctx, c.Workers[r], collective.Options{Ranks: []int{0, 1}})
		if err != nil {
			return err
		}
		w, err := window.Open(ctx, comm, window.Options{Size: most, Signals: 1, Device: devices != nil})
		if err == nil {
			both[r], err = newTripper(c.Workers[r], w, comm, most)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return both, func(f func(ctx context.Context, t *tripper) error) error {
		return each(func(ctx context.Context, r int) error { return f(ctx, both[r]) })
	}
}

// TestTrippers: the ranks of bench window in host memory and on simulated devices: round trips, round trips ahead, the
// floor, and the detection of wrong data.
func TestTrippers(t *testing.T) {
	for name, devices := range map[string][]*sharing{"host": nil, "devices": {newSharing(t, 0), newSharing(t, 1)}} {
		t.Run(name, func(t *testing.T) {
			both, all := startTrippers(t, devices, 5000)
			wants := map[string]int{askFloor: 7, askTrips: 7}
			if devices != nil {
				wants[askAhead], wants[askStreams] = 1, 7
			}
			for _, size := range []int{16, 5000} {
				for what, want := range wants {
					if err := all(func(ctx context.Context, x *tripper) error {
						a, err := x.do(ctx, what, size, 7)
						if err == nil && (len(a.NS) != want || slices.Min(a.NS) < 0) {
							err = fmt.Errorf("rank %d: %v, want %d", x.w.Rank(), a.NS, want)
						}
						return err
					}); err != nil {
						t.Errorf("%d bytes, %s: %v", size, what, err)
					}
				}
			}
			if err := all(func(ctx context.Context, x *tripper) error { return x.endFloor(ctx) }); err != nil {
				t.Error(err)
			}
			both[0].block++
			wrong := func(sizes [2]int) {
				t.Helper()
				if err := all(func(ctx context.Context, x *tripper) error {
					_, err := x.do(ctx, askTrips, sizes[x.w.Rank()], 5)
					return err
				}); err == nil || !strings.Contains(err.Error(), "wrong data") {
					t.Errorf("sizes %v: other data than is expected: %v", sizes, err)
				}
			}
			wrong([2]int{32, 32})
			if devices == nil {
				wrong([2]int{64, 128}) // the number is in another place
			}
		})
	}
}

func TestWindowGPUReport(t *testing.T) {
	for _, x := range []struct {
		r    windowGPUReport
		want string
	}{
		{windowGPUReport{windowFigures: windowFigures{Bytes: 917504, RatioP50: 1.2}}, ""},
		{windowGPUReport{windowFigures: windowFigures{Bytes: 1835008, RatioP50: 1.3}}, "PutSignal of 1835008 bytes of a GPU: 1.30 times the floor, want at most 1.2"},
		{windowGPUReport{windowFigures: windowFigures{Bytes: 1024, RatioP50: 9}}, ""},
	} {
		var v verdict
		x.r.judge(&v)
		if err := v.err(); (err != nil) != (x.want != "") || err != nil && !strings.HasSuffix(err.Error(), x.want) {
			t.Errorf("%+v: %v, want %q", x.r, err, x.want)
		}
		var text strings.Builder
		if err := x.r.print(&text); err != nil || strings.Contains(text.String(), "missed") != (x.want != "") {
			t.Errorf("%v: %s", err, text.String())
		}
	}
	p := place{gpus: []int{2, 5}}
	for rank, want := range []string{"STEPMESH_GPU=2", "STEPMESH_GPU=5", "STEPMESH_GPU=2"} {
		if got := p.of(rank).env("worker"); !slices.Contains(got, want) {
			t.Errorf("worker %d: %v, want %s", rank, got, want)
		}
	}
	if got := (place{}).of(1).env("worker"); !slices.Equal(got, (place{}).env("worker")) {
		t.Errorf("without GPUs: %v", got)
	}
}
