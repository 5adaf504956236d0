package rdma

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
)

// TestKV: pushes and pulls of one and of many keys, with and without lengths, and
// small messages.
func TestKV(t *testing.T) {
	const workers, servers = 2, 2
	c := start(t, options{workers: workers, servers: servers, place: func(role string, _ int) place {
		return map[string]place{"server": {what: sums}}[role]
	}})
	var all []*kv.Worker[float32]
	for _, n := range c.Workers {
		w, err := kv.NewWorker[float32](n, kv.WorkerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, w)
	}
	const each = 50
	many := make([]kv.Key, 300) // over both servers
	for i := range many {
		many[i] = kv.Key(i) * (math.MaxUint64 / 300)
	}
	var pushed sync.WaitGroup
	push := func(w *kv.Worker[float32], keys []kv.Key, x float32, opts ...kv.PushOption) error {
		vals := make([]float32, len(keys)*each)
		for i := range vals {
			vals[i] = x * float32(i)
		}
		ts, err := w.Push(keys, vals, append(opts, kv.NoCopy)...)
		if err != nil {
			return err
		}
		return ts.Wait(t.Context())
	}
	for i, w := range all {
		pushed.Go(func() {
			for range 3 {
				if err := push(w, many, float32(i+1)); err != nil {
					t.Errorf("worker %d: %v", i, err)
				}
			}
			lens := slices.Repeat([]int32{each}, 10)
			if err := push(w, many[145:155], 1, kv.Lens(lens), kv.Cmd(5)); err != nil {
				t.Errorf("worker %d, with lengths: %v", i, err)
			}
			if err := push(w, many[7:8], 1); err != nil {
				t.Errorf("worker %d, one key: %v", i, err)
			}
		})
	}
	pushed.Wait()
	want := make([]float32, len(many)*each)
	for i := range want {
		want[i] = 3 * (1 + 2) * float32(i)
		if k := i / each; k >= 145 && k < 155 {
			want[i] += workers * float32(i-145*each)
		} else if k == 7 {
			want[i] += workers * float32(i-7*each)
		}
	}
	pull := func(w *kv.Worker[float32], first, n int, lens bool, room int) error {
		got := make([]float32, room)
		opts := []kv.PullOption{kv.NoCopy}
		var pulled []int32
		if lens {
			opts = append(opts, kv.LensInto(&pulled))
		}
		ts, err := w.Pull(many[first:first+n], &got, opts...)
		if err == nil {
			err = ts.Wait(t.Context())
		}
		if err != nil {
			return err
		}
		if !slices.Equal(got, want[first*each:(first+n)*each]) {
			return fmt.Errorf("wrong values of keys %d to %d", first, first+n)
		}
		if lens && !slices.Equal(pulled, slices.Repeat([]int32{each}, n)) {
			return fmt.Errorf("lengths %v, want %d for each of %d keys", pulled, each, n)
		}
		return nil
	}
	for i, w := range all {
		for _, p := range []struct {
			first, n int
			lens     bool
			room     int
		}{{0, 300, false, 300 * each}, {0, 300, true, 0}, {7, 1, false, each}, {7, 1, false, 0}, {140, 20, true, 20 * each}, {299, 1, true, 0}} {
			if err := pull(w, p.first, p.n, p.lens, p.room); err != nil {
				t.Errorf("worker %d, pull %+v: %v", i, p, err)
			}
		}
		app := w.SimpleApp()
		var mu sync.Mutex
		var got []string
		app.OnAnswer(func(d kv.SimpleMessage) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, string(d.Body))
		})
		for _, n := range []int{0, 1, 1000, 5000} {
			got = nil
			body := make([]byte, n)
			for k := range body {
				body[k] = 'a' + byte(k%26)
			}
			ts, err := app.Request(int32(n), body, postoffice.ServerGroup)
			if err == nil {
				err = ts.Wait(t.Context())
			}
			if err != nil {
				t.Fatalf("worker %d, request of %d bytes: %v", i, n, err)
			}
			if want := fmt.Sprintf("%d %s", n, body); !slices.Equal(got, []string{want, want}) {
				t.Errorf("worker %d, request of %d bytes: got %q", i, n, got)
			}
		}
	}
	c.end()
}
