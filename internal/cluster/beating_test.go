package cluster_test

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// beater is a van whose peers answer probes while answers is set. While mute is set it sends no heartbeats.
type beater struct {
	van.Van
	answers, mute *atomic.Bool
	asked         *atomic.Int64
}

func (b *beater) Unwrap() van.Van { return b.Van }

func (b *beater) Alive(int) bool {
	b.asked.Add(1)
	return b.answers.Load()
}

func (b *beater) Send(m *van.Message) error {
	if b.mute.Load() && m.Control.Cmd == van.Heartbeat {
		return nil
	}
	return b.Van.Send(m)
}

// TestBeating: nodes that send no heartbeats are not declared dead while their transports answer, and are when these
// stop answering. When heartbeats arrive again they are alive.
func TestBeating(t *testing.T) {
	var answers, mute atomic.Bool
	var asked [2]atomic.Int64 // by scheduler and server
	answers.Store(true)
	c := testcluster.Start(t, testcluster.Options{
		Set: func(c *postoffice.Config) {
			c.HeartbeatInterval, c.HeartbeatTimeout = 100*time.Millisecond, 400*time.Millisecond
		},
		Wrap: func(role string, _ int, f van.Factory) van.Factory {
			return func(o van.Options) (van.Van, error) {
				v, err := f(o)
				b := &beater{Van: v, answers: &answers, mute: &mute, asked: new(atomic.Int64)}
				switch role {
				case "scheduler":
					b.asked = &asked[0]
				case "server":
					b.asked = &asked[1]
				}
				return b, err
			}
		},
	})
	mute.Store(true)
	for i := range asked { // each time a node would be declared dead
		until(t, "silence", func() bool { return asked[i].Load() > 10 })
	}
	dead := func(n *postoffice.Node, id int) bool {
		return slices.Contains(testcluster.Dead(n), postoffice.NodeID(id))
	}
	if dead(c.Scheduler, 9) || dead(c.Servers[0], van.SchedulerID) {
		t.Errorf("dead for the scheduler: %v, for the server: %v; want none", testcluster.Dead(c.Scheduler), testcluster.Dead(c.Servers[0]))
	}
	answers.Store(false)
	until(t, "death of the worker", func() bool { return dead(c.Scheduler, 9) })
	until(t, "death of the scheduler", func() bool { return dead(c.Servers[0], van.SchedulerID) })
	mute.Store(false)
	until(t, "life", func() bool { return !dead(c.Scheduler, 9) && !dead(c.Servers[0], van.SchedulerID) })
}
