package cluster

// The end of programs: the notices that this node sends when its program waits in StopBarrier or Finalize, and the notices of
// workers that it has received.

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// endingApp is the application id of the messages that a worker sends to servers of this library when its program ends.
// They are data, not control messages: a server receives them after all requests that the worker has sent before.
const endingApp = 0x5ED0000

// Values of Head in such a message.
const (
	headContinues = 0 // StopBarrier has failed, and the program continues
	headEnds      = 1
)

// A worker repeats the message as long as it waits, since a message may be lost with a connection, and a server may be replaced.
const (
	endingRepeat    = time.Second // the pause after the first message; each pause is twice the one before
	maxEndingRepeat = 8 * time.Second
)

// programEnds has the ends of programs that a node knows of.
type programEnds struct {
	sent      atomic.Int32 // timestamp of the last message
	anyWorker atomic.Bool  // a worker's program has ended

	mu         sync.Mutex     // guards the fields below
	call       string         // the call in which this node's program waits at its end, "" if none
	stopRepeat chan struct{}  // closed to end the repeats; nil unless this is a worker that waits
	onEnding   []*func()      // see App.OnEnding
	workers    map[int]uint32 // epochs of the workers whose programs end, by id
	watchers   []*func(id int)
}

// begin records that this node's program waits in call. It returns the functions to be called, and whether the
// program was not waiting before.
func (e *programEnds) begin(call string) (begins []*func(), first bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	first = e.call == ""
	e.call = call
	return slices.Clone(e.onEnding), first
}

// workerEnded records a message of a worker.
func (e *programEnds) workerEnded(msg *van.Message) {
	e.mu.Lock()
	if msg.Head == headEnds {
		e.anyWorker.Store(true)
		e.workers[msg.Sender] = msg.ProcessEpoch
	} else {
		delete(e.workers, msg.Sender)
	}
	watchers := slices.Clone(e.watchers)
	e.mu.Unlock()
	for _, f := range watchers {
		(*f)(msg.Sender)
	}
}

// watchEnds registers, on a server, the receiver of the messages of workers whose programs end.
func (n *Node) watchEnds() error {
	if n.role != van.Server {
		return nil
	}
	_, err := n.App().AddCustomer(endingApp, endingApp, func(msg *van.Message) {
		if msg.Request && van.RoleOf(msg.Sender) == van.Worker {
			n.ending.workerEnded(msg)
		}
	})
	return err
}

// startEnding records that this node's program waits in call. It refuses requests from then on, calls the functions
// of OnEnding, and, on a worker, notifies the servers.
func (n *Node) startEnding(call string) {
	begins, first := n.ending.begin(call)
	n.apps.refuseNew(call)
	if !first {
		return
	}
	for _, f := range begins {
		(*f)()
	}
	if n.role == van.Worker {
		told := make(chan struct{})
		n.ending.mu.Lock()
		n.ending.stopRepeat = told
		n.ending.mu.Unlock()
		n.notifyServers(headEnds)
		go n.repeatEnding(told)
	}
}

// stopEnding records that the program no longer waits. If err is not nil and the node can be used and is not being
// closed, the program continues.
func (n *Node) stopEnding(err error) {
	n.ending.mu.Lock()
	told, call := n.ending.stopRepeat, n.ending.call
	continues := call != "" && err != nil && n.lifetime.Alive() == nil && !n.lifetime.isClosing()
	if continues {
		n.ending.call = ""
	}
	if err != nil || n.lifetime.Alive() != nil {
		n.ending.stopRepeat = nil
	} else {
		told = nil // Finalize follows
	}
	n.ending.mu.Unlock()
	if told != nil {
		close(told)
	}
	if continues {
		n.apps.refuseNew("")
		if n.role == van.Worker {
			n.notifyServers(headContinues)
		}
	}
}

func (n *Node) repeatEnding(told <-chan struct{}) {
	for pause := endingRepeat; ; pause = min(2*pause, maxEndingRepeat) {
		select {
		case <-time.After(pause):
			n.notifyServers(headEnds)
		case <-told:
			return
		case <-n.lifetime.stop:
			return
		}
	}
}

// notifyServers sends a message to all servers of this library. repeatEnding also repeats a message that could not be
// sent.
func (n *Node) notifyServers(head int32) {
	a := n.App()
	for _, id := range a.Members(van.ServerGroup) {
		if !a.Native(id) || n.processes.lost(id) != nil {
			continue
		}
		msg := &van.Message{}
		msg.Reset()
		msg.Receiver = id
		msg.Request, msg.SimpleApp, msg.Head = true, true, head
		msg.AppID, msg.CustomerID, msg.Timestamp = endingApp, endingApp, n.ending.sent.Add(1)
		if err := a.Send(msg); err != nil {
			n.log.Debug("could not notify a server that this worker's program ends", "server", n.peerName(id), "err", err)
		}
	}
}

// OnEnding makes the node call f when its program begins to wait in StopBarrier or Finalize. f then refuses the
// requests that will not be answered. f must not block. The returned function removes f.
func (a App) OnEnding(f func()) (stop func()) {
	e := &a.ending
	e.mu.Lock()
	defer e.mu.Unlock()
	at := &f
	e.onEnding = append(e.onEnding, at)
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.onEnding = slices.DeleteFunc(e.onEnding, func(x *func()) bool { return x == at })
	}
}

// HasEnded reports whether the program of the worker with that id has ended: it waits in StopBarrier or Finalize, or
// did so before it was lost. All earlier requests of the worker have been received. Only workers of this library
// report their end.
func (a App) HasEnded(worker int) bool {
	e := &a.ending
	if !e.anyWorker.Load() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	epoch, ended := e.workers[worker]
	return ended && epoch == a.processes.of(worker).epoch
}

// OnEnded makes the node call f when HasEnded may have changed for the worker with that id. f must not block. The
// returned function removes f.
func (a App) OnEnded(f func(worker int)) (stop func()) {
	e := &a.ending
	e.mu.Lock()
	defer e.mu.Unlock()
	at := &f
	e.watchers = append(e.watchers, at)
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.watchers = slices.DeleteFunc(e.watchers, func(x *func(int)) bool { return x == at })
	}
}
