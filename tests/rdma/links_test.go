package rdma

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// on runs a command on a host of tools/rdma-vm.
func on(t testing.TB, host int, command ...string) {
	t.Helper()
	out, err := exec.Command("rdma-host", append([]string{fmt.Sprint(host)}, command...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("on host %d: %s: %v\n%s", host, strings.Join(command, " "), err, out)
	}
}

// apart starts a cluster whose only server is a child on host 2.
func apart(t testing.TB, o options) *cluster {
	t.Helper()
	twoHosts(t)
	o.ack = env.Default().RDMAAckTimeout
	o.place = func(role string, _ int) place {
		if role == "server" {
			return place{answers, 2}
		}
		return place{}
	}
	c := start(t, o)
	if len(c.hosts) < 2 {
		c.hosts = twoHosts(t)
	}
	return c
}

// recovers waits until requests are answered again.
func recovers(t testing.TB, w *client) {
	t.Helper()
	for limit, i := nodetest.Within(t, 20*time.Second), 0; ; i++ {
		err := w.mixed(limit, i)
		if err == nil {
			break
		}
		if limit.Err() != nil || !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrTimeout) {
			t.Fatalf("after the repair: %v", err)
		}
	}
	work(t, w)
}

// TestLinkLost: a cut link fails the requests that need it, within the time limit and with errors that name the peer, whether the request or the answer was lost. When
// the link is back, the pair continues by itself. (If the interface were down, Soft-RoCE would permanently lose the queue pair of the connection manager.)
func TestLinkLost(t *testing.T) {
	c := apart(t, options{})
	w := c.clients()[0]
	work(t, w)
	whole := true
	repair := func() {
		if !whole {
			on(t, 1, "ip", "link", "set", "port2", "master", "switch")
			whole = true
		}
	}
	defer repair()
	for range 2 {
		failed := traffic(t, w)
		whole = false
		cut := time.Now()
		on(t, 1, "ip", "link", "set", "port2", "nomaster")
		lost(t, failed, cut, "push_pull with server 0 (id 8) at "+c.hosts[1], "queue pair 0", "transport retries exceeded")
		vantest.Fails(t, w.mixed(t.Context(), 0), van.ErrPeerLost, "server 0 (id 8)")
		nodetest.Returns(t, c.Workers, 8, repair)
		recovers(t, w)
	}
	c.end()
}

// TestLoss: devices send lost packets again, and the answers are correct. If a device fails after its retries, the errors name the peer, and few requests fail. Without
// further losses, all requests succeed.
func TestLoss(t *testing.T) {
	c := apart(t, options{})
	if _, err := exec.LookPath("tc"); err != nil {
		t.Skipf("needs tc of iproute2: %v", err)
	}
	w := c.clients()[0]
	work(t, w)
	on(t, 2, "tc", "qdisc", "add", "dev", "eth1", "root", "netem", "loss", "2%")
	whole := false
	repair := func() {
		if !whole {
			on(t, 2, "tc", "qdisc", "del", "dev", "eth1", "root")
			whole = true
		}
	}
	defer repair()
	failures, done := 0, 0
	for i, begun := 0, time.Now(); dropped(t) == 0 || i < 40 && time.Since(begun) < 10*time.Second; i++ {
		if time.Since(begun) > 2*time.Minute {
			t.Fatalf("after %d requests no packet was lost", i)
		}
		if err := w.exchange(t.Context(), []part{{1, 100 * (i % 40)}, {2, 20000}}, []part{{1, 20000}}); errors.Is(err, van.ErrPeerLost) || errors.Is(err, van.ErrTimeout) {
			failures++
			if !strings.Contains(err.Error(), "server 0") {
				t.Errorf("round %d: %v, want an error that names server 0", i, err)
			}
		} else if err != nil {
			t.Fatalf("round %d: %v", i, err)
		} else {
			done++
		}
	}
	t.Logf("%d packets were lost: %d requests were answered, %d failed", dropped(t), done, failures)
	if done <= failures {
		t.Errorf("%d requests were answered and %d failed, want most to be answered: the devices send again what was lost", done, failures)
	}
	repair()
	recovers(t, w)
	c.end()
}

// dropped returns the number of packets of host 2 that the rule of TestLoss has dropped.
func dropped(t testing.TB) (n int) {
	t.Helper()
	out, err := exec.Command("rdma-host", "2", "tc", "-s", "qdisc", "show", "dev", "eth1").CombinedOutput()
	if err != nil {
		t.Fatalf("tc: %v\n%s", err, out)
	}
	_, text, ok := strings.Cut(string(out), "(dropped ")
	if _, err := fmt.Sscanf(text, "%d", &n); !ok || err != nil {
		t.Fatalf("tc does not say what was dropped:\n%s", out)
	}
	return n
}

// TestLateScheduler: nodes that start before the scheduler listens wait for it.
func TestLateScheduler(t *testing.T) {
	c := prepare(t, options{})
	c.Cluster = testcluster.New(t, c.testOptions())
	server := c.spawn("server", 0, answers, 1)
	type result struct {
		n   *postoffice.Node
		err error
	}
	joined := make(chan result, 1)
	go func() {
		n, err := c.Join(t.Context(), "worker", 0, nil)
		joined <- result{n, err}
	}()
	select {
	case r := <-joined:
		t.Fatalf("without a scheduler Start returned %v", r.err)
	case <-time.After(700 * time.Millisecond): // several attempts
	}
	if _, err := c.Join(t.Context(), "scheduler", 0, nil); err != nil {
		t.Fatal(err)
	}
	r := <-joined
	if r.err != nil {
		t.Fatal(r.err)
	}
	server.Ready()
	work(t, newClient(t, r.n))
}

// TestNoScheduler: with a wrong port, and with an unused address, the start ends at the deadline with an error that lists the attempts.
func TestNoScheduler(t *testing.T) {
	var log nodetest.Text
	c := prepare(t, options{log: log.Logger(slog.LevelInfo)})
	c.Cluster = testcluster.New(t, c.testOptions())
	for _, tt := range []struct {
		name, host, text string
	}{
		{"wrong port", c.hosts[0], "no process listens there yet"},
		{"no such host", "10.77.0.99", "resolve address"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			begun := time.Now()
			_, err := c.Join(ctx, "worker", 0, func(c *postoffice.Config) { c.RootURI, c.StartTimeout = tt.host, 1500*time.Millisecond })
			vantest.Fails(t, err, van.ErrTimeout, fmt.Sprintf("the scheduler at %s:%d has not answered", tt.host, c.Port))
			if !strings.Contains(log.String(), tt.text) {
				t.Errorf("the log does not say %q:\n%s", tt.text, log.String())
			}
			if d := time.Since(begun); d > 10*time.Second {
				t.Errorf("it took %s, want little more than 1.5s", d)
			}
		})
	}
}
