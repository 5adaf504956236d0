package faults

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// nonsense are messages that a node drops, each kind for a reason of its own.
var nonsense = []struct {
	name string
	to   string // role
	make func(m *van.Message, i int)
}{
	{"batch that nobody began", "server", func(m *van.Message, i int) { m.Head, m.Timestamp = van.BatchEnd, int32(i) }},
	{"batch that nobody ends", "server", func(m *van.Message, i int) { m.Head, m.Timestamp = van.BatchStart, int32(10*i) }},
	{"wrong shape", "server", func(m *van.Message, i int) { m.Shape[0] = int64(i + 2) }},
	{"wrong flag", "server", func(m *van.Message, i int) { m.Head = van.BatchFlag(i + 10) }},
	{"no such application", "server", func(m *van.Message, i int) { m.AppID, m.CustomerID = 77, 77 }},
	{"simple request", "server", func(m *van.Message, i int) { m.SimpleApp, m.Frames, m.DataTypes = true, 0, nil }},
	{"request to a worker", "worker", func(*van.Message, int) {}},
	{"answer to nothing", "worker", func(m *van.Message, i int) { m.Request, m.Timestamp = false, int32(i) }},
	{"barrier", "scheduler", func(m *van.Message, i int) {
		control(m, van.Barrier)
		m.Request, m.Control.BarrierGroup = true, i+100
	}},
	{"table", "scheduler", func(m *van.Message, i int) { control(m, van.AddNode) }},
	{"heartbeat", "scheduler", func(m *van.Message, i int) {
		control(m, van.Heartbeat)
		m.Body = fmt.Appendf(nil, "stepaf/1 nonsense %d", i)
	}},
	{"question", "scheduler", func(m *van.Message, i int) {
		control(m, van.Heartbeat)
		m.Body = membership.Question(1, letters(i), "list")
	}},
	{"registration", "scheduler", func(m *van.Message, i int) {
		control(m, van.AddNode)
		m.Control.Nodes = []van.Node{{Role: van.Worker, ID: van.Empty, Hostname: letters(i), Port: 1, Ports: []int32{1}, DevTypes: []int32{0}, DevIDs: []int32{0}, AuxID: -1}}
	}},
	{"heartbeat to a server", "server", func(m *van.Message, i int) {
		control(m, van.Heartbeat)
		m.Body = fmt.Appendf(nil, "stepaf/1 dead %d", i)
	}},
}

// letters is i as text without digits: texts that differ only in digits have one log line.
func letters(i int) string {
	return strings.Map(func(r rune) rune { return r - '0' + 'a' }, fmt.Sprint(i))
}

func control(m *van.Message, c van.Command) {
	m.Frames, m.DataTypes = 0, nil
	m.Control.Cmd = c
}

// each is how many messages of each kind come.
const each = 20_000

// TestPeerFlood: invalid messages of a member cost a few log lines, however many they are.
func TestPeerFlood(t *testing.T) {
	for _, x := range nonsense {
		t.Run(x.name, func(t *testing.T) {
			l := &nodetest.Text{}
			c := testcluster.Start(t, testcluster.Options{Workers: 2, Log: l.Logger(slog.LevelInfo)})
			serveAll(t, c)
			w := nodetest.Worker(t, c.Workers[0])
			work(t, 1, w)
			from, to := c.Workers[1], map[string]*postoffice.Node{"server": c.Servers[0], "scheduler": c.Scheduler, "worker": c.Workers[0]}[x.to]
			if x.to == "worker" {
				from = c.Servers[0]
			}
			for i := range each {
				m := pushMessage(int(to.ID()), int32(i), van.Single, 1, []byte("x"))
				x.make(m, i)
				if err := (*cluster.Node)(from).App().Send(m); err != nil {
					t.Fatal(err)
				}
			}
			work(t, 1, w) // by then all have come
			lines(t, l, x.name, each, 60)
		})
	}
}

// lines checks how many were written about messages: some for each of a few causes.
func lines(t *testing.T, l *nodetest.Text, what string, each, most int) {
	t.Helper()
	n := strings.Count(l.String(), "\n")
	t.Logf("%s: %d messages, %d lines", what, each, n)
	if n > most {
		t.Errorf("%s: %d lines for %d messages, want at most %d; the last: %s", what, n, each, most, l.String()[len(l.String())-2000:])
	}
}

// TestStrangerFlood: so do invalid messages of an unauthenticated connection, over ZeroMQ.
func TestStrangerFlood(t *testing.T) {
	l := &nodetest.Text{}
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Workers: 2, Log: l.Logger(slog.LevelInfo)})
	serveAll(t, c)
	w := nodetest.Worker(t, c.Workers[0])
	work(t, 1, w)
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	sent := 0
	for _, x := range nonsense {
		to := map[string]*postoffice.Node{"server": c.Servers[0], "scheduler": c.Scheduler, "worker": c.Workers[0]}[x.to]
		s, err := ctx.NewSocket(zmq4.DEALER)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.SetLinger(20 * time.Second)
		if err := s.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", portOf(t, c, to))); err != nil {
			t.Fatal(err)
		}
		for i := range each / 4 {
			m := pushMessage(int(to.ID()), int32(i), van.Single, 1, []byte("x"))
			x.make(m, i)
			meta, err := m.AppendTo(nil)
			if err != nil {
				t.Fatal(err)
			}
			frames := [][]byte{meta}
			for k := range m.Frames {
				frames = append(frames, m.Frame(k).Host())
			}
			if _, err := s.SendMessage(frames); err != nil {
				t.Fatal(err)
			}
			sent++
		}
		_ = s.Close()
	}
	_ = ctx.Term() // when all has left, or its receiver has hung up
	work(t, 1, w)
	lines(t, l, "a stranger's", sent, 200)
}
