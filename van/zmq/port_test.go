package zmq

import (
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/netns"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestSchedulersPort: the kernel has only two ephemeral ports, and one is the scheduler's. A node never listens
// at the scheduler's port. Neither an attempt to connect to that port nor another connection keeps the
// scheduler from listening there.
func TestSchedulersPort(t *testing.T) {
	if !netns.Enter(t, 60*time.Second) {
		return
	}
	const first, second = 30000, 30001
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", fmt.Appendf(nil, "%d %d", first, second), 0); err != nil {
		t.Skip(err)
	}
	for _, local := range []bool{false, true} {
		for _, port := range []int{first, second} {
			t.Run(fmt.Sprintf("node/%d/local=%t", port, local), func(t *testing.T) {
				n := newNode(t, 8, 5, nil, func(c *env.Config) { c.RootPort, c.Local = port, local })
				if n.self.Port != first+second-port {
					t.Errorf("listens at %d", n.self.Port)
				}
			})
		}
	}
	asked := func(port int) *zvan { // a van that listens at the given port
		v, err := New(van.Options{Config: env.Default(), Incarnation: 7})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = v.Close(t.Context()) })
		if _, err := v.Bind(t.Context(), van.Node{Role: van.Server, ID: van.Empty, Hostname: "127.0.0.1", Port: port}); err != nil {
			t.Fatal(err)
		}
		v.Start(func(*van.Message) {})
		return v.(*zvan)
	}
	listens := func(t *testing.T, port int) {
		t.Helper()
		until(t, "port of the scheduler", func() bool {
			v, err := New(van.Options{Config: env.Default(), Incarnation: 1})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = v.Close(t.Context()) })
			_, err = v.Bind(t.Context(), van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: "127.0.0.1", Port: port})
			return err == nil
		})
	}
	at := func(port int) van.Node { return van.Node{Role: van.Server, ID: 8, Hostname: "127.0.0.1", Port: port} }
	t.Run("connects with itself", func(t *testing.T) {
		v := asked(25000)
		if err := v.Connect(t.Context(), van.SchedulerID, at(first)); err != nil {
			t.Fatal(err)
		}
		until(t, "attempt to connect", func() bool { return (*v.peers.Load())[van.SchedulerID].lost.Load() })
		listens(t, first)
	})
	t.Run("port of a connection", func(t *testing.T) {
		v := asked(25001)
		asked(25009)
		if err := v.Connect(t.Context(), 9, at(25009)); err != nil {
			t.Fatal(err)
		}
		c := (*v.peers.Load())[9]
		until(t, "connection", func() bool { return c.up.Load() && c.link.Load() != nil })
		c.link.Load().use(func(fd int) {
			own, err := unix.Getsockname(fd)
			if err != nil {
				t.Fatal(err)
			}
			listens(t, int(addrOf(own).Port()))
		})
	})
}
