package zmq

import (
	"fmt"
	"sync"
	"syscall"

	zmq4 "github.com/pebbe/zmq4"
)

// monitor watches the connection of one DEALER: libzmq reports its state on a
// socket pair inside the process.
type monitor struct {
	z    *zmq4.Socket // the DEALER
	pair *zmq4.Socket
	sock *socket
	once sync.Once
	end  chan struct{}
}

func newMonitor(ctx *zmq4.Context, z *zmq4.Socket, serial int) (*monitor, error) {
	addr := fmt.Sprintf("inproc://monitor-%d", serial)
	if err := z.Monitor(addr, zmq4.EVENT_DISCONNECTED|zmq4.EVENT_HANDSHAKE_SUCCEEDED|zmq4.EVENT_CLOSED); err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	pair, err := ctx.NewSocket(zmq4.PAIR)
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	if err := pair.Connect(addr); err != nil {
		_ = pair.Close()
		return nil, fmt.Errorf("monitor: %w", err)
	}
	s, err := newSocket(pair, false)
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	return &monitor{z: z, pair: pair, sock: s}, nil
}

// errRefused: an attempt to connect failed. libzmq tries again.
var errRefused = fmt.Errorf("no connection could be made: %w", syscall.ECONNREFUSED)

// tell reports a change of c's connection to the watcher.
func (v *zvan) tell(c *conn, up bool, cause error) {
	if v.watch != nil {
		v.watch(c.who.Load().id, up, cause)
	}
}

// start follows the connection of c.
func (m *monitor) start(v *zvan, c *conn) {
	if m.end != nil {
		return
	}
	m.end = make(chan struct{})
	try := func(uintptr) bool {
		for {
			event, _, _, err := m.pair.RecvEvent(zmq4.DONTWAIT)
			if err != nil {
				return m.sock.closed.Load()
			}
			if m.sock.closed.Load() {
				return true
			}
			switch event {
			case zmq4.EVENT_DISCONNECTED:
				c.lost.Store(true)
				v.tell(c, false, errDisconnected)
			case zmq4.EVENT_CLOSED: // before it was a connection
				v.tell(c, false, errRefused)
			case zmq4.EVENT_HANDSHAKE_SUCCEEDED:
				c.lost.Store(false)
				v.tell(c, true, nil)
			}
		}
	}
	go func() {
		defer close(m.end)
		for m.sock.wait(try) {
			if m.sock.closed.Load() {
				return
			}
		}
	}()
}

// close ends the monitor, before its DEALER is closed. A watcher call that is under way may outlast it when it
// is that call that closes.
func (m *monitor) close() {
	m.once.Do(func() {
		// libzmq's I/O thread would wait for ever to report to a pair that is closed,
		// and no connection of the node would get on.
		_ = m.z.Monitor("", 0)
		m.sock.stop()
		if m.end == nil {
			_ = m.sock.close(0)
			return
		}
		go func() {
			<-m.end
			_ = m.sock.close(0)
		}()
	})
}
