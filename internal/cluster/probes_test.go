package cluster

import (
	"context"
	"log/slog"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/netns"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestAddressThatLeadsNowhere: packets from the scheduler's host to the worker's port are lost. The scheduler and the
// worker report within 5 s the address, the address of the prober, and the errno.
func TestAddressThatLeadsNowhere(t *testing.T) {
	if !netns.Enter(t, 100*time.Second) {
		return
	}
	// Packets to port 20000 leave by an interface whose other end drops them; other packets stay on this host.
	for _, c := range []string{"link add h0 type veth peer name h1", "link set h0 up", "link set h1 up",
		"addr add 10.77.0.1/32 dev h0", "addr add 10.77.0.2/32 dev h0", "rule add pref 100 lookup local", "rule del pref 0",
		"rule add pref 50 dport 20000 ipproto tcp lookup 77", "route add 10.77.0.2 dev h0 table 77",
		"neigh replace 10.77.0.2 lladdr 02:00:00:00:00:fe nud permanent dev h0"} {
		if out, err := exec.Command("ip", strings.Fields(c)...).CombinedOutput(); err != nil {
			t.Skipf("ip %s: %v: %s", c, err, out)
		}
	}
	const want = " (connection timed out): a firewall or a missing route; set DMLC_NODE_HOST or DMLC_INTERFACE"
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	said := make(chan string, 100)
	start := time.Now()
	for _, role := range []string{"scheduler", "server", "worker"} {
		cfg := env.Default()
		cfg.Role, cfg.NumWorkers, cfg.NumServers, cfg.RootURI, cfg.RootPort, cfg.Backend = role, 1, 1, "10.77.0.1", 8123, "CPU"
		cfg.NodeHost = "10.77.0.1"
		if role == "worker" {
			cfg.NodeHost, cfg.Port = "10.77.0.2", 20000
		}
		log := slog.New(slog.NewTextHandler(lines(func(line string) {
			if strings.Contains(line, "10.77.0.2:20000 cannot be reached from 10.77.0.") && strings.Contains(line, want) {
				said <- role
			}
		}), nil))
		all.Go(func() {
			if n, err := Start(ctx, Options{Config: cfg, Log: log}); err == nil {
				n.Close()
				t.Errorf("%s has started", role)
			}
		})
	}
	missing := map[string]bool{"scheduler": true, "worker": true}
	for len(missing) > 0 {
		select {
		case role := <-said:
			if took := time.Since(start); missing[role] && took > 5*time.Second {
				t.Logf("%s says it after %s", role, took) // on a busy machine
			}
			delete(missing, role)
		case <-time.After(30 * time.Second):
			t.Fatalf("not said by %v: %s", missing, want)
		}
	}
	cancel()
	all.Wait()
}

// lines calls f with each line that is written.
type lines func(string)

func (f lines) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}
