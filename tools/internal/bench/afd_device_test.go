package bench

import (
	"fmt"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
	"golang.org/x/sync/errgroup"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van/backend"
)

// afdDevices are the ends of bench afd on simulated devices.
type afdDevices struct {
	workers []*afdDeviceWorker
	servers []*afdDeviceServer
	devices []*sharing // of the workers
}

func startAFDDevices(t *testing.T, n int) *afdDevices {
	t.Helper()
	all := map[string][]*sharing{}
	for i := range 2 * n {
		role := []string{"worker", "server"}[i/n]
		all[role] = append(all[role], newSharing(t, i))
	}
	cl := testcluster.Start(t, testcluster.Options{Workers: n, Servers: n, Backend: func(role string, rank int) backend.Backend {
		if of := all[role]; of != nil {
			return of[rank]
		}
		return nil
	}})
	const size = 20000
	shape := &afdShape{push: size, pull: 2*size + 1, image: make([]byte, 2*size+1)}
	fill(shape.image)
	a := &afdDevices{devices: all["worker"]}
	for _, node := range cl.Servers {
		s, err := newAFDDeviceServer(shape, node)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.close)
		a.servers = append(a.servers, s)
	}
	for _, node := range cl.Workers {
		w, err := newAFDDeviceWorker(shape, node)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.close)
		a.workers = append(a.workers, w)
	}
	return a
}

// run makes n round trips of all ends.
func (a *afdDevices) run(t *testing.T, form string, n int) error {
	var group errgroup.Group
	for _, s := range a.servers {
		group.Go(func() error {
			_, err := s.do(t.Context(), askCalls, form, 0, n)
			return err
		})
	}
	for _, w := range a.workers {
		group.Go(func() error {
			ns, err := w.do(t.Context(), askCalls, form, 0, n)
			for _, x := range ns {
				if x <= 0 || len(ns) != n {
					return fmt.Errorf("%d times %v, want %d", len(ns), ns, n)
				}
			}
			return err
		})
	}
	return group.Wait()
}

// TestAFDDevices makes the round trips of all forms between simulated devices.
func TestAFDDevices(t *testing.T) {
	a := startAFDDevices(t, 2)
	for _, n := range []int{1, 2, 2*afdAhead + 3} {
		for _, form := range afdDeviceForms {
			if err := a.run(t, form, n); err != nil {
				t.Fatalf("%s, %d round trips: %v", form, n, err)
			}
		}
	}
}

// TestAFDDeviceValues: wrong answers are detected.
func TestAFDDeviceValues(t *testing.T) {
	for _, c := range []struct {
		form  string
		spoil func(a *afdDevices)
		want  string
	}{
		{formPushPull, func(a *afdDevices) { a.devices[0].corrupt.Store(true) }, "push_pull: after a checked round trip: the answer of server 0"},
		{formPrepared, func(a *afdDevices) { a.servers[1].rank = 0 }, "prepared: after a checked round trip: the answer of server 1"},
	} {
		t.Run(c.form, func(t *testing.T) {
			a := startAFDDevices(t, 2)
			if err := a.run(t, c.form, 2); err != nil {
				t.Fatal(err)
			}
			c.spoil(a)
			if err := a.run(t, c.form, 2); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestAFDDeviceFloor makes rounds of two clients with two servers.
func TestAFDDeviceFloor(t *testing.T) {
	const n, rounds = 2, 5
	x := floors{push: 1000, pull: 3000, clients: n}
	var addrs []string
	var devices []*sharing
	for i := range 2 * n {
		devices = append(devices, newSharing(t, i))
	}
	for i := range n {
		s, err := deviceFloor{x, devices[i]}.serve()
		if err != nil {
			t.Fatal(err)
		}
		defer s.close()
		addrs = append(addrs, s.addr)
	}
	var group errgroup.Group
	for i := range n {
		group.Go(func() error {
			c, err := deviceFloor{x, devices[n+i]}.dial(addrs)
			if err != nil {
				return err
			}
			defer c.close()
			for range 2 {
				ns, err := c.measure(rounds)
				if err != nil || len(ns) != rounds || ns[0] <= 0 {
					return fmt.Errorf("%v, %w", ns, err)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, d := range devices[n:] {
		if copies := d.copies.Load(); copies != 2*rounds*n {
			t.Errorf("%d copies, want %d", copies, 2*rounds*n)
		}
		d.Leaks(t)
	}
}

// TestAFDGPUs: the processes use the GPUs in turn, workers first.
func TestAFDGPUs(t *testing.T) {
	for _, c := range []struct {
		args   string
		have   int
		gpus   string
		shared bool
		want   string
	}{
		{"", 2, "[]", false, ""},
		{"--device gpu", 8, "[0 1 2 3]", false, ""},
		{"--device gpu", 2, "[0 1 0 1]", true, ""},
		{"--device gpu --gpus 3,1,0,2", 4, "[3 1 0 2]", false, ""},
		{"--device gpu --gpus 2", 2, "", false, "--gpus 2: this machine has 2"},
		{"--device gpu", 0, "", false, "this machine has 0"},
	} {
		r := &afdRun{}
		afd := afdCommand([]cli.Flag{&cli.StringFlag{Name: "van", Value: local}, &cli.IntFlag{Name: "rounds", Value: 1}, &cli.BoolFlag{Name: "json"}})
		afd.Action = func(ctx *cli.Context) (err error) {
			if r, err = newAFDRun(ctx); err != nil {
				return err
			}
			return r.findGPUs(func() ([]backend.Info, error) { return make([]backend.Info, c.have), nil })
		}
		app := &cli.App{Commands: []*cli.Command{afd}, ExitErrHandler: func(*cli.Context, error) {}}
		err := app.Run(append([]string{"stepaf", "afd"}, strings.Fields(c.args)...))
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s of %d: %v, want %q", c.args, c.have, err, c.want)
			}
			continue
		}
		rep := &afdReport{GPUs: r.gpusOf(4)}
		if err != nil || fmt.Sprint(rep.GPUs) != c.gpus || rep.shared() != c.shared {
			t.Errorf("%s of %d: %v, shared: %t, %v; want %s", c.args, c.have, rep.GPUs, rep.shared(), err, c.gpus)
		}
	}
}
