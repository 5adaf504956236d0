package cluster_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// unconnectable is a van that cannot connect, as in a process without free descriptors.
type unconnectable struct{ van.Van }

func (unconnectable) Connect(context.Context, int, van.Node) error {
	return &van.Error{Op: "connect", Err: syscall.EMFILE}
}

// TestCannotConnect: a node that cannot connect does not wait to start.
func TestCannotConnect(t *testing.T) {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers = "worker", 1, 1
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", testcluster.FreePort(t), "127.0.0.1"
	f := inproc.NewNetwork().Factory()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.DiscardHandler), Van: func(o van.Options) (van.Van, error) {
		v, err := f(o)
		return unconnectable{v}, err
	}})
	if err == nil {
		n.Close()
	}
	if !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), "too many open files; the limit is RLIMIT_NOFILE: ulimit -Hn") {
		t.Errorf("a node that cannot connect starts with %v, want %v and its limit", err, syscall.EMFILE)
	}
}

// unasking is a van that does not probe its peers.
type unasking struct{ van.Van }

func (u unasking) Unwrap() van.Van { return u.Van }

func (unasking) Alive(int) bool { return false }

// TestCloseWhenAPeerIsLost: Close ends also within a function that is called with a loss, which it waits for up to its limit,
// whichever part noticed the loss.
func TestCloseWhenAPeerIsLost(t *testing.T) {
	for _, by := range []string{"connection", "heartbeats"} {
		for _, over := range []testcluster.Transport{testcluster.InProc, testcluster.TCP, testcluster.SHM} {
			t.Run(by+" "+over.String(), func(t *testing.T) {
				t.Parallel()
				c := testcluster.Start(t, testcluster.Options{Over: over, Set: func(c *postoffice.Config) {
					c.HeartbeatInterval = 0
					if by == "heartbeats" && c.Role == "scheduler" {
						c.HeartbeatInterval = time.Second
						c.HeartbeatTimeout = 3 * time.Second // of missing heartbeats; OnPeer is called before
					}
				}, Wrap: func(_ string, _ int, f van.Factory) van.Factory {
					return func(o van.Options) (van.Van, error) {
						v, err := f(o)
						return unasking{v}, err
					}
				}})
				done := make(chan struct{})
				n := c.Workers[0]
				if by == "heartbeats" {
					n = c.Scheduler
				}
				var once sync.Once
				n.OnPeer(func(_ postoffice.NodeID, up bool, _ error) {
					if !up {
						once.Do(func() {
							n.Close()
							close(done)
						})
					}
				})
				if by == "connection" {
					c.Servers[0].Close()
				}
				select {
				case <-done:
				case <-time.After(20 * time.Second):
					t.Fatal("Close does not return")
				}
			})
		}
	}
}

// rejected is a van whose connections are refused, for that cause.
type rejected struct {
	van.Van
	cause error
	watch func(id int, up bool, cause error)
}

func (r *rejected) WatchPeers(f func(id int, up bool, cause error)) { r.watch = f }

func (r *rejected) Connect(_ context.Context, id int, _ van.Node) error {
	r.watch(id, false, fmt.Errorf("no connection could be made: %w: %w", syscall.ECONNREFUSED, r.cause))
	return nil
}

// TestReplacedBeforeItHasJoined: a node that the scheduler rejects because it was replaced fails at once, though it
// has not joined yet. A node waits for a scheduler that does not listen.
func TestReplacedBeforeItHasJoined(t *testing.T) {
	for cause, want := range map[error]error{van.ErrReplaced: postoffice.ErrRefused, errors.New("no process listens there yet"): van.ErrTimeout} {
		network := inproc.NewNetwork()
		n, err := postoffice.Start(t.Context(), postoffice.Options{Log: drop,
			Config: config(func(c *postoffice.Config) {
				if c.StartTimeout = 20 * time.Second; want == van.ErrTimeout {
					c.StartTimeout = 100 * time.Millisecond
				}
			}),
			Van: func(o van.Options) (van.Van, error) {
				v, err := network.Factory()(o)
				return &rejected{Van: v, cause: cause}, err
			}})
		if err == nil {
			n.Close()
		}
		if !errors.Is(err, want) || errors.Is(want, postoffice.ErrRefused) && !strings.Contains(err.Error(), cause.Error()) {
			t.Errorf("a node that is rejected (%v) starts with %v, want %v", cause, err, want)
		}
	}
}

// refusing is a van that cannot connect to some nodes.
type refusing struct {
	van.Van
	to func(id int) bool
}

func (r refusing) Unwrap() van.Van { return r.Van }

func (r refusing) Connect(ctx context.Context, id int, peer van.Node) error {
	if r.to(id) {
		return &van.Error{Op: "connect", Err: syscall.EMFILE}
	}
	return r.Van.Connect(ctx, id, peer)
}

// TestSchedulerCannotConnect: a scheduler that has assigned the ids and then cannot connect to a node ends start-up,
// and sends the reason to the nodes that it reaches.
func TestSchedulerCannotConnect(t *testing.T) {
	network := inproc.NewNetwork()
	results := map[string]<-chan result{}
	for _, role := range []string{"scheduler", "server", "worker"} {
		done := make(chan result, 1)
		results[role] = done
		go func() {
			n, err := postoffice.Start(t.Context(), postoffice.Options{Log: drop,
				Config: config(func(c *postoffice.Config) { c.Role, c.StartTimeout = role, 5*time.Second }),
				Van: func(o van.Options) (van.Van, error) {
					v, err := network.Factory()(o)
					return refusing{v, func(id int) bool { return role == "scheduler" && id == 9 }}, err
				}})
			if err == nil {
				n.Close()
			}
			done <- result{n, err}
		}()
	}
	for role, text := range map[string]string{"scheduler": "too many open files", "server": "the scheduler cannot connect to worker 0 (id 9)", "worker": ""} {
		select {
		case r := <-results[role]:
			if r.err == nil || !strings.Contains(r.err.Error(), text) {
				t.Errorf("%s: %v, want an error with %q", role, r.err, text)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s is still starting", role)
		}
	}
}

// slow is a van whose connections to some nodes take until the test releases them.
type slow struct {
	van.Van
	held  func(id int)
	beats *atomic.Int32 // heartbeats that it has sent
}

func (s slow) Unwrap() van.Van { return s.Van }

func (s slow) Connect(ctx context.Context, id int, peer van.Node) error {
	s.held(id)
	return s.Van.Connect(ctx, id, peer)
}

func (s slow) Send(m *van.Message) error {
	err := s.Van.Send(m)
	if err == nil && m.Control.Cmd == van.Heartbeat {
		s.beats.Add(1)
	}
	return err
}

// TestSlowConnect: while a node connects to a replacement process, which may take seconds, its heartbeats and notices
// are sent: those of the scheduler to a process without an id, those of the server to a member.
func TestSlowConnect(t *testing.T) {
	for _, who := range []string{"scheduler", "server"} {
		t.Run(who, func(t *testing.T) { slowConnect(t, who) })
	}
}

func slowConnect(t *testing.T, who string) {
	var hold atomic.Bool
	var beats, others atomic.Int32
	const interval, silence = 50 * time.Millisecond, 2 * time.Second
	connects, release := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(connects) })
	c := testcluster.Start(t, testcluster.Options{Workers: 2,
		Set: func(c *postoffice.Config) { c.HeartbeatInterval, c.HeartbeatTimeout = interval, silence },
		Wrap: func(role string, rank int, f van.Factory) van.Factory {
			return func(o van.Options) (van.Van, error) {
				v, err := f(o)
				if role != who {
					return slow{v, func(int) {}, &others}, err
				}
				return slow{v, func(id int) {
					if hold.Load() && (id < 0 || id == 11) {
						once()
						<-release
					}
				}, &beats}, err
			}
		}})
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	c.Workers[1].Close()
	vantest.Eventually(t, 20*time.Second, "scheduler and server notice", func() bool {
		return len(testcluster.Dead(c.Scheduler)) > 0 && len(testcluster.Dead(c.Servers[0])) > 0
	})
	hold.Store(true)
	joined := make(chan error, 1)
	go func() {
		_, err := c.Join(within(t, 40*time.Second), "worker", 1, nil)
		joined <- err
	}()
	limit := within(t, 20*time.Second)
	select {
	case <-connects:
	case <-limit.Done():
		t.Fatal("nobody connects to the newcomer")
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for begun := beats.Load(); beats.Load()-begun < int32(silence/interval)*5/4; { // for longer than the heartbeat timeout
		select {
		case <-tick.C:
		case <-limit.Done():
			t.Fatalf("no heartbeats of the %s go out while it connects", who)
		}
	}
	for _, n := range []*postoffice.Node{c.Scheduler, c.Servers[0], c.Workers[0]} {
		if dead := slices.DeleteFunc(testcluster.Dead(n), func(id postoffice.NodeID) bool { return id == 11 }); len(dead) > 0 {
			t.Errorf("%v are dead for the %s, because a connection to another node takes long", dead, n.Role())
		}
	}
	let()
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// TestLossOfThePredecessor: a report about the connection to an earlier process of an id does not concern the present
// process: neither before there is a connection to the present one, nor if it names the earlier process.
func TestLossOfThePredecessor(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	n, id := c.Workers[0], int(c.Servers[0].ID())
	lost := make(chan error, 10)
	n.OnPeer(func(peer postoffice.NodeID, up bool, cause error) {
		if int(peer) == id && !up {
			lost <- cause
		}
	})
	early, late := errors.New("of the predecessor"), errors.New("of the node itself")
	of := func(incarnation uint32, err error) error {
		return &van.ConnectionError{Incarnation: incarnation, Err: err}
	}
	self := core(c.Servers[0]).Incarnation()
	core(n).AddPendingConnect(id, 1)
	core(n).PeerChanged(id, false, early)
	core(n).AddPendingConnect(id, -1)
	core(n).PeerChanged(id, false, of(self+1, early))
	core(n).PeerChanged(id, false, of(self, late))
	select {
	case cause := <-lost:
		if !errors.Is(cause, late) {
			t.Errorf("lost because of %v, want %v", cause, late)
		}
	case <-time.After(20 * time.Second):
		t.Error("the loss was not told")
	}
}

// TestFailureToConnectToThePredecessor: if the connection to an earlier process of an id cannot be made, the present process, to which the
// node connects next, is not lost.
func TestFailureToConnectToThePredecessor(t *testing.T) {
	var fails atomic.Bool
	c := testcluster.Start(t, testcluster.Options{Wrap: func(role string, _ int, f van.Factory) van.Factory {
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			return refusing{v, func(int) bool { return role == "worker" && fails.Load() }}, err
		}
	}})
	n, id := core(c.Workers[0]), int(c.Servers[0].ID())
	fails.Store(true)
	connect := membership.Connect{ID: id, Node: van.Node{ID: id, Role: van.Server, Hostname: "127.0.0.1", Port: 1}}
	n.AddPendingConnect(id, 2) // to the earlier process, and to the present one
	n.CarryOut(connect)
	if err := cmp.Or(n.Lost(id), n.App().Alive()); err != nil {
		t.Errorf("the present process or this node is lost: %v", err)
	}
	n.CarryOut(connect)
	vantest.Eventually(t, 20*time.Second, "the node, which was connected to the present process at its start, fails with "+syscall.EMFILE.Error(), func() bool {
		return errors.Is(n.App().Alive(), syscall.EMFILE)
	})
}

// hooked is a van that calls a function for each connection.
type hooked struct {
	van.Van
	connected func(id int)
}

func (h hooked) Unwrap() van.Van { return h.Van }

func (h hooked) Connect(ctx context.Context, id int, peer van.Node) error {
	err := h.Van.Connect(ctx, id, peer)
	h.connected(id)
	return err
}

// TestLossOfTheReplacement: a node that is lost as soon as it has replaced another one is dead, and not only for the
// machine.
func TestLossOfTheReplacement(t *testing.T) {
	var connected atomic.Pointer[func(id int)]
	c := testcluster.Start(t, testcluster.Options{Wrap: func(role string, _ int, f van.Factory) van.Factory {
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			if role != "worker" || err != nil {
				return v, err
			}
			return hooked{v, func(id int) {
				if f := connected.Load(); f != nil {
					(*f)(id)
				}
			}}, nil
		}
	}})
	n, id := c.Workers[0], int(c.Servers[0].ID())
	got, stop := events(n, id)
	defer stop()
	c.Servers[0].Close()
	if e := <-got; e.up {
		t.Fatalf("the worker heard %+v, want the loss", e)
	}
	testcluster.Lost(t, c.Scheduler, van.ServerID(0))
	late := errors.New("of the replacement")
	hook := func(to int) {
		if to == id {
			core(n).PeerChanged(id, false, late)
		}
	}
	connected.Store(&hook)
	next, err := c.Join(within(t, 20*time.Second), "server", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Servers[0] = next
	if e := <-got; !e.up {
		t.Errorf("the worker heard %+v, want the replacement", e)
	}
	if e := <-got; e.up || !errors.Is(e.cause, late) {
		t.Errorf("the worker heard %+v, want the loss of the replacement", e)
	}
	if err := core(n).Lost(id); !errors.Is(err, late) {
		t.Errorf("to requests the server is lost because of %v, want %v", err, late)
	}
}
