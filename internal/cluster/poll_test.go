package cluster

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// pollNode returns a node that knows the process with incarnation 2 at each of ids.
func pollNode(role van.Role, ids ...int) *Node {
	cfg := env.Default()
	cfg.NumWorkers, cfg.NumServers, cfg.GroupSize = 1, 2, 1
	cfg.RecvBudgetPeer = 1000 // the weight of a message without payload is 512
	n := keptNode(cfg, slog.New(slog.DiscardHandler))
	n.role, n.apps.role = role, role
	for _, id := range ids {
		known(n, id, 2)
	}
	return n
}

// polled is a message for application 7 that a Poll of n delivers.
func polled(n *Node, sender int, ts int32, request bool) *van.Message {
	m := &van.Message{Meta: van.Meta{Request: request, AppID: 7, Timestamp: ts}, Sender: sender, InPoll: true}
	m.SetIncarnations(2, n.incarnation)
	return m
}

// TestPollsDoNotRunHandlersThatBlock: the handler of a request that a Poll has received on a worker delays later requests of that
// sender only, in their order. The messages of a customer that serves no requests are delivered in the Poll.
func TestPollsDoNotRunHandlersThatBlock(t *testing.T) {
	for _, role := range []van.Role{van.Worker, van.Server} {
		for _, serves := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, serves %t", role, serves), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := pollNode(role, 10, 12)
					var came []int32
					leave := make(chan struct{})
					if _, err := n.App().add(7, 0, NewInbound(), serves, func(m *van.Message) {
						came = append(came, m.Timestamp)
						if m.Timestamp == 1 {
							<-leave
						}
					}); err != nil {
						t.Fatal(err)
					}
					polls, received := make(chan *van.Message, 4), 0
					go func() {
						for m := range polls {
							n.receive(m)
							received++
						}
					}()
					for _, m := range []*van.Message{polled(n, 10, 1, true), polled(n, 10, 2, true), polled(n, 12, 3, true), polled(n, 12, 4, false)} {
						polls <- m
						synctest.Wait()
					}
					close(polls)
					apart := serves && role == van.Worker
					want, all := []int32{1}, []int32{1, 2, 3}
					if apart {
						want, all = []int32{1, 3}, []int32{1, 3, 2}
					}
					if apart != (received == 4) || !slices.Equal(came, want) {
						t.Errorf("while the first handler runs, requests %v are delivered, want %v; the Poll continues: %t, want %t", came, want, received > 0, apart)
					}
					close(leave)
					synctest.Wait()
					if received != 4 || !slices.Equal(came, all) {
						t.Errorf("requests %v are delivered, want %v", came, all)
					}
					n.receive(polled(n, 10, 5, true))
					synctest.Wait()
					if !slices.Equal(came, append(all, 5)) {
						t.Errorf("requests %v are delivered, want %v and 5", came, all)
					}
				})
			})
		}
	}
}

// TestPollsDoNotWaitForADelivery: a message that a Poll has received is queued beyond its sender's budget if earlier messages of the
// sender are being delivered. No further Poll begins then until that queue is below the budget, also if messages leave other queues.
func TestPollsDoNotWaitForADelivery(t *testing.T) {
	for name, begin := range map[string]func(n *Node, add func()){
		"from before their customer was made": func(n *Node, add func()) {
			known(n, 9, 2)
			known(n, 10, 2)
			n.receive(polled(n, 9, 0, true))
			n.receive(polled(n, 10, 10, true))
			n.receive(polled(n, 10, 11, true))
			add()
		},
		"from before their process was known": func(n *Node, add func()) {
			add()
			n.receive(polled(n, 9, 0, true))
			n.receive(polled(n, 10, 10, true))
			n.receive(polled(n, 10, 11, true))
			known(n, 9, 2)
			known(n, 10, 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := pollNode(van.Server)
				came := map[int][]int32{} // timestamps by sender
				leave := map[int]chan struct{}{9: make(chan struct{}), 10: make(chan struct{})}
				var mu sync.Mutex
				begin(n, func() {
					if _, err := n.App().AddCustomer(7, 7, func(m *van.Message) {
						mu.Lock()
						came[m.Sender] = append(came[m.Sender], m.Timestamp)
						mu.Unlock()
						<-leave[m.Sender]
					}); err != nil {
						t.Error(err)
					}
				})
				synctest.Wait() // the handlers of requests 0 and 10 run
				var overfull []bool
				go func() {
					for ts := range int32(4) {
						n.receive(polled(n, 9, ts+1, true))
						overfull = append(overfull, n.apps.overfull.any())
					}
				}()
				synctest.Wait()
				if len(overfull) != 4 || overfull[0] || !overfull[3] {
					t.Errorf("of 4 messages, the Poll has received %d; the queue is overfull: %v", len(overfull), overfull)
				}
				for i, x := range []struct {
					sender int // a handler of it returns
					over   bool
				}{{10, true}, {9, true}, {9, true}, {9, false}} {
					leave[x.sender] <- struct{}{}
					synctest.Wait()
					if got := n.apps.overfull.any(); got != x.over {
						t.Errorf("after message %d has left: overfull %t, want %t", i, got, x.over)
					}
				}
				close(leave[9])
				close(leave[10])
				synctest.Wait()
				if want := (map[int][]int32{9: {0, 1, 2, 3, 4}, 10: {10, 11}}); !maps.EqualFunc(came, want, slices.Equal) {
					t.Errorf("requests %v are delivered, want %v", came, want)
				}
			})
		})
	}
}

// TestCloseRefusesTheBacklog: when an application or its node is closed, the requests that wait behind a running handler are refused:
// those of the backlog, one whose receiving waits for the backlog, and later ones. Answers are dropped.
func TestCloseRefusesTheBacklog(t *testing.T) {
	for name, end := range map[string]func(n *Node, c *Customer){
		"application": func(_ *Node, c *Customer) { c.Close() },
		"node":        func(n *Node, _ *Customer) { n.apps.failAll(van.ErrClosed) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := pollNode(van.Worker, 10)
				out := &sent{}
				n.notices.van = out
				leave := make(chan struct{})
				var came []int32
				c, err := n.App().AddServer(7, 0, NewInbound(), func(m *van.Message) {
					came = append(came, m.Timestamp)
					<-leave
				})
				if err != nil {
					t.Fatal(err)
				}
				n.receive(polled(n, 10, 1, true))
				synctest.Wait() // the handler of request 1 runs
				n.receive(polled(n, 10, 2, true))
				n.receive(polled(n, 10, 3, false))
				received := false
				go func() {
					last := polled(n, 10, 4, true)
					last.InPoll = false
					n.receive(last)
					received = true
				}()
				synctest.Wait()
				if received {
					t.Error("request 4 was received beyond the budget of its sender")
				}
				end(n, c)
				synctest.Wait()
				want := []string{"7 0 2 finished server 0 has closed application 7", "7 0 4 finished server 0 has closed application 7"}
				if name == "node" {
					n.receive(polled(n, 10, 5, true))
					want = append(want, "7 0 5 finished server 0 has closed application 7")
				}
				for i := range out.bodies {
					out.bodies[i] = strings.TrimPrefix(out.bodies[i], refusedPrefix)
				}
				slices.Sort(out.bodies)
				if !received || !slices.Equal(out.bodies, want) {
					t.Errorf("received: %t; the sender gets %q, want %q", received, out.bodies, want)
				}
				close(leave)
				synctest.Wait()
				if !slices.Equal(came, []int32{1}) || len(c.backlogs.queues) > 0 {
					t.Errorf("requests %v are delivered, want 1; %d backlogs are left", came, len(c.backlogs.queues))
				}
				n.apps.close()
			})
		})
	}
}
