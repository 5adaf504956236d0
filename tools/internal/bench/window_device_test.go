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

// TestDeviceTripper: the ranks of bench window --device gpu on simulated devices: round trips, round trips ahead, the
// floor, and the detection of wrong data.
func TestDeviceTripper(t *testing.T) {
	devices := []*sharing{newSharing(t, 0), newSharing(t, 1)}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Backend: func(role string, rank int) backend.Backend {
		if role != "worker" {
			return nil
		}
		return devices[rank]
	}})
	var trippers [2]*deviceTripper
	all := func(f func(ctx context.Context, r int) error) error {
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
	err := all(func(ctx context.Context, r int) error {
		comm, err := collective.New(ctx, c.Workers[r], collective.Options{Ranks: []int{0, 1}})
		if err != nil {
			return err
		}
		w, err := window.Open(ctx, comm, window.Options{Size: 5000, Signals: 1, Device: true})
		if err == nil {
			trippers[r], err = newDeviceTripper(w, comm, devices[r], 5000)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{16, 5000} {
		for what, want := range map[string]int{askFloor: 7, askTrips: 7, askAhead: 1} {
			if err := all(func(ctx context.Context, r int) error {
				a, err := trippers[r].do(ctx, what, size, 7)
				if err == nil && (r == 0 || what != askAhead) && (len(a.NS) != want || slices.Min(a.NS) < 0) {
					err = fmt.Errorf("rank %d: %s: %v", r, what, a.NS)
				}
				return err
			}); err != nil {
				t.Errorf("%d bytes, %s: %v", size, what, err)
			}
		}
	}
	if err := all(func(ctx context.Context, r int) error { return trippers[r].endFloor(ctx) }); err != nil {
		t.Error(err)
	}
	trippers[0].block++
	if err := all(func(ctx context.Context, r int) error {
		_, err := trippers[r].do(ctx, askTrips, 16, 2)
		return err
	}); err == nil || !strings.Contains(err.Error(), "wrong data") {
		t.Errorf("other data than is expected: %v", err)
	}
}

func TestWindowGPUReport(t *testing.T) {
	for _, x := range []struct {
		r    windowGPUReport
		want string
	}{
		{windowGPUReport{Bytes: 917504, RatioP50: 1.2}, ""},
		{windowGPUReport{Bytes: 1835008, RatioP50: 1.3}, "PutSignal of 1835008 bytes of a GPU: 1.30 times the floor, want at most 1.2"},
		{windowGPUReport{Bytes: 1024, RatioP50: 9}, ""},
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
