package processes

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/internal/real"
	"github.com/stepaf/stepaf-go/van"
)

// hello is the first bytes of a ZMTP 3.1 peer with a DEALER.
func hello() []byte {
	b := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1, 'N', 'U', 'L', 'L'}, make([]byte, 48)...)
	ready := []byte("\x05READY")
	for _, x := range [][2]string{{"Socket-Type", "DEALER"}, {"Identity", ""}} {
		ready = append(append(ready, byte(len(x[0]))), x[0]...)
		ready = append(binary.BigEndian.AppendUint32(ready, uint32(len(x[1]))), x[1]...)
	}
	return append(append(b, 4, byte(len(ready))), ready...)
}

// greet does the handshake: libzmq takes no message before its own part of it is written. No byte of that part is left unread, since the
// kernel would reset the connection when it is closed.
func greet(conn net.Conn) error {
	if _, err := conn.Write(hello()); err != nil {
		return err
	}
	var head [66]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, conn, int64(head[65]))
	return err
}

// TestEndlessMessage: an unknown peer whose message never ends loses its connection before the message costs much memory,
// and the cluster works on. Four peers do this to each node, one after the other. One of the four may send more: the peer
// and libzmq keep two processors busy, so a node on two processors may be late to end the connection.
func TestEndlessMessage(t *testing.T) {
	c := start(t, real.Options{Leg: real.TCP})
	try(t, c.Works(20, soon))
	for _, role := range []string{"scheduler", "server", "worker"} {
		p := c.Get(role, 0)
		before := p.Resident()
		late, more := 0, 0 // peers that could send more than 32 MiB, and how much more
		for i := range 4 {
			sent, err := endless(t, p)
			grown := p.Resident() - before
			t.Logf("%s, stranger %d: %d MiB sent, it has grown by %d MiB: %v", role, i, sent/mib, grown/mib, err)
			if excess := sent - 32*mib; excess > 0 {
				late, more = late+1, more+excess
			}
			if late > 1 || more > 96*mib {
				t.Errorf("%s: %d of %d strangers could send more than 32 MiB, together by %d MiB; want at most one, by at most 96",
					role, late, i+1, more/mib)
			}
			if i == 0 && grown > memory(32*mib)+more || grown > memory(64*mib)+more {
				t.Errorf("%s has grown by %d MiB with stranger %d, want at most %d with the first and %d with all", role, grown/mib, i,
					32+more/mib, 64+more/mib)
			}
		}
	}
	try(t, c.Works(20, soon))
	try(t, c.Finish(soon))
}

// endless sends a message without end until the other side hangs up, and returns how much
// that was.
func endless(t *testing.T, p *real.Process) (sent int, err error) {
	t.Helper()
	port, err := p.Port()
	try(t, err)
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	try(t, err)
	defer conn.Close()
	try(t, conn.SetDeadline(time.Now().Add(soon)))
	try(t, greet(conn))
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, conn) // until the other side has closed
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s has not ended the connection", p)
		}
		_ = conn.SetWriteDeadline(time.Now()) // it need not read the rest
		ended <- err
	}()
	frame := append(binary.BigEndian.AppendUint64([]byte{3}, mib), make([]byte, mib)...) // more, long
	for sent < 256*mib && err == nil {
		var n int
		n, err = conn.Write(frame)
		sent += n
	}
	if err == nil {
		_ = conn.Close()
	}
	return sent, errors.Join(err, <-ended)
}

// TestAddressOfAMember: an unknown process names the address of a member. Its registrations, with and without an identity, replace no
// member that is stopped for half of the heartbeat timeout (A6). Registrations and questions under another spelling of the address
// disconnect no member (A12). With a cluster secret they fail in the handshake; the log has few of them.
func TestAddressOfAMember(t *testing.T) {
	for name, env := range map[string][]string{"no secret": nil, "secret": {"STEPAF_SECRET=correct horse battery staple"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env = append(env, "PS_HEARTBEAT_INTERVAL=1", "PS_HEARTBEAT_TIMEOUT=60") // a loaded machine does not stop a process for that long
			c := start(t, real.Options{Workers: 2, Leg: real.TCP, Env: env, Loads: patient})
			try(t, c.Works(20, soon))
			scheduler, victim := c.Get("scheduler", 0), c.Get("worker", 1)
			port, err := victim.Port()
			try(t, err)
			at, err := scheduler.Port()
			try(t, err)
			identity := (&van.NodeExtension{Incarnation: 0x6666}).Encode()
			sent := [][]byte{
				registration("127.0.0.1", port, nil), registration("127.0.0.1", port, identity),
				registration("0.0.0.0", port, nil), registration("0.0.0.0", port, identity),
				control(van.Heartbeat, membership.Question(0x6666, fmt.Sprintf("0.0.0.0:%d", port), "list")),
				control(van.Heartbeat, membership.Question(0x6666, fmt.Sprintf("[::ffff:0.0.0.0]:%d", port), "list")),
			}
			try(t, victim.Stop())
			tick := time.NewTicker(250 * time.Millisecond)
			defer tick.Stop()
			tries := 0
			for range 20 { // more than two heartbeats and a second
				<-tick.C
				for _, m := range sent {
					try(t, says(at, m, len(env) == 3))
					tries++
				}
			}
			try(t, victim.Continue())
			try(t, c.Works(50, soon))
			for _, p := range c.All() {
				if s := p.State(); s.Fenced != "" || s.Ended || s.Stats.Failed > 0 {
					t.Errorf("%s: %+v", p, s)
				}
				for _, bad := range []string{"peer lost", "peer is back", "addr=tcp://0.0.0.0"} {
					if strings.Contains(p.Log(), bad) {
						t.Errorf("the log of %s has %q:\n%s", p, bad, p.Log())
					}
				}
			}
			lines := strings.Count(scheduler.Log(), "it has no cluster secret")
			if named := len(env) == 3; named != (lines > 0) || lines > 16 { // the 1st, 2nd, 4th ... with and without a known address
				t.Errorf("the log has %d lines of %d tries without the secret", lines, tries)
			}
			if len(c.All()) != 4 {
				t.Errorf("%d processes, want 4", len(c.All()))
			}
			try(t, c.Finish(soon))
		})
	}
}

// control is a control message of an unknown process, as a frame.
func control(cmd van.Command, body []byte, nodes ...van.Node) []byte {
	m := &van.Message{}
	m.Reset()
	m.Control.Cmd, m.Control.Nodes, m.Body, m.Timestamp = cmd, nodes, body, 1
	b := make([]byte, m.EncodedLen())
	_ = m.EncodeTo(b)
	return append(binary.BigEndian.AppendUint64([]byte{2}, uint64(len(b))), b...)
}

// registration is that of a worker.
func registration(host string, port int, identity []byte) []byte {
	return control(van.AddNode, nil, van.Node{Role: van.Worker, ID: van.Empty, Hostname: host, Port: port, Ports: []int32{int32(port)},
		DevTypes: []int32{0}, DevIDs: []int32{0}, AuxID: -1, Endpoint: identity})
}

// says sends a message to a port. If refused is set, it waits until the other side has ended the connection.
func says(port int, message []byte, refused bool) error {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(soon)); err != nil {
		return err
	}
	switch err := greet(conn); {
	case refused && err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case refused || err != nil:
		return fmt.Errorf("the handshake without the secret: %w", err)
	}
	_, err = conn.Write(message)
	return err
}
