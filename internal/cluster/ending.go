package cluster

// The end of programs: the notices that this node sends when its program waits in StopBarrier or Finalize, and the notices of
// workers that it has received.

import (
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
	anyWorker atomic.Bool // a worker's program has ended

	mu         sync.Mutex            // guards the fields below
	sent       int32                 // timestamp of the last message
	call       string                // the call in which this node's program waits at its end, "" if none
	waiting    int                   // number of such calls: several goroutines may wait; EndsAnyway adds 1
	stopRepeat chan struct{}         // closed to end the repeats; nil unless this is a worker that waits
	notified   chan struct{}         // closed when the first messages have been sent; nil if this is no worker that has waited
	onEnding   []*func()             // see App.OnEnding
	workers    map[int]workerMessage // the last messages of workers, by id
	watchers   []*func(id int)
}

// workerMessage describes a message of a worker about the end of its program.
type workerMessage struct {
	epoch uint32
	stamp int32
	ends  bool // false: the program continues
}

// begin records that this node's program waits in call. It returns the functions to be called, and whether the
// program was not waiting before.
func (e *programEnds) begin(call string) (begins []*func(), first bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	first = e.call == ""
	e.call = call
	e.waiting++
	return e.onEnding, first
}

// waitsIn returns the call in which this node's program waits, "" if none.
func (e *programEnds) waitsIn() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.call
}

// next returns the timestamp and the Head of the next message.
func (e *programEnds) next() (stamp, head int32) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sent++
	if e.call == "" {
		return e.sent, headContinues
	}
	return e.sent, headEnds
}

// concerns reports whether server id, which was lost and is back, may lack a message of this worker.
func (e *programEnds) concerns(id int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sent > 0 && van.RoleOf(id) == van.Server
}

// workerEnded records a message of a worker, unless a later one has arrived before.
func (e *programEnds) workerEnded(msg *van.Message) {
	e.mu.Lock()
	if last, ok := e.workers[msg.Sender]; ok && last.epoch == msg.ProcessEpoch && msg.Timestamp <= last.stamp {
		e.mu.Unlock()
		return
	}
	e.workers[msg.Sender] = workerMessage{msg.ProcessEpoch, msg.Timestamp, msg.Head == headEnds}
	if msg.Head == headEnds {
		e.anyWorker.Store(true)
	}
	watchers := e.watchers
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
		if msg.Request && van.RoleOf(msg.Sender) == van.Worker && n.App().Native(msg.Sender) {
			n.ending.workerEnded(msg)
		}
	})
	return err
}

// startEnding records that this node's program waits in call. It refuses requests from then on, calls the functions
// of OnEnding, and, on a worker, notifies the servers.
func (n *Node) startEnding(call string) {
	begins, first := n.ending.begin(call)
	n.apps.refuseNew(n.ending.waitsIn)
	if !first {
		return
	}
	for _, f := range begins {
		(*f)()
	}
	if n.role == van.Worker {
		told, notified := make(chan struct{}), make(chan struct{})
		n.ending.mu.Lock()
		n.ending.stopRepeat, n.ending.notified = told, notified
		n.ending.mu.Unlock()
		go n.repeatEnding(told, notified)
	}
}

// awaitNotices waits until the first messages to the servers have been sent, if the program's wait has ended with an error: the node may
// leave next.
func (e *programEnds) awaitNotices(err error) {
	e.mu.Lock()
	notified := e.notified
	e.mu.Unlock()
	if err == nil || notified == nil {
		return
	}
	select {
	case <-notified:
	case <-time.After(lingerTime):
	}
}

// stopEnding records that a StopBarrier has ended with err; if err is nil, Finalize follows. If err is not nil, the
// program continues unless another call waits, the node cannot be used, or it is being closed.
func (n *Node) stopEnding(err error) {
	e := &n.ending
	e.mu.Lock()
	e.waiting--
	fails := err != nil && e.waiting == 0
	continues := fails && n.lifetime.Alive() == nil && !n.lifetime.isClosing()
	if fails {
		e.stopRepeating()
	}
	if continues {
		e.call = ""
	}
	e.mu.Unlock()
	if continues {
		n.apps.refuseNew(n.ending.waitsIn) // another call may have begun
		if n.role == van.Worker {
			n.notifyServers(n.App().Members(van.ServerGroup)) // before the program sends requests
		}
	}
}

// stopRepeating ends the goroutine of repeatEnding, if it runs. mu is held.
func (e *programEnds) stopRepeating() {
	if e.stopRepeat != nil {
		close(e.stopRepeat)
		e.stopRepeat = nil
	}
}

// repeatEnding notifies the servers, closes notified, and repeats the messages until told is closed.
func (n *Node) repeatEnding(told <-chan struct{}, notified chan<- struct{}) {
	n.notifyServers(n.App().Members(van.ServerGroup))
	close(notified)
	for pause := endingRepeat; ; pause = min(2*pause, maxEndingRepeat) {
		select {
		case <-time.After(pause):
			n.notifyServers(n.App().Members(van.ServerGroup))
		case <-told:
			return
		case <-n.lifetime.stop:
			return
		}
	}
}

// notifyServers notifies the servers with these ids, if they are of this library, whether this program ends. It may wait some
// seconds for the first connection to each of them. A lost server is notified when it is back. If another message cannot be sent,
// that is only logged; repeatEnding notifies all servers again while the program waits.
func (n *Node) notifyServers(ids []int) {
	a := n.App()
	for _, id := range ids {
		if !a.Native(id) || n.processes.lost(id) != nil {
			continue
		}
		msg := &van.Message{}
		msg.Reset()
		msg.Receiver = id
		msg.Request, msg.SimpleApp = true, true
		msg.AppID, msg.CustomerID = endingApp, endingApp
		msg.Timestamp, msg.Head = n.ending.next()
		if err := a.Send(msg); err != nil {
			n.log.Debug("could not notify a server whether this worker's program ends", "ends", msg.Head == headEnds, "server", n.peerName(id), "err", err)
		}
	}
}

// OnEnding makes the node call f when its program begins to wait in StopBarrier or Finalize. f then refuses the
// requests that will not be answered. f must not block. The returned function removes f.
func (a App) OnEnding(f func()) (stop func()) {
	return addFunc(&a.ending.mu, &a.ending.onEnding, f)
}

// EndsAnyway records that the program of this node ends also if its StopBarrier fails. Call it before StopBarrier. The
// servers of a worker are then not notified that it continues.
func (a App) EndsAnyway() {
	a.ending.mu.Lock()
	defer a.ending.mu.Unlock()
	a.ending.waiting++
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
	last := e.workers[worker]
	return last.ends && last.epoch == a.processes.of(worker).epoch
}

// OnEnded makes the node call f when HasEnded may have changed for the worker with that id. f must not block. The
// returned function removes f.
func (a App) OnEnded(f func(worker int)) (stop func()) {
	return addFunc(&a.ending.mu, &a.ending.watchers, f)
}
