package postoffice

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

// laneTable is the lanes of the peers for which a slow output is being carried out.
type laneTable struct {
	lanesMu    sync.Mutex
	lanes      map[int]*lane
	afterLanes []membership.Output // to be carried out when lanes is empty
	lanesIdle  []chan struct{}     // closed when lanes is empty
}

// lane is the queue of a peer's outputs behind the one being carried out.
type lane struct{ outputs []membership.Output }

// peerOf is the peer that an output is about.
func peerOf(o membership.Output) (id int, ok bool) {
	switch o := o.(type) {
	case membership.Send:
		return o.To, true
	case membership.Connect:
		return o.ID, true
	case membership.Disconnect:
		return o.ID, true
	case membership.Rename:
		return o.Old, true
	case membership.PeerDead:
		return o.ID, true
	case membership.PeerAlive:
		return o.ID, true
	case membership.PeerReplaced:
		return o.ID, true
	}
	return 0, false
}

// slow tells whether an output may take long.
func slow(o membership.Output) bool {
	switch o.(type) {
	case membership.Connect, membership.Disconnect:
		return true
	}
	return false
}

// dispatch carries an output out, or queues it in its peer's lane. Ready waits until all
// lanes are empty, and so all connections made.
func (n *Node) dispatch(o membership.Output) {
	id, about := peerOf(o)
	n.lanesMu.Lock()
	l := n.lanes[id]
	_, ready := o.(membership.Ready)
	switch {
	case ready && len(n.lanes) > 0:
		n.afterLanes = append(n.afterLanes, o)
		n.lanesMu.Unlock()
	case about && l != nil:
		l.outputs = append(l.outputs, o)
		if r, ok := o.(membership.Rename); ok { // outputs with the new id must follow the Rename
			n.lanes[r.New] = l
		}
		n.lanesMu.Unlock()
	case about && slow(o):
		if n.lanes == nil {
			n.lanes = map[int]*lane{}
		}
		l = &lane{outputs: []membership.Output{o}}
		n.lanes[id] = l
		n.lanesMu.Unlock()
		go n.runLane(l)
	default:
		n.lanesMu.Unlock()
		n.carryOut(o)
	}
}

// awaitLanes waits a short time until the last outputs, such as a message with the reason
// why start-up has failed, have reached the transport.
func (t *laneTable) awaitLanes() {
	t.lanesMu.Lock()
	if len(t.lanes) == 0 {
		t.lanesMu.Unlock()
		return
	}
	idle := make(chan struct{})
	t.lanesIdle = append(t.lanesIdle, idle)
	t.lanesMu.Unlock()
	select {
	case <-idle:
	case <-time.After(shortLinger):
	}
}

// runLane carries out l's outputs until it is empty, and after the last lane the outputs
// that wait for all lanes.
func (n *Node) runLane(l *lane) {
	for {
		n.lanesMu.Lock()
		if len(l.outputs) == 0 {
			for id, x := range n.lanes {
				if x == l {
					delete(n.lanes, id)
				}
			}
			var after []membership.Output
			if len(n.lanes) == 0 {
				after, n.afterLanes = n.afterLanes, nil
				for _, idle := range n.lanesIdle {
					close(idle)
				}
				n.lanesIdle = nil
			}
			n.lanesMu.Unlock()
			for _, o := range after {
				n.carryOut(o)
			}
			return
		}
		o := l.outputs[0]
		l.outputs = l.outputs[1:]
		n.lanesMu.Unlock()
		n.carryOut(o)
	}
}
