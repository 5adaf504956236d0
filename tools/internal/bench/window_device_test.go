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
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

// startTrippers starts two ranks with windows of size bytes, in host memory or on devices. The returned function runs f at
// both.
func startTrippers(t *testing.T, devices []*sharing, size int) (both [2]*tripper, all func(f func(ctx context.Context, t *tripper) error) error) {
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
		if err == nil {
			both[r], err = newTripper(ctx, c.Workers[r], comm, size)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return both, func(f func(ctx context.Context, t *tripper) error) error {
		return each(func(ctx context.Context, r int) error { return f(ctx, both[r]) })
	}
}

// TestTrippers: the ranks of bench window in host memory and on simulated devices: round trips, round trips ahead, and the
// detection of wrong data.
func TestTrippers(t *testing.T) {
	for name, devices := range map[string][]*sharing{"host": nil, "devices": {newSharing(t, 0), newSharing(t, 1)}} {
		for _, size := range []int{16, 5000} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				both, all := startTrippers(t, devices, size)
				wants := map[string]int{askTrips: 7}
				if devices != nil {
					wants[askAhead], wants[askStreams] = 1, 7
				}
				for what, want := range wants {
					if err := all(func(ctx context.Context, x *tripper) error {
						ns, err := x.do(ctx, what, "-", 0, 7)
						if err == nil && (len(ns) != want || slices.Min(ns) < 0 || len(x.at) != 7 && what != askAhead) {
							err = fmt.Errorf("rank %d: %v, want %d", x.w.Rank(), ns, want)
						}
						return err
					}); err != nil {
						t.Errorf("%s: %v", what, err)
					}
				}
				if devices == nil && size == 16 { // only the number
					return
				}
				both[0].block++
				if err := all(func(ctx context.Context, x *tripper) error {
					_, err := x.do(ctx, askTrips, "-", 0, 5)
					return err
				}); err == nil || !strings.Contains(err.Error(), "wrong data") {
					t.Errorf("other data than is expected: %v", err)
				}
			})
		}
	}
}

// TestTripNumber: the number of a round trip is checked at both ends of the data.
func TestTripNumber(t *testing.T) {
	both, _ := startTrippers(t, nil, 100)
	for _, at := range []int{0, 92} {
		number(both[0].w.Bytes(), 3)
		if err := both[0].checkNumber(3); err != nil {
			t.Error(err)
		}
		both[0].w.Bytes()[at]++
		if err := both[0].checkNumber(3); err == nil || !strings.Contains(err.Error(), "wrong data") {
			t.Errorf("another number at byte %d: %v", at, err)
		}
	}
}

func TestWindowGPUReport(t *testing.T) {
	for _, x := range []struct {
		r    windowGPUReport
		want string
	}{
		{windowGPUReport{windowFigures: windowFigures{Bytes: 917504, comparison: comparison{RatioP50: 1.2}}}, ""},
		{windowGPUReport{windowFigures: windowFigures{Bytes: 1835008, comparison: comparison{RatioP50: 1.3}}}, "PutSignal of 1835008 bytes of a GPU: 1.30 times the floor, want at most 1.2"},
		{windowGPUReport{windowFigures: windowFigures{Bytes: 1024, comparison: comparison{RatioP50: 9}}}, ""},
	} {
		var v verdict
		x.r.judge(&x.r, goal{of: ourFloor, limit: windowGPUGoals[x.r.Bytes]}, &v)
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
