package cluster

// What a node notes and does when a process takes an id, is lost, or is back.

import (
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// members keeps the table of processes as the membership machine says.
type members struct {
	self      *identity
	processes *processes
	strangers *strangers
	unnamed   map[int]van.Node // records of nodes with temporary ids
}

// noteProcesses updates the table before the outputs are carried out, so that no message
// of a replaced process counts as its successor's. scheduler is the scheduler's incarnation,
// 0 if it is not known. control.mu is held.
func (m *members) noteProcesses(outs []membership.Output, scheduler uint32) {
	if scheduler != 0 && m.self.role != van.Scheduler && scheduler != m.processes.of(van.SchedulerID).incarnation {
		m.strangers.note(van.SchedulerID, scheduler, false)
	}
	for _, o := range outs {
		if o, ok := o.(membership.PeerReplaced); ok {
			m.noteProcess(o.ID, &o.Node, true)
		}
	}
	for _, o := range outs {
		switch o := o.(type) {
		case membership.Connect:
			if o.ID > 0 {
				m.noteProcess(o.ID, &o.Node, false)
			} else {
				m.unnamed[o.ID] = o.Node
			}
		case membership.Rename:
			if record, ok := m.unnamed[o.Old]; ok {
				m.noteProcess(o.New, &record, false)
			}
			delete(m.unnamed, o.Old)
		case membership.Disconnect:
			delete(m.unnamed, o.ID)
		}
	}
}

// noteProcess notes the record of id.
func (m *members) noteProcess(id int, record *van.Node, replaced bool) {
	if id == van.SchedulerID {
		return // its record is made from the environment; noteProcesses gets its incarnation from the machine
	}
	who, _ := record.Extension()
	m.strangers.note(id, who.Incarnation, replaced)
}

// noteLosses updates the table of lost peers before the outputs are carried out, so that
// it always agrees with DeadNodes. control.mu is held.
func (m *members) noteLosses(outs []membership.Output) {
	for _, o := range outs {
		switch o := o.(type) {
		case membership.PeerDead:
			m.processes.setLost(o.ID, o.Cause)
		case membership.PeerAlive:
			m.processes.setLost(o.ID, nil)
		} // PeerReplaced clears it when carried out: nothing can be sent before Connect
	}
}

// watchers are told when a peer is lost or back.
type watchers struct {
	watchMu sync.Mutex
	list    []*watcher
}

type watcher func(id int, up bool, cause error)

// OnPeer makes the node call f when a peer is lost (up false, with the cause) and when
// it or its replacement is back (up true). f must not block, but may close the node. The
// returned function removes f.
func (n *watchers) OnPeer(f func(id int, up bool, cause error)) (stop func()) {
	w := (*watcher)(&f)
	n.watchMu.Lock()
	defer n.watchMu.Unlock()
	n.list = append(slices.Clone(n.list), w)
	return func() {
		n.watchMu.Lock()
		defer n.watchMu.Unlock()
		n.list = slices.DeleteFunc(slices.Clone(n.list), func(x *watcher) bool { return x == w })
	}
}

func (n *watchers) notify(id int, up bool, cause error) {
	n.watchMu.Lock()
	list := n.list
	n.watchMu.Unlock()
	for _, w := range list {
		(*w)(id, up, cause)
	}
}
