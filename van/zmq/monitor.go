package zmq

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
)

// monitor watches the connections of one socket. libzmq reports their state on a
// socket pair inside the process.
type monitor struct {
	z    *zmq4.Socket // the watched socket
	sock *socket
	once sync.Once

	tries atomic.Uint64    // calls of next
	idle  func(try uint64) // called when call number try of next has found no event; it does not close m. nil: not called

	started bool
	stopped chan struct{} // closed when libzmq has freed the socket
	mu      sync.Mutex    // guards the use of sock, the pair
	closed  bool
}

// connEvents are the events of a DEALER that change the state of its connection.
const connEvents = zmq4.EVENT_CONNECTED | zmq4.EVENT_DISCONNECTED | zmq4.EVENT_HANDSHAKE_SUCCEEDED | zmq4.EVENT_CLOSED | zmq4.EVENT_MONITOR_STOPPED | handshakeFailed

// eventQueue is how many events libzmq queues for a monitor. If the queue is full, libzmq's I/O thread blocks, and all its connections
// with it. A flood of connections must therefore not fill the queue. The queue is limited because libzmq reports a lack of descriptors
// again and again, without a pause.
const eventQueue = 1 << 16

// newMonitor returns a monitor of z, a socket of ctx, the context of this van.
func (n *shared) newMonitor(ctx *zmq4.Context, z *zmq4.Socket, events zmq4.Event) (*monitor, error) {
	addr := fmt.Sprintf("inproc://monitor-%d", n.monitors.Add(1))
	// The pair is connected before the socket can be closed: an event that libzmq reports when it frees a socket waits for
	// a connected pair, and meanwhile libzmq frees no other sockets.
	pair, err := ctx.NewSocket(zmq4.PAIR)
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", socketError(err))
	}
	if err := pair.SetRcvhwm(eventQueue); err != nil {
		return nil, errors.Join(wrap("ZMQ_RCVHWM", eventQueue, err), pair.Close())
	}
	s, err := newSocket(pair, inPoller)
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	if err := z.Monitor(addr, events); err != nil {
		return nil, errors.Join(fmt.Errorf("monitor: %w", socketError(err)), s.close(0))
	}
	if err := pair.Connect(addr); err != nil { // only if the context has ended; libzmq then does not wait
		return nil, errors.Join(fmt.Errorf("monitor: %w", err), s.close(0))
	}
	return &monitor{z: z, sock: s, stopped: make(chan struct{})}, nil
}

// errRefused: an attempt to connect failed. libzmq retries.
var errRefused = fmt.Errorf("no connection could be made: %w", syscall.ECONNREFUSED)

// start follows the connection of c.
func (m *monitor) start(n *shared, c *conn) {
	if m.started {
		return
	}
	m.started = true
	broken := errDisconnected // the cause to report with the next EVENT_DISCONNECTED
	go m.follow(func(event zmq4.Event, value int) {
		switch event {
		case zmq4.EVENT_CONNECTED:
			c.connected(n, value)
		case zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq4.EVENT_HANDSHAKE_FAILED_AUTH:
			err := n.handshakeError(event, value, false)
			if err == nil {
				return
			}
			broken = err
			n.refused(van.NodeName(c.who.Load().id), c.to, err)
			if event != zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL {
				n.redial(c)
			}
		case zmq4.EVENT_DISCONNECTED:
			c.link.Store(nil)
			c.up.Store(false)
			c.lost.Store(true)
			n.tell(c, false, broken)
			broken = errDisconnected
		case zmq4.EVENT_CLOSED: // the attempt to connect failed
			n.tell(c, false, errRefused)
		case zmq4.EVENT_HANDSHAKE_SUCCEEDED:
			c.redials.Store(0)
			c.up.Store(true)
			c.lost.Store(false)
			n.tell(c, true, nil)
		}
	})
}

// follow calls took with each event and its value until m is closed. took may close m.
func (m *monitor) follow(took func(event zmq4.Event, value int)) {
	var event zmq4.Event
	var value int
	var end bool
	try := func(uintptr) bool {
		if event, value, end = m.next(); event == 0 && !end && m.idle != nil {
			m.idle(m.tries.Load())
		}
		return end || event != 0
	}
	for m.sock.wait(try) && !end && !m.sock.closed.Load() {
		took(event, value) // not inside wait
	}
}

// next returns the next event and its value; the event is 0 if there is none. end reports that m is closed or must be closed
// because the context ends: libzmq then reports no more events, and the end of the context waits until the pair is closed.
func (m *monitor) next() (event zmq4.Event, value int, end bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return 0, 0, true
	}
	m.tries.Add(1)
	event, _, value, err := m.sock.z.RecvEvent(zmq4.DONTWAIT)
	if err != nil {
		return 0, 0, zmq4.AsErrno(err) == zmq4.ETERM
	}
	if event == zmq4.EVENT_MONITOR_STOPPED {
		close(m.stopped)
	}
	return event, value, false
}

// freeTime is how long libzmq may take to free a closed socket that has nothing left to send.
const freeTime = time.Second

// end ends a started monitor after its socket was closed. It returns when libzmq has freed the socket and has closed the
// connection in the system, or after freeTime. If libzmq takes longer, the pair stays open until the socket is freed (see close) or
// the context ends. The caller may be the goroutine that runs follow, so end reads events itself.
func (m *monitor) end() {
	freed := make(chan struct{})
	go func() {
		defer close(freed)
		defer m.close()
		for pause := 50 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
			if _, _, closed := m.next(); closed {
				return
			}
			select {
			case <-m.stopped:
				return
			case <-time.After(pause):
			}
		}
	}()
	select {
	case <-freed:
	case <-time.After(freeTime):
	}
}

// close ends the monitor. It must be called before the monitored socket is closed. A running call of the watcher may
// return later than close.
func (m *monitor) close() {
	m.once.Do(func() {
		// Monitoring stops first. Otherwise libzmq's I/O thread would block forever on an event for a closed pair,
		// and with it all connections of the node.
		_ = m.z.Monitor("", 0)
		m.mu.Lock()
		m.closed = true
		m.mu.Unlock()
		_ = m.sock.close(0)
	})
}
