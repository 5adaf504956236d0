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

// TestStory checks of every story:
//
//   - a message arrives once, with its own bytes, and in the order of its kind: requests, answers;
//   - if a message that was sent does not arrive, its receiver is notified of the loss of the sender before a later message of that kind
//     arrives, and so is its sender, unless the message was canceled. Messages that had arrived before the loss may be delivered
//     after it;
//   - each sent message is given back once;
//   - when nothing is cut any more, messages arrive in both directions.
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

// teller is one end of a story. It sends to the other end, and checks what arrives.
type teller struct {
	*end
	seed  uint64
	to    int
	given [2]atomic.Int64 // messages given back: requests, answers

	mu      *sync.Mutex // of both ends; guards the fields below
	sent    [2][]fate   // by kind and timestamp
	arrived [2]int      // the last timestamp of each kind, plus 1
	gaps    [2]int      // runs of missing messages of each kind
	story   []string
	losses  int // of which the watcher was notified
	missed  int // messages that did not arrive, and were not canceled
	ended   [2]context.Context
	last    [2]context.CancelFunc // called when a last message arrives
}

// fate is what became of a message that was sent.
type fate struct {
	length   int
	canceled bool
}

// storyBytes returns the value of a message.
func storyBytes(id, kind, ts, n int) []byte { return pattern(n, 7*id+31*kind+ts) }

type givenBack struct{ n *atomic.Int64 }

func (g givenBack) Sent() { g.n.Add(1) }

// lost records a loss of x's peer.
func (x *teller) lost() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.losses++
	x.story = append(x.story, "lost")
}

// receive checks a message from the other end.
func (x *teller) receive(from *teller, m *van.Message) {
	kind, ts := kindOf(m), int(m.Timestamp)
	got := m.Vals.Host()
	if len(m.Parts) > 0 {
		got = m.Parts[0].Vals.Host()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	sent := from.sent[kind]
	switch {
	case ts >= len(sent) || !bytes.Equal(got, storyBytes(from.self.ID, kind, ts, sent[ts].length)):
		x.end.t.Errorf("node %d: kind %d, message %d: %d bytes arrived that were not sent so", x.self.ID, kind, ts, len(got))
		return
	case ts < x.arrived[kind]:
		x.end.t.Errorf("node %d: kind %d: message %d arrived after message %d", x.self.ID, kind, ts, x.arrived[kind]-1)
		return
	}
	missing := 0
	for _, f := range sent[x.arrived[kind]:ts] {
		if !f.canceled {
			missing++
		}
	}
	if missing > 0 {
		told := x.losses
		if insideIsCut(from.seed) {
			told += from.losses
		}
		x.missed += missing
		if x.gaps[kind]++; x.gaps[kind] > told {
			x.end.t.Errorf("node %d: kind %d: messages from %d on did not arrive before message %d, and no loss was told: %v",
				x.self.ID, kind, x.arrived[kind], ts, x.story)
		}
	}
	x.story = append(x.story, fmt.Sprint(kind, ":", ts))
	x.arrived[kind] = ts + 1
	if sent[ts].length == lastLength {
		x.last[kind]() // a last message is sent again if its connection broke
	}
}

// insideIsCut reports whether connections of the van inside are cut, too. Only the sender is notified of their losses.
func insideIsCut(seed uint64) bool { return seed%2 == 0 }

// lastLength is the length of the last message of each kind.
const lastLength = 3

func kindOf(m *van.Message) int {
	if m.Request {
		return 0
	}
	return 1
}

// send sends a message as soon as there is a connection. Unless it is a last one, it may be a batch, and may be canceled.
func (x *teller) send(r *rand.Rand, kind, length int) {
	x.mu.Lock()
	ts := len(x.sent[kind])
	x.sent[kind] = append(x.sent[kind], fate{length: length}) // before it can arrive
	x.mu.Unlock()
	b := storyBytes(x.self.ID, kind, ts, length)
	m := dataMessage(x.to, ts, kind == 0, kind == 0, b)
	if length != lastLength && r.IntN(4) == 0 {
		m = batch(x.to, ts, kind == 0, nil, b, pattern(r.IntN(5000), 1))
	}
	m.Done = givenBack{&x.given[kind]}
	vantest.Eventually(x.end.t, limit, "a connection", func() bool { return x.Send(m) == nil })
	if kind == 0 && length != lastLength && r.IntN(6) == 0 {
		x.mu.Lock()
		x.sent[kind][ts].canceled = true
		x.mu.Unlock()
		x.Cancel(van.Requests{First: int32(ts), Count: 1})
		clear(b)
	}
}

// storyLength returns the length of a value, most often a small one.
func storyLength(r *rand.Rand) int {
	n := []int{1, 200, 8000, 100_000, 1_500_000}[r.IntN(5)]
	if n = r.IntN(n + 1); n == lastLength {
		n++
	}
	return n
}

func runStory(t *testing.T, seed uint64, options func(*van.Options)) {
	random := func(of uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, of)) }
	var mu sync.Mutex
	tell := func(id, to int) *teller {
		x := &teller{end: start(t, id, options), seed: seed, to: to, mu: &mu}
		for kind := range x.last {
			x.ended[kind], x.last[kind] = context.WithCancel(context.Background())
		}
		soon(x.end)
		lost := func(up bool) {
			if !up {
				x.lost()
			}
		}
		x.event.Store(&lost)
		return x
	}
	worker, server := tell(9, 8), tell(8, 9)
	both := []*teller{worker, server}
	var cutters []*cutter
	for i, x := range both {
		other := both[1-i]
		f := func(m *van.Message) { x.receive(other, m) }
		x.before.Store(&f)
		cutters = append(cutters, behindCutter(x.end, random(uint64(i))))
		if insideIsCut(seed) {
			cutters = append(cutters, insideCutter(x.end, random(uint64(5+i))))
		}
	}
	stop := make(chan struct{})
	var drains, senders sync.WaitGroup
	for i, x := range both {
		x.connect(both[1-i].end)
		drains.Go(func() {
			for {
				select {
				case m := <-x.in:
					m.Release()
				case <-stop:
					return
				}
			}
		})
	}
	defer drains.Wait()
	defer close(stop)
	for i, x := range both {
		for kind := range 2 {
			senders.Go(func() {
				r := random(uint64(10 + 2*i + kind))
				for range 60 {
					x.send(r, kind, storyLength(r))
				}
			})
		}
	}
	senders.Wait()
	for _, c := range cutters {
		c.cut.Store(false)
	}
	for i, x := range both {
		for kind := range 2 {
			arrives := both[1-i].ended[kind].Done()
			vantest.Eventually(t, limit, "the last message", func() bool {
				x.send(random(99), kind, lastLength)
				select {
				case <-arrives:
					return true
				case <-time.After(50 * time.Millisecond):
					return false
				}
			})
		}
	}
	for i, x := range both {
		for kind := range 2 {
			x.mu.Lock()
			sent := int64(len(x.sent[kind]))
			x.mu.Unlock()
			vantest.Eventually(t, limit, "all messages are given back", func() bool { return x.given[kind].Load() >= sent })
			if got := x.given[kind].Load(); got != sent {
				t.Errorf("node %d, kind %d: %d of %d messages were given back", x.self.ID, kind, got, sent)
			}
		}
		mu.Lock()
		if missed := both[1-i].missed; missed > 0 && x.losses == 0 {
			t.Errorf("node %d was told of no loss, but %d of its messages did not arrive", x.self.ID, missed)
		}
		mu.Unlock()
	}
}

// TestReplacementStory: processes take each other's place under one id, while the former ones go on to send and connections are cut.
// The server delivers nothing of a process that it does not know yet, and the messages of each process in order. A process receives
// nothing that the server sent before it knew the process.
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
	var connecting atomic.Int32 // the last process that the server has learned of, or learns of now
	// Deliveries of one process do not overlap. A message of a former process may follow: a node compares incarnations, and drops it.
	type process struct {
		last    int
		arrived chan struct{}
	}
	var senders [processes]process
	for k := range senders {
		senders[k] = process{k * step, make(chan struct{})}
	}
	f := func(m *van.Message) {
		check(server, m)
		ts := int(m.Timestamp)
		p, k := &senders[ts/step], int(connecting.Load())
		switch {
		case ts/step > k:
			t.Errorf("message %d of process %d was delivered while the server knew process %d", ts%step, ts/step, k)
		case ts <= p.last:
			t.Errorf("message %d of process %d was delivered after its message %d", ts%step, ts/step, p.last%step)
		case p.last == ts/step*step:
			close(p.arrived)
		}
		p.last = ts
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
				b := pattern(storyLength(rand.New(rand.NewPCG(seed, uint64(i))))/20, k*step+i)
				return worker.Send(dataMessage(8, k*step+i, true, true, b))
			})
		})
		if r.IntN(2) == 0 {
			begin() // before the server knows it
		}
		knows.Lock()
		connecting.Store(int32(k))
		server.connect(worker)
		known = k
		knows.Unlock()
		server.Admit(9)
		begin()
		if k == processes-1 {
			gate.cut.Store(false)
		}
		select {
		case <-senders[k].arrived:
		case <-time.After(limit):
			t.Fatalf("nothing of process %d arrives", k)
		}
	}
}
