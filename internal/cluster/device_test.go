package cluster_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/local"
	"github.com/stepaf/stepaf-go/van/stage"
)

var pretended = make(chan *simgpu.Device, 16)

func init() {
	backend.Register("PRETENDED", func(id int) (backend.Backend, error) {
		d := simgpu.New(id)
		pretended <- d
		return d, nil
	})
}

// alone starts a scheduler, the only node that starts without others.
func alone(t *testing.T, set func(*postoffice.Config), log *slog.Logger) *postoffice.Node {
	t.Helper()
	return testcluster.Start(t, testcluster.Options{Set: set, Log: log}).Scheduler
}

// TestBackendConfigured: the backend waits as the variables specify, and is the node's.
func TestBackendConfigured(t *testing.T) {
	for _, c := range []struct {
		sync bool
		poll env.BusyPoll
		want backend.Options
	}{
		{true, env.SpinThenBlock, backend.Options{Spin: env.SpinThenBlock.Spin()}},
		{false, env.SpinForever, backend.Options{DriverEvents: true, Spin: -1}},
		{true, env.AlwaysBlock, backend.Options{}},
	} {
		n := alone(t, func(cfg *postoffice.Config) {
			cfg.MemSync, cfg.BusyPoll = c.sync, c.poll
			if cfg.Role == "scheduler" {
				cfg.Backend = "PRETENDED" // with this setting it opens one
			}
		}, nil)
		d := <-pretended
		if n.Backend() != d || d.Options() != c.want {
			t.Errorf("MemSync %t, BusyPoll %d: %+v, want %+v", c.sync, c.poll, d.Options(), c.want)
		}
		n.Close()
		if _, err := d.Alloc(1); err == nil {
			t.Error("the node has left its backend open")
		}
	}
}

// TestSchedulerNeedsNoGPU: the scheduler does not even search for a GPU.
func TestSchedulerNeedsNoGPU(t *testing.T) {
	var log bytes.Buffer
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers = "scheduler", 1, 1
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", testcluster.FreePort(t), "127.0.0.1"
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out := writer(func(line []byte) {
		if log.Write(line); strings.Contains(string(line), "Bind to") {
			cancel() // no other node will register
		}
	})
	if _, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(out, nil))}); err == nil {
		t.Fatal("started without workers")
	}
	if s := log.String(); strings.Contains(s, "GPU") || !strings.Contains(s, "Bind to") {
		t.Errorf("log:\n%s", s)
	}
}

// TestUnprotectedOnce: a scheduler that other hosts can reach logs one line that it has no secret, unless the user
// has decided.
func TestUnprotectedOnce(t *testing.T) {
	for _, c := range []struct {
		set  func(*postoffice.Config)
		want int
	}{
		{func(*postoffice.Config) {}, 1},
		{func(c *postoffice.Config) { c.Auth = env.AuthOff }, 0},
		{func(c *postoffice.Config) { c.Kubernetes = false }, 0},
	} {
		var log bytes.Buffer
		cfg := postoffice.DefaultConfig()
		cfg.Role, cfg.NumWorkers, cfg.NumServers = "scheduler", 1, 1
		cfg.RootURI, cfg.RootPort, cfg.Kubernetes = "127.0.0.1", testcluster.FreePort(t), true
		c.set(cfg)
		ctx, cancel := context.WithCancel(t.Context())
		out := writer(func(line []byte) {
			if log.Write(line); strings.Contains(string(line), "Bind to") {
				cancel() // no other node will register
			}
		})
		if _, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(out, nil))}); err == nil {
			t.Fatal("started without workers")
		}
		cancel()
		if got := strings.Count(log.String(), "level=WARN"); got != c.want || strings.Count(log.String(), "no secret is set") != c.want {
			t.Errorf("%d warnings, want %d:\n%s", got, c.want, log.String())
		}
	}
}

// writer is a function as an io.Writer.
type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(b)
	return len(b), nil
}

// TestStaged: values on a device are sent through host memory where the transport takes no others; host tensors are
// sent as before.
func TestStaged(t *testing.T) {
	for _, c := range []struct {
		name string
		over testcluster.Transport
		gpu  bool
	}{
		{"host", testcluster.SHM, false}, {"tcp", testcluster.TCP, true}, {"shm", testcluster.SHM, true}, {"inproc", testcluster.InProc, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := testcluster.Start(t, testcluster.Options{Over: c.over, Backend: func(role string, _ int) backend.Backend {
				if !c.gpu || role == "scheduler" {
					return nil
				}
				return simgpu.New(0)
			}})
			v := core(cl.Workers[0]).Van()
			_, staged := van.As[*stage.Van](v)
			_, linked := van.As[*local.Van](v)
			if staged != c.gpu || linked != (c.over == testcluster.SHM) {
				t.Errorf("staged %t, linked %t", staged, linked)
			}
			if _, staged := van.As[*stage.Van](core(cl.Scheduler).Van()); staged {
				t.Error("the scheduler stages")
			}
			cl.Finalize(t)
		})
	}
}
