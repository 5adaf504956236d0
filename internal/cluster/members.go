package cluster

// The changes on a node when a process takes an id, is lost, or is back.

import (
	"sync"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// members updates the table of processes from the outputs of the membership machine.
type members struct {
	self      *nodeInfo
	processes *processes
	pending   *pendingMessages
	tempNodes map[int]van.Node // records of nodes with temporary ids
}

// updateProcesses updates the table before the outputs are performed, so that no message of a replaced process counts
// as one of its replacement. scheduler is the scheduler's incarnation, 0 if it is not known. control.mu is held.
func (m *members) updateProcesses(outs []membership.Output, scheduler uint32) {
	if scheduler != 0 && m.self.role != van.Scheduler && scheduler != m.processes.of(van.SchedulerID).incarnation {
		m.pending.setProcess(van.SchedulerID, scheduler, false)
		m.pending.deliverPending(van.SchedulerID) // this node connected to the scheduler before it learned the incarnation
	}
	for _, o := range outs {
		if o, ok := o.(membership.PeerReplaced); ok {
			m.setProcess(o.ID, &o.Node, true)
		}
	}
	for _, o := range outs {
		switch o := o.(type) {
		case membership.Connect:
			if o.ID > 0 {
				m.setProcess(o.ID, &o.Node, false)
			} else {
				m.tempNodes[o.ID] = o.Node
			}
		case membership.Rename:
			if record, ok := m.tempNodes[o.Old]; ok {
				m.setProcess(o.New, &record, false)
			}
			delete(m.tempNodes, o.Old)
		case membership.Disconnect:
			delete(m.tempNodes, o.ID)
		}
	}
}

// setProcess enters the record of id.
func (m *members) setProcess(id int, record *van.Node, replaced bool) {
	if id == van.SchedulerID {
		return // its record is made from the environment; updateProcesses gets its incarnation from the machine
	}
	who, _ := record.Extension()
	m.pending.setProcess(id, who.Incarnation, replaced)
}

// updateLosses updates the table of lost peers before the outputs are performed, so that it always agrees with
// DeadNodes. control.mu is held.
func (m *members) updateLosses(outs []membership.Output) {
	for _, o := range outs {
		switch o := o.(type) {
		case membership.PeerDead:
			m.processes.setLost(o.ID, o.Cause)
		case membership.PeerAlive:
			m.processes.setLost(o.ID, nil)
		} // PeerReplaced clears it when carried out: nothing can be sent before Connect
	}
}

// watchers are functions that are called when a peer is lost or back.
type watchers struct {
	mu   sync.Mutex
	list []*func(id int, up bool, cause error)
}

// add adds a function; see Node.OnPeer.
func (ws *watchers) add(f func(id int, up bool, cause error)) (stop func()) {
	return addFunc(&ws.mu, &ws.list, f)
}

func (ws *watchers) notify(id int, up bool, cause error) {
	ws.mu.Lock()
	list := ws.list
	ws.mu.Unlock()
	for _, w := range list {
		(*w)(id, up, cause)
	}
}
