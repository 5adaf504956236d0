package tcp

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// Stories: two nodes exchange messages of random lengths over connections that forward bytes in random pieces and are cut at random
// bytes, also in the middle of a handshake, a frame, or a value. Meanwhile requests are canceled and their memory is written to.

var (
	stories    = flag.Int("stories", 6, "number of stories of TestStory")
	firstStory = flag.Uint64("first-story", 1, "seed of the first one")
)

// TestStory tells stories, see vantest.Story, over connections that are cut.
func TestStory(t *testing.T) {
	n := *stories
	if testing.Short() || vantest.Race {
		n = min(n, 3)
	}
	for i := range n {
		seed := *firstStory + uint64(i)
		for name, options := range map[string]func(*van.Options){"plain": func(*van.Options) {}, "tls": withTLS(t)} {
			t.Run(fmt.Sprintf("%s %d", name, seed), func(t *testing.T) {
				t.Parallel()
				runStory(t, seed, options)
			})
		}
	}
}

// cutter stands before the data port of a node. It forwards in pieces and cuts connections.
type cutter struct {
	net.Listener
	to  string
	cut atomic.Bool

	mu   sync.Mutex
	rand *rand.Rand
}

// behindCutter puts a cutter before the data port of e. Other nodes must not know e yet.
func behindCutter(e *end, r *rand.Rand) *cutter {
	c := newCutter(e, dataAddr(e), r)
	who, _ := e.self.Extension()
	who.DataPort = c.port()
	e.self.Endpoint = who.Encode()
	return c
}

// insideCutter puts a cutter before the port of the van inside e.
func insideCutter(e *end, r *rand.Rand) *cutter {
	c := newCutter(e, e.self.Addr(), r)
	e.self.Port, e.self.Ports = int(c.port()), []int32{int32(c.port())}
	return c
}

func (c *cutter) port() uint16 { return uint16(c.Addr().(*net.TCPAddr).Port) }

func newCutter(e *end, to string, r *rand.Rand) *cutter {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		e.t.Fatal(err)
	}
	c := &cutter{Listener: l, to: to, rand: r}
	c.cut.Store(true)
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { c.pass(ctx, from) })
		}
	})
	e.t.Cleanup(func() {
		_ = l.Close()
		cancel()
		all.Wait()
	})
	return c
}

// below returns a random number below n, often a small one.
func (c *cutter) below(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rand.IntN(1 + c.rand.IntN(n))
}

// pass forwards a connection, until an end closes it or a direction has carried as many bytes as it may.
func (c *cutter) pass(ctx context.Context, from net.Conn) {
	defer from.Close()
	to, err := net.Dial("tcp", c.to)
	if err != nil {
		return
	}
	defer to.Close()
	over := make(chan struct{}, 2)
	forward := func(dst, src net.Conn, left int) {
		defer func() { over <- struct{}{} }()
		b := make([]byte, 1<<16)
		for {
			n, err := src.Read(b[:1+c.below(len(b))])
			if c.cut.Load() {
				if left -= n; left < 0 {
					_, _ = dst.Write(b[:n+left])
					return
				}
			}
			if _, e := dst.Write(b[:n]); e != nil || err != nil {
				return
			}
		}
	}
	most := 4 << 20
	if c.below(8) == 0 {
		most = 400 // cut in the handshake
	}
	go forward(to, from, c.below(most))
	go forward(from, to, c.below(min(most, 1<<16))) // little but the handshake: data has a connection of its own for each direction
	select {
	case <-over:
	case <-ctx.Done():
	}
}

// insideIsCut reports whether connections of the van inside are cut, too. The loss of their messages is reported only to the sender.
func insideIsCut(seed uint64) bool { return seed%2 == 0 }

func runStory(t *testing.T, seed uint64, options func(*van.Options)) {
	ends := []*end{start(t, 9, options), start(t, 8, options)}
	s := vantest.NewStory(t, seed, ends[0], ends[1], 9, 8)
	s.Either = insideIsCut(seed)
	var cutters []*cutter
	for i, e := range ends {
		soon(e)
		x := s.Ends[i]
		watch := x.Watch
		e.event.Store(&watch)
		receive := x.Receive
		e.before.Store(&receive)
		cutters = append(cutters, behindCutter(e, s.Random(uint64(i))))
		if insideIsCut(seed) {
			cutters = append(cutters, insideCutter(e, s.Random(uint64(5+i))))
		}
	}
	stop := make(chan struct{})
	var drains sync.WaitGroup
	for i, e := range ends {
		e.connect(ends[1-i])
		drains.Go(func() {
			for {
				select {
				case m := <-e.in:
					m.Release()
				case <-stop:
					return
				}
			}
		})
	}
	defer drains.Wait()
	defer close(stop)
	s.Tell(nil)
	for _, c := range cutters {
		c.cut.Store(false)
	}
	s.End()
}

// TestReplacementStory: processes take each other's place under one id, while the former ones go on to send and connections are cut.
// The server never delivers a message of a former process after one of its replacement, and no process receives what the server sent
// before it knew that process.
func TestReplacementStory(t *testing.T) {
	n := *stories
	if testing.Short() || vantest.Race {
		n = min(n, 3)
	}
	for i := range n {
		seed := *firstStory + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			replacementStory(t, seed)
		})
	}
}

func replacementStory(t *testing.T, seed uint64) {
	const processes, step = 5, 10_000 // process k uses the timestamps from k*step on
	server := start(t, 8, nil)
	soon(server)
	gate := behindCutter(server, rand.New(rand.NewPCG(seed, 0)))
	r := rand.New(rand.NewPCG(seed, 1))
	stop := make(chan struct{})
	var all sync.WaitGroup
	defer all.Wait()
	defer close(stop)
	drain := func(e *end) {
		all.Go(func() {
			for {
				select {
				case m := <-e.in:
					m.Release()
				case <-stop:
					return
				}
			}
		})
	}
	check := func(e *end, m *van.Message) {
		if got := m.Vals.Host(); !bytes.Equal(got, pattern(len(got), int(m.Timestamp))) {
			t.Errorf("node %d: message %d arrived with other bytes", e.self.ID, m.Timestamp)
		}
	}
	last := -1 // deliveries of one peer's messages do not overlap
	arrived := make([]chan struct{}, processes)
	for k := range arrived {
		arrived[k] = make(chan struct{})
	}
	f := func(m *van.Message) {
		check(server, m)
		ts := int(m.Timestamp)
		if ts <= last {
			t.Errorf("message %d of process %d was delivered after message %d of process %d", ts%step, ts/step, last%step, last/step)
		}
		if last < 0 || last/step < ts/step {
			close(arrived[ts/step])
		}
		last = ts
	}
	server.before.Store(&f)
	drain(server)
	// repeat calls send with 1, 2, ... until the end of the story. If send fails, and from time to time, it pauses.
	repeat := func(send func(i int) error) {
		pause := time.NewTicker(time.Millisecond)
		defer pause.Stop()
		for i := 1; ; i++ {
			if err := send(i); err == nil && i%20 != 0 {
				continue
			}
			select {
			case <-pause.C:
			case <-stop:
				return
			}
		}
	}
	var knows sync.RWMutex // held while the server sends (read), and when it learns of a process
	known := 0
	all.Go(func() {
		repeat(func(i int) error {
			knows.RLock()
			defer knows.RUnlock()
			ts := known*step + i%step
			return server.Send(dataMessage(9, ts, false, false, pattern(i%500, ts)))
		})
	})
	for k := range processes {
		worker := start(t, 9, nil)
		soon(worker)
		g := func(m *van.Message) {
			check(worker, m)
			if int(m.Timestamp)/step < k {
				t.Errorf("process %d received answer %d, which was sent to process %d", k, m.Timestamp%step, m.Timestamp/step)
			}
		}
		worker.before.Store(&g)
		drain(worker)
		behindCutter(worker, rand.New(rand.NewPCG(seed, uint64(100+k))))
		worker.connect(server)
		sends := make(chan struct{})
		begin := sync.OnceFunc(func() { close(sends) })
		all.Go(func() {
			<-sends
			repeat(func(i int) error {
				b := pattern(vantest.StoryLength(rand.New(rand.NewPCG(seed, uint64(i))))/20, k*step+i)
				return worker.Send(dataMessage(8, k*step+i, true, true, b))
			})
		})
		if r.IntN(2) == 0 {
			begin() // before the server knows it
		}
		knows.Lock()
		server.connect(worker)
		known = k
		knows.Unlock()
		server.Admit(9)
		begin()
		if k == processes-1 {
			gate.cut.Store(false)
		}
		select {
		case <-arrived[k]:
		case <-time.After(limit):
			t.Fatalf("nothing of process %d arrives", k)
		}
	}
}
