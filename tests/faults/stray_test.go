package faults

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// greeting is that of ZMTP 3.1 with the NULL mechanism.
var greeting = append(append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1, 'N', 'U', 'L', 'L'}, make([]byte, 16)...), make([]byte, 32)...)

// TestStray throws garbage at every port of a cluster that works: plain bytes,
// broken ZMTP, and messages of it with random or nearly right frames.
func TestStray(t *testing.T) {
	const seed = 20240607
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Servers: 2})
	serveAll(t, c)
	w := nodetest.Worker(t, c.Workers[0])
	work(t, 2, w)
	stop := nodetest.Repeat(t, "meanwhile", func(i int) error { return roundTrip(t.Context(), w, 2, fmt.Append(nil, i)) })

	var wg sync.WaitGroup
	for i, n := range c.Nodes() {
		port, r := portOf(t, c, n), rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			for k := range 30 {
				b := make([]byte, r.IntN(2000))
				fill(r, b)
				if k%2 == 1 {
					b = append(append([]byte(nil), greeting...), b...)
				}
				throw(t, port, b)
			}
			messages(t, port, r)
		})
	}
	wg.Wait()
	// Each node has met nonsense, and said so.
	for _, n := range c.Nodes() {
		vantest.Eventually(t, 20*time.Second, n.Name()+" notices 10 malformed messages", func() bool { return testcluster.Stats(n).Malformed >= 10 })
	}
	stop()
	work(t, 2, w)
	if dead := testcluster.Dead(c.Scheduler); len(dead) > 0 {
		t.Errorf("dead nodes are %v, want none", dead)
	}
	nodetest.Together(t, c.Nodes(), func(n *postoffice.Node) error {
		return n.InstanceBarrier(nodetest.Within(t, 20*time.Second), 0, van.AllNodes)
	})
	c.Finalize(t)
}

func fill(r *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// throw writes b to a port. The other side may hang up meanwhile.
func throw(t testing.TB, port int, b []byte) {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	_, _ = conn.Write(b)
	_ = conn.(*net.TCPConn).CloseWrite()
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, _ = io.Copy(io.Discard, conn)
}

// messages sends messages from nodes without id and from ids that do not exist.
func messages(t testing.TB, port int, r *rand.Rand) {
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = ctx.Term() }()
	for _, id := range []string{"", "stray", "ps", "ps0", "ps99999999", "ps4321", "ps32767"} {
		s, err := ctx.NewSocket(zmq4.DEALER)
		if err != nil {
			t.Error(err)
			return
		}
		_ = s.SetLinger(10 * time.Second)
		if id != "" {
			_ = s.SetIdentity(id)
		}
		if err := s.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", port)); err != nil {
			t.Error(err)
		}
		for k := range 100 {
			frames := nearly(r)
			if k%2 == 0 {
				frames = make([][]byte, 1+r.IntN(6))
				for i := range frames {
					frames[i] = make([]byte, r.IntN(600))
					fill(r, frames[i])
				}
			}
			if _, err := s.SendMessage(frames); err != nil {
				t.Error(err)
			}
		}
		_ = s.Close()
	}
}

// nearly is a message of the protocol in which some bytes are others.
func nearly(r *rand.Rand) [][]byte {
	m := pushMessage(8, int32(r.IntN(100)), int32(r.IntN(4)), 1, []byte("x"))
	switch r.IntN(4) {
	case 0:
		m.Push = false
	case 1:
		m.Request = false
	case 2:
		m.Frames, m.DataTypes = 0, nil
		m.Control.Cmd = van.Command(r.IntN(10))
		if m.Control.Cmd != van.EmptyCmd {
			m.Control.Nodes = []van.Node{{Role: van.Worker, ID: 9, Hostname: "127.0.0.1", Port: 1, Ports: []int32{1}, AuxID: 0}}
		}
	}
	meta, err := m.AppendTo(nil)
	if err != nil {
		meta = []byte(err.Error())
	}
	for range r.IntN(8) {
		meta[r.IntN(len(meta))] = byte(r.Uint32())
	}
	frames := [][]byte{meta}
	for i := range m.Frames {
		frames = append(frames, m.Frame(i).Host())
	}
	return frames
}

// TestStrayRequests: requests that are well-formed and make no sense are dropped
// with a line that says why, and do not disturb the batches of others.
func TestStrayRequests(t *testing.T) {
	l := &nodetest.Text{}
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Log: l.Logger(slog.LevelDebug)})
	serveAll(t, c)
	w := nodetest.Worker(t, c.Workers[0])
	work(t, 1, w)
	for _, x := range []struct {
		change func(m *van.Message)
		text   string
	}{
		{func(m *van.Message) { m.Head = van.BatchMiddle }, "the middle of a batch, at timestamp 50, continues none of the 0 open batches"},
		{func(m *van.Message) { m.Head = van.BatchEnd }, "the end of a batch, at timestamp 50,"},
		{func(m *van.Message) { m.Head = 7 }, "batch flag 7, want 0 (single), 1 (start), 2 (middle) or 3 (end)"},
		{func(m *van.Message) { m.Head = -1 }, "batch flag -1, want 0 (single)"},
		{func(m *van.Message) { m.Keys = m.Keys.Sub(0, 7) }, "7 key bytes, want 2 and 8"},
		{func(m *van.Message) { m.Frames = 0 }, "0 data frames"},
		{func(m *van.Message) { m.SimpleApp = true }, "tensor request"},
		{func(m *van.Message) { m.Shape[0] = 1 << 40 }, "exceeds the maximum of 2147483647 bytes"},
		{func(m *van.Message) { m.Shape[0] = 2 }, "does not match the 1 received bytes"},
		{func(m *van.Message) { m.Dtype = 99 }, "dtype code 99"},
		{func(m *van.Message) { m.Push = false; m.ValLen = 3 }, "is not the announced 3 bytes"},
	} {
		m := pushMessage(int(c.Servers[0].ID()), 50, van.Single, 1, []byte("x"))
		x.change(m)
		if err := (*cluster.Node)(c.Workers[1]).App().Send(m); err != nil {
			t.Fatalf("%s: %v", x.text, err)
		}
		level := "level=WARN"
		if strings.Contains(x.text, "at timestamp 50") { // like the rest of a canceled request
			level = "level=INFO"
		}
		l.Wait(t, level, "rank=0 id=8", "dropped a request", x.text, "worker 1 (id 11) at 127.0.0.1:")
		work(t, 1, w)
	}
	// The sender of all these messages is served as well.
	work(t, 1, nodetest.Worker(t, c.Workers[1]))
	// A worker serves no requests.
	if err := (*cluster.Node)(c.Servers[0]).App().Send(pushMessage(int(c.Workers[0].ID()), 0, van.Single, 1, []byte("x"))); err != nil {
		t.Fatal(err)
	}
	l.Wait(t, "dropped a request: a tensor worker serves none", "server 0 (id 8)")
	work(t, 1, w)
	c.Finalize(t)
}

// TestWrongAnswers: an answer that does not fit its request fails that request
// and no other. Answers are one message, or one for each tensor.
func TestWrongAnswers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	nodetest.Server(t, c.Servers[0], nodetest.Echoes(t))
	script := make(chan func(ask *van.Message), 1)
	server, err := (*cluster.Node)(c.Servers[1]).App().AddCustomer(0, 0, func(m *van.Message) { (<-script)(m) })
	if err != nil {
		t.Fatal(err)
	}
	send := func(m *van.Message) {
		m.Request = false
		if err := (*cluster.Node)(c.Servers[1]).App().Send(m); err != nil {
			t.Error(err)
		}
	}
	each := func(change func(m *van.Message)) func(ask *van.Message) {
		return func(ask *van.Message) {
			ack := pushMessage(ask.Sender, ask.Timestamp, van.Single, 1, nil)
			ack.Frames, ack.DataTypes = 0, nil
			send(ack)
			m := pushMessage(ask.Sender, ask.Timestamp+1, van.Single, 2, []byte("x"))
			m.Push = false
			change(m)
			send(m)
		}
	}
	whole := func(change func(m *van.Message)) func(ask *van.Message) {
		return func(ask *van.Message) {
			m := &van.Message{}
			m.Reset()
			m.Receiver, m.AppID, m.CustomerID, m.Timestamp = ask.Sender, 0, 0, ask.Timestamp+1
			m.Parts = []van.Part{{Key: 2, Len: 1, Dtype: int32(af.Uint8), Device: backend.Host, Vals: backend.Bytes([]byte("x"))}}
			change(m)
			m.WriteDirectory()
			send(m)
		}
	}
	value := func(x string) func(m *van.Message) {
		return func(m *van.Message) { m.Parts[0].Len, m.Parts[0].Vals = len(x), backend.Bytes([]byte(x)) }
	}
	w := nodetest.Worker(t, c.Workers[0])
	for _, x := range []struct {
		answer   func(ask *van.Message)
		sentinel error
		texts    []string
	}{
		{each(func(m *van.Message) { m.Keys = pushMessage(0, 0, 0, 3, nil).Keys }), van.ErrMalformed, []string{"pull answer has key 3, want 2"}},
		{each(func(m *van.Message) { m.Frames, m.DataTypes = 0, nil }), van.ErrMalformed, []string{"pull answer for key 2", "0 data frames"}},
		{each(func(m *van.Message) { m.Keys = m.Keys.Sub(0, 4) }), van.ErrMalformed, []string{"pull answer for key 2", "4 key bytes"}},
		{each(func(m *van.Message) { m.Push = true }), van.ErrMalformed, []string{"is for a push=true, want false"}},
		{each(func(m *van.Message) { m.Vals = pushMessage(0, 0, 0, 0, []byte("xyz")).Vals }), van.ErrInvalid,
			[]string{"pull answer for key 2 has 3 bytes, the pull tensor uint8[1] on cpu", "has 1"}},
		{each(func(m *van.Message) { m.Vals = pushMessage(0, 0, 0, 0, []byte("")).Vals }), van.ErrInvalid,
			[]string{"pull answer for key 2 has 0 bytes"}},
		{whole(func(m *van.Message) { m.Parts[0].Key = 3 }), van.ErrMalformed, []string{"pull answer has key 3, want 2"}},
		{whole(func(m *van.Message) { m.Parts = append(m.Parts, m.Parts[0]) }), van.ErrMalformed, []string{"2 answers to timestamp", "of a request of 2 timestamps"}},
		{whole(func(m *van.Message) { m.Timestamp-- }), van.ErrMalformed, []string{"answer with 1 values to timestamp", "want 1 values to timestamp"}},
		{whole(value("xyz")), van.ErrInvalid, []string{"pull answer for key 2 has 3 bytes, the pull tensor uint8[1] on cpu", "has 1"}},
		{whole(value("")), van.ErrInvalid, []string{"pull answer for key 2 has 0 bytes"}},
	} {
		script <- x.answer
		h, pulls, err := request(w, 2, []byte("x"), af.Within(soon))
		if err == nil {
			err = h.Wait(t.Context())
		}
		vantest.Fails(t, err, x.sentinel, append(x.texts, "worker 0 (id 9): push_pull with server 1 (id 10) at ")...)
		if pulls[1][0] != 0 {
			t.Errorf("%q: the pull tensor was written all the same", x.texts)
		}
		for _, right := range []func(ask *van.Message){each(func(*van.Message) {}), whole(func(*van.Message) {})} {
			script <- right
			if err := roundTrip(t.Context(), w, 2, []byte("x")); err != nil {
				t.Error(err)
			}
		}
	}
	server.Close()
	nodetest.Server(t, c.Servers[1], nodetest.Echoes(t))
	work(t, 2, w)
	c.Finalize(t)
}
