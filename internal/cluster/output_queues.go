package cluster

import (
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
)

// The order in which outputs of the membership machine are carried out.
//
// Connecting to a peer or closing a connection may take seconds. Outputs about other
// peers, such as heartbeats, must not wait for it: from a slow output on, a peer's outputs
// are carried out by a goroutine of their own, in order, until none is left.

// outputQueues is the lanes of the peers for which a slow output is being carried out.
type outputQueues struct {
	perform func(membership.Output)
	mu      sync.Mutex
	queues  map[int]*outputQueue
	waiting []membership.Output // to be carried out when lanes is empty
	idle    []chan struct{}     // closed when lanes is empty
}

// outputQueue is the queue of a peer's outputs behind the one being carried out.
type outputQueue struct{ outputs []membership.Output }

// peerOf is the peer that an output is about, if it is about one, and whether the output may take long.
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

// dispatch carries an output out, or queues it in its peer's lane. Ready waits until all
// lanes are empty, and so all connections made.
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

// await waits, for at most limit, until the last outputs, such as a message with the reason
// why start-up has failed, have reached the transport.
func (t *outputQueues) await(limit time.Duration) {
	t.mu.Lock()
	if len(t.queues) == 0 {
		t.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	t.idle = append(t.idle, idle)
	t.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(limit):
	}
}

// run carries out l's outputs until it is empty, and after the last lane the outputs
// that wait for all lanes.
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
