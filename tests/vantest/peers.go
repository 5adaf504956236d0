package vantest

// Tests of peers that are renamed, disconnected, replaced, restarted or closed.

import (
	"errors"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// connectRenamed connects worker and scheduler, which gives it its id only then.
func connectRenamed(scheduler, worker *node) {
	worker.w.Helper()
	worker.connect(scheduler)
	scheduler.connectAs(-1, worker)
	if err := scheduler.Rename(-1, 9); err != nil {
		worker.w.Fatalf("Rename: %v", err)
	}
	scheduler.must(control(van.Heartbeat, 9, 0))
	worker.expect(1, 1)
}

func rename(w *world) {
	scheduler, worker := w.node(1, nil), w.node(9, nil)
	connectRenamed(scheduler, worker)
	if err := scheduler.Send(control(van.Heartbeat, -1, 1)); !errors.Is(err, van.ErrUnknownPeer) {
		w.Errorf("Send to the old name: %v, want %v", err, van.ErrUnknownPeer)
	}
	if err := scheduler.Rename(9, 9); err != nil {
		w.Errorf("Rename to the same name: %v", err)
	}
	scheduler.must(control(van.Heartbeat, 9, 1))
	if r := worker.next(); r.meta.Timestamp != 1 {
		w.Errorf("timestamp %d, want 1", r.meta.Timestamp)
	}
}

func disconnect(w *world) {
	worker, server := w.pair()
	const n = 20
	for i := range n {
		worker.must(data(8, i, true))
	}
	server.expect(9, n) // also those in flight arrive
	worker.Disconnect(8)
	worker.Disconnect(8)
	if err := worker.Send(data(8, n, true)); !errors.Is(err, van.ErrUnknownPeer) {
		w.Errorf("Send after Disconnect: %v, want %v", err, van.ErrUnknownPeer)
	}
	worker.connect(server)
	worker.must(data(8, n, true))
	if r := server.next(); int(r.meta.Timestamp) != n {
		w.Errorf("timestamp %d, want %d", r.meta.Timestamp, n)
	}
}

// farewell: a message that is sent directly before Disconnect, while the connection is still being made,
// arrives. A scheduler refuses a node with such a message.
func farewell(w *world) {
	scheduler, worker := w.node(1, nil), w.node(9, nil)
	for i := range 5 {
		temp := -1 - i
		scheduler.connectAs(temp, worker)
		scheduler.must(control(van.Heartbeat, temp, i))
		scheduler.Disconnect(temp)
		if r := worker.next(); int(r.meta.Timestamp) != i {
			w.Fatalf("timestamp %d, want %d", r.meta.Timestamp, i)
		}
	}
}

// replace lets another node take over an id while the first one still runs.
func replace(w *world) {
	worker, first, second := w.node(9, nil), w.node(8, nil), w.node(8, nil)
	link(worker, first)
	worker.must(data(8, 0, true))
	first.expect(9, 1)
	link(worker, second)
	if a, ok := van.As[van.Admitter](worker.Van); ok {
		a.Admit(8) // as a node does
	}
	worker.must(data(8, 0, true))
	second.expect(9, 1)
	second.must(data(9, 0, false))
	if r := worker.next(); r.sender != 8 {
		w.Errorf("message from %d, want 8", r.sender)
	}
	select {
	case r := <-first.in:
		w.Errorf("the replaced node received %v", &r.meta)
	default:
	}
}

// restart starts a node at the address of a closed one.
func restart(w *world) {
	worker, first := w.node(9, nil), w.make(8)
	first.self.Port, first.knowsID = w.freePort(), true
	first.bind(nil)
	link(worker, first)
	worker.must(data(8, 0, true))
	first.expect(9, 1)
	first.close()

	second := w.make(8)
	second.self.Port, second.knowsID = first.self.Port, true
	for end := time.Now().Add(Limit); ; {
		err := second.tryBind()
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			w.Fatalf("Bind to the port of a closed van: %v", err)
		}
		time.Sleep(10 * time.Millisecond) // the system frees the port when it likes
	}
	second.start(nil)
	link(worker, second)
	worker.must(data(8, 0, true))
	second.expect(9, 1)
}

// peerEvent is a van's report about a peer.
type peerEvent struct {
	id    int
	up    bool
	cause error
}

// watcher is node, and returns what the node's van says of its peers too, nil if it says nothing.
func (w *world) watcher(id int) (n *node, events chan peerEvent) {
	w.Helper()
	n = w.make(id)
	if v, watches := van.As[van.PeerWatcher](n.Van); watches { // WatchPeers is called before the van is bound
		events = make(chan peerEvent, 64)
		v.WatchPeers(func(id int, up bool, cause error) {
			select {
			case events <- peerEvent{id, up, cause}:
			default:
			}
		})
	}
	n.knowsID = true
	n.bind(nil)
	return n, events
}

// expectDown waits until peer id, and no other, is said to be down.
func (w *world) expectDown(events chan peerEvent, id int) {
	w.Helper()
	for limit := time.After(Limit); events != nil; {
		select {
		case ev := <-events:
			switch {
			case ev.up: // it stood before
				continue
			case ev.id != id:
				w.Fatalf("node %d is reported as down: %v", ev.id, ev.cause)
			case ev.cause == nil:
				w.Error("no cause given")
			}
			return
		case <-limit:
			w.Fatalf("the end of node %d was not noticed within %s", id, Limit)
		}
	}
}

// renamedCloses: the end of a peer that was connected to under another name is noticed under its new one.
func renamedCloses(w *world) {
	scheduler, events := w.watcher(1)
	worker := w.node(9, nil)
	connectRenamed(scheduler, worker)
	worker.close()
	w.expectDown(events, 9)
}

func peerCloses(w *world) {
	worker, events := w.watcher(9)
	server, other := w.node(8, nil), w.node(10, nil)
	link(worker, server)
	link(worker, other)
	worker.must(data(8, 0, true))
	server.expect(9, 1)
	server.close()
	w.expectDown(events, 8)
	for i := range 100 {
		err := worker.Send(data(8, i+1, true, make([]byte, 8), make([]byte, 100)))
		if err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrQueueFull) {
			w.Fatalf("Send to a node that has gone: %v, want success, %v, or %v", err, van.ErrPeerLost, van.ErrQueueFull)
		}
	}
	worker.Disconnect(8)
	worker.must(data(10, 0, true))
	other.expect(9, 1)
}
