package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// known makes the process with that incarnation node id of n, and connects n to it.
func known(n *Node, id int, incarnation uint32) {
	n.pending.setProcess(id, incarnation, false)
	n.pending.deliverPending(id)
}

// dialed is a van that sends to the process that the last Connect named.
type dialed struct {
	van.Van // nil: an unexpected call panics
	to      uint32
	bodies  []string
}

func (v *dialed) Connect(_ context.Context, _ int, peer van.Node) error {
	who, _ := peer.Extension()
	v.to = who.Incarnation
	return nil
}

func (v *dialed) Send(m *van.Message) error {
	switch _, to := m.Incarnations(); {
	case v.to == 0:
		return van.ErrUnknownPeer
	case v.to == to: // the former process drops what is for another one
		v.bodies = append(v.bodies, string(m.Body))
	}
	return nil
}

// earlyRequest is a request of the process with incarnation 2 that replaces worker 0, with size bytes.
func earlyRequest(n *Node, ts int32, size int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Sender, m.Request, m.AppID, m.CustomerID, m.Timestamp = 9, true, 7, 0, ts
	m.Frames, m.Keys, m.Vals = 2, backend.Mem{}, backend.Bytes(make([]byte, size))
	m.SetIncarnations(2, n.incarnation)
	return m
}

// TestRefusalsReachTheNewProcess: the requests of a process are delivered when this node has a connection to it, so that
// a refusal reaches it: at a first start, and when it replaces a process that is lost or that still seems to live. A
// request for an application that is made later stays queued.
func TestRefusalsReachTheNewProcess(t *testing.T) {
	record := van.Node{Role: van.Worker, ID: 9, Hostname: "h", Port: 1, Endpoint: (&van.NodeExtension{Incarnation: 2}).Encode()}
	connect, replaced := membership.Connect{ID: 9, Node: record}, membership.PeerReplaced{ID: 9, Node: record}
	for _, x := range []struct {
		name    string
		former  bool // another process had the id
		lost    bool
		outputs []membership.Output
	}{
		{"first start", false, false, []membership.Output{connect}},
		{"replaces a lost process", true, true, []membership.Output{connect, replaced}},
		{"replaces a process", true, false, []membership.Output{connect, replaced}},
	} {
		for _, early := range []bool{true, false} { // the requests arrive before the record
			t.Run(fmt.Sprintf("%s, early %t", x.name, early), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cfg := env.Default()
					cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
					n := keptNode(cfg, slog.New(slog.DiscardHandler))
					out := &dialed{}
					n.notices.van, n.transport.van = out, out
					if x.former {
						known(n, 9, 1)
						out.to = 1
					}
					if x.lost {
						n.processes.setLost(9, van.ErrPeerLost)
					}
					if _, err := n.App().AddCustomer(7, 7, func(m *van.Message) {
						n.App().Refuse(m.Sender, m.ProcessEpoch, m.AppID, m.CustomerID, m.Timestamp, fmt.Errorf("%w: no", van.ErrInvalid))
					}); err != nil {
						t.Fatal(err)
					}
					arrive := func() {
						n.receive(earlyRequest(n, 1, 0))
						later := earlyRequest(n, 2, 0)
						later.AppID = 8
						n.receive(later)
						synctest.Wait()
					}
					if early {
						arrive()
					}
					n.AddPendingConnect(9, 1)
					n.control.members.updateProcesses(x.outputs, 0)
					if !early {
						arrive()
					}
					for _, o := range x.outputs {
						time.Sleep(2 * pendingTime) // a connection may take long
						synctest.Wait()
						n.perform(o)
					}
					synctest.Wait()
					if want := []string{"stepaf/1 refused 7 0 1 invalid no"}; !slices.Equal(out.bodies, want) {
						t.Errorf("the worker gets %q, want %q", out.bodies, want)
					}
					if got := n.QueuedRequests(); got != 1 {
						t.Errorf("%d requests wait for their application, want 1", got)
					}
					n.apps.close()
				})
			})
		}
	}
}

// TestPendingOfAMember: the pending messages of a known process, to which this node connects, do not count as those of unknown
// processes, whether they arrived before its record or later. They count again if another process replaces it.
func TestPendingOfAMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := env.Default()
		cfg.NumWorkers, cfg.NumServers, cfg.GroupSize, cfg.StrangerBudget = 2, 1, 1, 2030
		n := keptNode(cfg, slog.New(slog.DiscardHandler))
		ts, dropped := int32(0), uint64(0)
		arrives := func(id int, size int, queued bool) {
			t.Helper()
			ts++
			m := earlyRequest(n, ts, size)
			m.Sender = id
			n.receive(m)
			if !queued {
				dropped++
			}
			if got := countersOf(n).StrangerMessages; got != dropped {
				t.Errorf("message %d: %d messages were dropped, want %d", ts, got, dropped)
				dropped = got
			}
		}
		arrives(9, 1488, true)
		arrives(11, 0, false)
		n.pending.setProcess(9, 2, false)
		arrives(9, 1488, true)
		arrives(11, 1488, true)
		arrives(11, 0, false)
		n.pending.setProcess(11, 2, false)
		n.pending.setProcess(9, 3, true)
		arrives(9, 0, false) // of the replaced process
		n.pending.deliverPending(9)
		time.Sleep(pendingTime + time.Millisecond) // the messages of the replaced process expire
		synctest.Wait()
		dropped += 2
		arrives(9, 1488, true)
		n.pending.close()
		if n.pending.bytes != 0 {
			t.Errorf("%d bytes are left", n.pending.bytes)
		}
	})
}

// TestPendingOfTwoProcesses: a process is connected while messages of the one that has replaced it are queued already.
// They stay queued until its record arrives.
func TestPendingOfTwoProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := env.Default()
		cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 1, 1
		n := keptNode(cfg, slog.New(slog.DiscardHandler))
		var got []int32 // timestamps
		if _, err := n.App().AddCustomer(7, 7, func(m *van.Message) {
			got = append(got, m.Timestamp)
		}); err != nil {
			t.Fatal(err)
		}
		n.pending.setProcess(9, 2, false)
		for i, incarnation := range []uint32{2, 3} {
			m := earlyRequest(n, int32(i+1), 0)
			m.SetIncarnations(incarnation, n.incarnation)
			n.receive(m)
		}
		for _, want := range [][]int32{{1}, {1, 2}} {
			n.pending.deliverPending(9)
			synctest.Wait()
			if !slices.Equal(got, want) {
				t.Errorf("messages %d were delivered, want %d", got, want)
			}
			n.pending.setProcess(9, 3, false)
		}
		n.apps.close()
	})
}

// TestRefusedBeforeKnown: a request of an unknown process that exceeds a limit is dropped, and refused when the process is
// known and connected. Answers, and requests of processes that cannot become members, are only
// dropped. A line in the log names the sender, the bytes and the limit.
func TestRefusedBeforeKnown(t *testing.T) {
	for _, x := range []struct {
		name     string
		send     func(n *Node)
		as       uint32 // the incarnation of the process that becomes worker 0
		refused  []string
		came     string // the timestamps of the delivered requests
		dropped  uint64
		inTheLog []string
	}{
		{"the budget in bytes", func(n *Node) {
			for ts := range int32(3) {
				n.receive(earlyRequest(n, ts, 500))
			}
		}, 2, []string{"7 0 2 full server 0 did not know worker 0 (id 9) yet: this message has 1012 bytes, and 2024 are queued already (STEPAF_STRANGER_BUDGET=2030)"}, "[0 1]", 1,
			[]string{"worker 0 (id 9)", "1012 bytes", "STEPAF_STRANGER_BUDGET=2030", "process=00000002"}},
		{"a later one that fits", func(n *Node) {
			n.receive(earlyRequest(n, 0, 3000))
			n.receive(earlyRequest(n, 1, 100))
		}, 2, []string{"7 0 0 full server 0 did not know worker 0 (id 9) yet: this message has 3512 bytes, and 0 are queued already (STEPAF_STRANGER_BUDGET=2030)"}, "[1]", 1, nil},
		{"another process", func(n *Node) { n.receive(earlyRequest(n, 0, 3000)) }, 3, nil, "[]", 1, nil},
		{"an answer", func(n *Node) {
			m := earlyRequest(n, 0, 3000)
			m.Request = false
			n.receive(m)
		}, 2, nil, "[]", 1, []string{"3512 bytes"}},
		{"no member", func(n *Node) {
			m := earlyRequest(n, 0, 3000)
			m.Sender = 11
			n.receive(m)
		}, 2, nil, "[]", 1, []string{"no member"}},
		{"too late", func(n *Node) {
			n.receive(earlyRequest(n, 0, 3000))
			time.Sleep(pendingTime + time.Millisecond)
		}, 2, nil, "[]", 1, nil},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := env.Default()
				cfg.NumWorkers, cfg.NumServers, cfg.GroupSize, cfg.StrangerBudget = 1, 1, 1, 2030
				var logged vantest.Log
				n := keptNode(cfg, logged.Logger())
				out := &sent{}
				n.notices.van = out
				came := []int32{}
				if _, err := n.App().AddCustomer(7, 7, func(m *van.Message) { came = append(came, m.Timestamp) }); err != nil {
					t.Fatal(err)
				}
				x.send(n)
				synctest.Wait()
				if len(out.bodies) > 0 {
					t.Errorf("an unknown process gets %q", out.bodies)
				}
				known(n, 9, x.as)
				synctest.Wait()
				for i, s := range out.bodies {
					out.bodies[i] = strings.TrimPrefix(s, refusedPrefix)
				}
				if !slices.Equal(out.bodies, x.refused) || fmt.Sprint(came) != x.came {
					t.Errorf("refused: %q, want %q; delivered: %d, want %s", out.bodies, x.refused, came, x.came)
				}
				if got := countersOf(n).StrangerMessages; got != x.dropped {
					t.Errorf("%d messages count as dropped, want %d", got, x.dropped)
				}
				for _, text := range x.inTheLog {
					if !strings.Contains(logged.String(), text) {
						t.Errorf("the log does not have %q:\n%s", text, logged.String())
					}
				}
				time.Sleep(pendingTime + time.Millisecond) // messages of another process expire
				synctest.Wait()
				if n.pending.refused != 0 || n.pending.bytes != 0 || len(n.pending.senders) != 0 {
					t.Errorf("%d refusals and %d bytes of %d processes are left", n.pending.refused, n.pending.bytes, len(n.pending.senders))
				}
				n.pending.close()
			})
		})
	}
}
