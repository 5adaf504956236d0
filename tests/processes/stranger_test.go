package processes

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/real"
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
	_, err = conn.Write(hello())
	try(t, err)
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
