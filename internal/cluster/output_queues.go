package cluster

import (
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
)

// The order in which outputs of the membership machine are performed.
//
// Connecting to a peer or closing a connection may take seconds. Outputs about other peers, such as heartbeats, must
// not wait for it. From a slow output on, a peer's outputs are performed in order by a goroutine of their own, until
// none is left.

// outputQueues has the output queues of the peers for which a slow output is performed.
type outputQueues struct {
	perform func(membership.Output)
	mu      sync.Mutex
	queues  map[int]*outputQueue
	waiting []membership.Output // to be performed when queues is empty
	idle    []chan struct{}     // closed when queues is empty
}

// outputQueue has a peer's outputs that follow the one being performed.
type outputQueue struct{ outputs []membership.Output }

// peerOf returns the peer that an output is about, if any, and whether the output may take long.
func peerOf(o membership.Output) (id int, about, slow bool) {
	switch o := o.(type) {
	case membership.Send:
		return o.To, true, false
	case membership.Connect:
		return o.ID, true, true
	case membership.Disconnect:
		return o.ID, true, true
	case membership.Rename:
		return o.Old, true, false
	case membership.PeerDead:
		return o.ID, true, false
	case membership.PeerAlive:
		return o.ID, true, false
	case membership.PeerReplaced:
		return o.ID, true, false
	}
	return 0, false, false
}

// dispatch performs an output, or appends it to its peer's queue. Ready waits until all queues are empty, and so all
// connections made.
func (t *outputQueues) dispatch(o membership.Output) {
	id, about, slow := peerOf(o)
	t.mu.Lock()
	l := t.queues[id]
	_, ready := o.(membership.Ready)
	switch {
	case ready && len(t.queues) > 0:
		t.waiting = append(t.waiting, o)
		t.mu.Unlock()
	case about && l != nil:
		l.outputs = append(l.outputs, o)
		if r, ok := o.(membership.Rename); ok { // outputs with the new id must follow the Rename
			t.queues[r.New] = l
		}
		t.mu.Unlock()
	case slow:
		if t.queues == nil {
			t.queues = map[int]*outputQueue{}
		}
		l = &outputQueue{outputs: []membership.Output{o}}
		t.queues[id] = l
		t.mu.Unlock()
		go t.run(l)
	default:
		t.mu.Unlock()
		t.perform(o)
	}
}

// await waits, for about limit at most, until the last outputs, such as a message with the reason why start-up has failed,
// have reached the transport. It waits for ten timers: if the process
// gets no processor for a while, only one of them expires.
func (t *outputQueues) await(limit time.Duration) {
	t.mu.Lock()
	if len(t.queues) == 0 {
		t.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	t.idle = append(t.idle, idle)
	t.mu.Unlock()
	const parts = 10
	for range parts {
		select {
		case <-idle:
			return
		case <-time.After(limit / parts):
		}
	}
}

// run performs q's outputs until it is empty, and after the last queue the outputs that wait for all queues.
func (t *outputQueues) run(l *outputQueue) {
	for {
		t.mu.Lock()
		if len(l.outputs) == 0 {
			for id, x := range t.queues {
				if x == l {
					delete(t.queues, id)
				}
			}
			var after []membership.Output
			if len(t.queues) == 0 {
				after, t.waiting = t.waiting, nil
				for _, idle := range t.idle {
					close(idle)
				}
				t.idle = nil
			}
			t.mu.Unlock()
			for _, o := range after {
				t.perform(o)
			}
			return
		}
		o := l.outputs[0]
		l.outputs = l.outputs[1:]
		t.mu.Unlock()
		t.perform(o)
	}
}
