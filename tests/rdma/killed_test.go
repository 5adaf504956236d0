package rdma

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	core "github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// traffic exchanges until it fails, then sends the error.
func traffic(t testing.TB, c *client) <-chan error {
	failed := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		var once sync.Once
		for i := 0; ; i++ {
			if err := c.mixed(t.Context(), i); err != nil {
				once.Do(func() { close(begun) })
				failed <- err
				return
			}
			once.Do(func() { close(begun) })
		}
	}()
	<-begun
	return failed
}

// lost checks that requests fail soon, and that their errors name the peer.
func lost(t testing.TB, failed <-chan error, since time.Time, texts ...string) {
	t.Helper()
	select {
	case err := <-failed:
		vantest.Fails(t, err, van.ErrPeerLost, texts...)
		t.Logf("after %s: %v", time.Since(since).Round(time.Millisecond), err)
		if d := time.Since(since); d > soon {
			t.Errorf("it took %s, want less than %s", d, soon)
		}
	case <-nodetest.Within(t, 20*time.Second).Done():
		t.Fatal("nothing has failed")
	}
}

// TestServerKilled: if a server is killed during requests, these and later ones fail until another process replaces it. The instances of other members of the groups
// continue.
func TestServerKilled(t *testing.T) {
	c := start(t, options{workers: 2, servers: 2, group: 2})
	all := c.clients()
	work(t, all...)
	// Instances 0 of both workers continue with servers 0 and 2; instances 1 lose server 3.
	var stops []func()
	for _, x := range []*client{all[0], all[2]} {
		stops = append(stops, nodetest.Repeat(t, x.Name(), func(i int) error { return x.mixed(t.Context(), i) }))
	}
	a, b := traffic(t, all[1]), traffic(t, all[3]) // a call fails in its send if the connection has just broken
	killed := time.Now()
	c.child("server", 3).Kill()
	lost(t, a, killed, all[1].Name(), "with server 3", "at "+c.hosts[0])
	lost(t, b, killed, all[3].Name(), "with server 3")
	vantest.Fails(t, all[1].mixed(t.Context(), 0), van.ErrPeerLost, "server 3")

	var next *nodetest.Process
	id := all[1].n.Topology().ServerInstances()[1]
	nodetest.Returns(t, []*postoffice.Node{all[1].n, all[3].n}, id, func() { next = c.spawn("server", 3, answers, 1) })
	next.Ready()
	work(t, all[1], all[3])
	for _, stop := range stops {
		stop()
	}
	work(t, all...)
}

// TestServerKilledWithRequests: a server is killed while it has unanswered requests.
func TestServerKilledWithRequests(t *testing.T) {
	notShort(t)
	c := start(t, options{place: func(role string, _ int) place { return map[string]place{"server": {what: mute}}[role] }})
	w := c.clients()[0]
	r, err := w.begin([]part{{1, 100000}}, []part{{1, 100000}})
	if err != nil {
		t.Fatal(err)
	}
	p := c.child("server", 0)
	p.Expect("got a batch")
	failed, killed := make(chan error, 1), time.Now()
	go func() { failed <- w.end(t.Context(), r) }()
	p.Kill()
	lost(t, failed, killed, "worker 0 (id 9): push_pull with server 0 (id 8)", fmt.Sprintf("handler %d", r.call.Timestamp()))
	for range 2 { // the second time, a replacement is killed
		var next *nodetest.Process
		nodetest.Returns(t, c.Workers, 8, func() { next = c.spawn("server", 0, answers, 1) })
		next.Ready()
		work(t, w)
		failed := traffic(t, w)
		killed := time.Now()
		next.Kill()
		lost(t, failed, killed, "server 0 (id 8)")
	}
}

// TestWorkerKilled: a worker that is killed during requests does not disturb another one, and can be replaced.
func TestWorkerKilled(t *testing.T) {
	notShort(t)
	c := start(t, options{workers: 2, servers: 2, place: func(role string, rank int) place {
		if role == "worker" && rank == 1 {
			return place{what: works}
		}
		return map[string]place{"server": {what: answers}}[role]
	}})
	w := newClient(t, c.Workers[0])
	victim := c.child("worker", 1)
	for range 2 {
		victim.Expect("works")
		work(t, w)
		victim.Kill()
		for i := range 10 {
			if err := w.mixed(t.Context(), i); err != nil {
				t.Fatalf("after the death of the other worker: %v", err)
			}
		}
		victim = c.spawn("worker", 1, works, 1)
	}
	victim.Expect("works")
	work(t, w)
}

// TestSchedulerKilled: requests between workers and servers continue without a scheduler. Barriers fail with an error that names it.
func TestSchedulerKilled(t *testing.T) {
	c := start(t, options{set: func(c *postoffice.Config) { c.StopTimeout, c.ReplaceTimeout = 5*time.Second, time.Second }, place: func(role string, _ int) place {
		return map[string]place{"server": {what: answers}, "scheduler": {what: rules}}[role]
	}})
	w := c.clients()[0]
	work(t, w)
	failed := make(chan error, 1)
	go func() { failed <- w.n.InstanceBarrier(t.Context(), 0, van.WorkerGroup|van.ServerGroup) }()
	killed := time.Now()
	c.child("scheduler", 0).Kill()
	scheduler := fmt.Sprintf("scheduler (id 1) at %s:%d", c.hosts[0], c.Port)
	lost(t, failed, killed, "worker 0 (id 9)", "instance barrier", scheduler)
	work(t, w)
	vantest.Fails(t, w.n.Shutdown(nodetest.Within(t, 20*time.Second)), van.ErrPeerLost, w.Name(), scheduler)
}

// TestServerStopped: a stopped server gets its requests later. The errors of requests that time out name it, also if there are more than it has slots for.
func TestServerStopped(t *testing.T) {
	notShort(t)
	c := start(t, options{servers: 2})
	w := c.clients()[0]
	work(t, w)
	victim := c.child("server", 1)
	for _, n := range []int{1, 400} {
		if err := victim.Stop(); err != nil {
			t.Fatal(err)
		}
		var all []*request
		for i := range n {
			r, err := w.begin([]part{{1, 1000}, {2, 20 << 10}}, []part{{1, 1000}})
			if errors.Is(err, van.ErrQueueFull) && i > 200 {
				break
			}
			if err != nil {
				t.Fatalf("request %d of %d: %v", i, n, err)
			}
			all = append(all, r)
		}
		for i, r := range all {
			err := core.Call(r.call).Customer().Wait(t.Context(), r.call.Timestamp(), 300*time.Millisecond)
			vantest.Fails(t, err, van.ErrTimeout, "worker 0 (id 9): push_pull", "no answer from server 1 (id 10) at "+c.hosts[0])
			if t.Failed() {
				t.Fatalf("request %d", i)
			}
			for _, x := range r.pull { // they belong to the caller again: a late answer must not change them
				clear(x.Val.Bytes())
			}
		}
		if err := victim.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		work(t, w)
		for i, r := range all {
			if b := r.pull[1].Val.Bytes(); len(b) != 1000 || b[0] != 0 || b[999] != 0 {
				t.Fatalf("a late answer to request %d was written to memory that is the caller's again", i)
			}
		}
	}
	c.end()
}
