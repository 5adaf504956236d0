package postoffice

import (
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
)

// To connect to a peer, or to let a connection end, may take seconds. What concerns other
// peers, heartbeats above all, does not wait for it: from such an action on, a peer's
// outputs are carried out by a goroutine of their own, in order, until none is left.

// lane is what is to be done about one peer after what is being done.
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

// arrange carries an output out, or leaves that to the goroutine that does so for its
// peer. Ready waits for all connections.
func (n *Node) arrange(o membership.Output) {
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
		if r, ok := o.(membership.Rename); ok { // what is sent under the new id comes behind
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
		go n.follow(l)
	default:
		n.lanesMu.Unlock()
		n.carryOut(o)
	}
}

// settle gives what was said last, such as why start-up has failed, a short time to get
// as far as the transport.
func (n *Node) settle() {
	n.lanesMu.Lock()
	if len(n.lanes) == 0 {
		n.lanesMu.Unlock()
		return
	}
	idle := make(chan struct{})
	n.lanesIdle = append(n.lanesIdle, idle)
	n.lanesMu.Unlock()
	select {
	case <-idle:
	case <-time.After(shortLinger):
	}
}

// follow carries out what is in l until it is empty, and then what has waited for the
// last lane.
func (n *Node) follow(l *lane) {
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
