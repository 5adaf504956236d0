// Package real runs clusters of real processes and subjects them to the faults of
// processes: they are killed, stopped and woken, replaced, cut off, and leave
// children that hold their sockets. The same binary is the test and the nodes. Each value
// that travels names its origin, and every byte of it is checked.
package real

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/foreign"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
	"github.com/stepaf/stepaf-go/van"
)

// variable makes a binary a node; its value is a Behaviour.
const variable = "STEPAF_TEST_NODE"

// Programs that a node may be.
const (
	Plain    = "plain"  // af: scheduler and servers start, then Finalize, from the first second
	Module   = "module" // fserver/core, as a Python program would use it
	KeyValue = "kv"     // kv: as Plain, with a push and then a pull for a push_pull
)

// Behaviour is the task of a node.
type Behaviour struct {
	Program string
	Serial  uint32      // of the process among all that the runner has started
	Loads   []plan.Load // of a worker, from the start
	Faults  []string    // fail points that are on
	Wait    bool        // scheduler and servers do not call Finalize before a command does
	// LoopEnds: a server of the Python module stops when get_batch reports that all workers have ended, not before.
	LoopEnds bool

	// Foreign are the nodes of the cluster that behave like those of the original.
	Foreign []plan.Node

	// Freeze is when the process stops, counted from when it connects to the scheduler; 0 for never.
	Freeze time.Duration
}

// Millis is a time in milliseconds.
type Millis int

// Duration is the time as Go has it.
func (m Millis) Duration() time.Duration { return time.Duration(m) * time.Millisecond }

// Main runs the node that the environment describes and ends the process, or returns if
// it describes none. Call it first in main or TestMain.
func Main() {
	text := os.Getenv(variable)
	if text == "" {
		return
	}
	var b Behaviour
	if err := json.Unmarshal([]byte(text), &b); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	_ = os.Unsetenv(variable)
	failpoint.Plant(b.Faults...)
	n := &node{b: b, out: json.NewEncoder(os.Stdout)}
	os.Exit(n.run())
}

// Event is a line that a node writes.
type Event struct {
	Event string // one of the constants
	Text  string `json:",omitempty"` // of an error, or of a violation
	Call  int    `json:",omitempty"` // the number of a command
	ID    int    `json:",omitempty"` // of the node
	MS    int64  `json:",omitempty"` // how long it took
	Stats *Stats `json:",omitempty"`
	At    int64  `json:",omitempty"` // nanoseconds since 1970
	Vote  *Vote  `json:",omitempty"`

	// Of the end: the descriptors that were open before there was a node, and after it.
	Before, After Files `json:",omitempty"`

	// Of a report: the number of successful calls by the hundredth of a second in which they
	// began; and failed calls, and barriers.
	OK    [][2]int64 `json:",omitempty"`
	Calls []Call     `json:",omitempty"`
}

// Call is a push_pull that has failed, or a barrier.
type Call struct {
	Begin   int64  // milliseconds since 1970
	MS      int64  // how long it took, less the time that the process was stopped
	Text    string `json:",omitempty"` // of the error
	Barrier bool   `json:",omitempty"`
}

// Events.
const (
	started   = "started"   // Start has returned
	report    = "report"    // of its numbers
	violation = "violation" // something was wrong
	barrier   = "barrier"   // one is called, or has ended
	answer    = "answer"    // to a command
	fenced    = "fenced"    // the node cannot be used any more
	left      = "left"      // the end
)

// Stats are the counters of a node.
type Stats struct {
	OK     int64 // calls that ended with the right bytes
	Failed int64
	Streak int64 // calls that ended well since the last that failed
	Served int64 // batches
	Last   string
	Slow   int64 // the longest call in milliseconds, less the time that the process was stopped
}

// Command is a line that a node reads.
type Command struct {
	Do    string
	Call  int // its number, which the answer repeats
	N     int
	Size  int
	Group int
	Limit Millis
	Loads []plan.Load
	File  string
}

// Commands.
const (
	doLoads   = "loads"   // Loads in place of the current ones
	doBarrier = "barrier" // an instance barrier of Group
	doFork    = "fork"    // a child that holds the sockets and outlives the node; answers its pid
	doBlock   = "block"   // the handler
	doUnblock = "unblock"
	doSpin    = "spin"   // keeps a processor of Go until File is no longer empty; answers how far the node's clock has gone on meanwhile
	doPush    = "push"   // N pushes of Size without waiting; answers the first error
	doDrain   = "drain"  // waits until all of that is answered; fails when for Limit nothing is
	doRounds  = "rounds" // N calls one after the other; answers the first error
	doFinish  = "finish" // the loads end, then the program in order
	doLeave   = "leave"  // the node is closed, and the program ends
)

// node is the program.
type node struct {
	b   Behaviour
	n   *postoffice.Node
	ctx context.Context

	write sync.Mutex
	out   *json.Encoder

	server  *af.Server
	worker  *af.Worker
	session *core.Session
	rank    uint32

	keyValue *kv.Worker[uint8]

	calls   atomic.Uint64
	votes   atomic.Int64
	leave   atomic.Bool
	ticks   atomic.Int64 // of a clock that stops with the process
	mu      sync.Mutex
	stats   Stats
	changed bool
	oks     map[int64]int64
	done    []Call
	loads   *loads // that run
	newest  map[uint32]uint32
	seen    map[source]map[uint64]bool
	blocked chan struct{}

	collecting sync.Mutex
	flooded    atomic.Int32 // the last push of flood that was taken

	ended chan struct{} // closed by finish
	// loopOver is closed when get_batch has said that all workers have ended.
	loopOver chan struct{}
	once     sync.Once
}

// batchID is one call of one process.
type batchID struct {
	rank, serial uint32
	call         uint64
}

// source is a process, and which part of its calls is meant.
type source struct {
	rank, serial uint32
	part         string
}

func (n *node) say(e Event) {
	n.write.Lock()
	defer n.write.Unlock()
	_ = n.out.Encode(e)
}

func (n *node) wrong(format string, args ...any) {
	n.say(Event{Event: violation, Text: fmt.Sprintf(format, args...)})
}

// tickTime is the resolution of the node's own clock.
const tickTime = 50 * time.Millisecond

func (n *node) run() int {
	n.ended, n.newest, n.seen = make(chan struct{}), map[uint32]uint32{}, map[source]map[uint64]bool{}
	n.loopOver = make(chan struct{})
	n.oks = map[int64]int64{}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	n.ctx = ctx
	begun, before := time.Now(), filesBefore()
	if err := n.start(ctx); err != nil {
		n.say(Event{Event: left, Text: "start: " + err.Error(), Before: before, After: filesAfter(before)})
		return 1
	}
	n.say(Event{Event: started, ID: n.id(), MS: time.Since(begun).Milliseconds(), At: time.Now().UnixNano()})
	go n.tick()
	if n.isWorker() {
		n.setLoads(n.b.Loads)
	}
	go n.commands() // which may bring other loads at once
	if n.isWorker() || n.b.Wait {
		<-n.ended
		n.setLoads(nil)
	}
	err := n.end(ctx)
	n.report(true)
	e := Event{Event: left, Before: before, After: filesAfter(before)}
	if err != nil {
		e.Text = err.Error()
	}
	n.say(e)
	if err != nil {
		return 1
	}
	return 0
}

func (n *node) isWorker() bool {
	return n.worker != nil || n.keyValue != nil || n.session != nil && n.rankRole() == "worker"
}

func (n *node) rankRole() string {
	if n.session != nil {
		return n.session.Config().Role
	}
	return n.n.Role().String()
}

func (n *node) id() int {
	if n.n != nil {
		return int(n.n.ID())
	}
	return 0
}

// start makes the node what its role says.
func (n *node) start(ctx context.Context) error {
	if n.b.Program == Module && len(n.b.Foreign) == 0 && n.b.Freeze == 0 {
		s, err := core.Start(ctx, os.LookupEnv, nil)
		if err != nil {
			return err
		}
		n.opened(s)
		return nil
	}
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	o := postoffice.Options{Config: cfg, Log: logx.New(&freezer{w: os.Stderr, after: n.b.Freeze}, cfg), KeepBackend: n.b.Program == Module}
	self := n.foreign(cfg.Role, uint32(cfg.Rank()))
	if self {
		o.Van = foreign.Factory(van.New)
	}
	started, err := postoffice.Start(ctx, o)
	if err != nil {
		return err
	}
	if self && started.IsRecovery() { // one of the original waits in the barrier of start-up all the same
		err = (*cluster.Node)(started).StopBarrier(ctx)
	}
	if n.b.Program == Module && err == nil {
		s, err := core.Open(ctx, started)
		if err != nil {
			return err
		}
		n.opened(s)
		return nil
	}
	n.n, n.rank = started, uint32(cfg.Rank())
	if err == nil {
		err = n.program()
	}
	if err != nil {
		n.n.Close()
	}
	return err
}

// opened begins the program of the Python module.
func (n *node) opened(s *core.Session) {
	n.session, n.rank = s, uint32(s.Config().Rank())
	if s.Config().Role == "server" {
		go n.batches()
	}
}

// foreign tells whether a node behaves like those of the original.
func (n *node) foreign(role string, rank uint32) bool {
	return slices.Contains(n.b.Foreign, plan.NodeOf(role, int(rank)))
}

// program sets the started node up for its program.
func (n *node) program() (err error) {
	role := n.n.Role()
	switch {
	case n.b.Program == KeyValue && role == van.Server:
		var s *kv.Server[uint8]
		if s, err = kv.NewServer[uint8](n.n, kv.ServerOptions{}); err == nil {
			err = s.Handle(n.serveKV)
		}
	case n.b.Program == KeyValue && role == van.Worker:
		n.keyValue, err = kv.NewWorker[uint8](n.n, kv.WorkerOptions{})
	case n.b.Program != Plain && n.b.Program != KeyValue:
		err = fmt.Errorf("no such program: %q", n.b.Program)
	case role == van.Server:
		if n.server, err = af.NewServer(n.n, af.ServerOptions{}); err == nil {
			err = n.server.Handle(n.serve)
		}
	case role == van.Worker:
		n.worker, err = af.NewWorker(n.n, af.WorkerOptions{})
	}
	return err
}

// end ends the node: at once after Start, except for workers.
func (n *node) end(ctx context.Context) error {
	if n.leave.Load() {
		if n.session != nil {
			n.session.Close()
		} else {
			n.n.Close()
		}
		return nil
	}
	if n.session == nil {
		return n.n.Shutdown(ctx)
	}
	if n.b.LoopEnds && n.rankRole() == "server" {
		select {
		case <-n.loopOver:
		case <-ctx.Done():
			return errors.New("get_batch has not said that all workers have ended")
		}
	}
	return n.session.Stop(ctx)
}

// tick reports changes, and counts.
func (n *node) tick() {
	for range time.Tick(tickTime) {
		n.ticks.Add(1)
		n.report(false)
		if n.n != nil && !n.isWorker() && !n.over() {
			if err := n.n.Alive(); errors.Is(err, postoffice.ErrRefused) {
				n.leaveWith(err)
			}
		}
	}
}

// leaveWith says that the node cannot be used any more, and ends the program.
func (n *node) leaveWith(err error) {
	n.say(Event{Event: fenced, Text: err.Error()})
	n.finish()
}

func (n *node) report(always bool) {
	n.mu.Lock()
	e := Event{Event: report, Calls: n.done}
	s, changed := n.stats, n.changed
	e.Stats = &s
	for at, count := range n.oks {
		e.OK = append(e.OK, [2]int64{at, count})
	}
	clear(n.oks)
	n.done, n.changed = nil, false
	n.mu.Unlock()
	if changed || always {
		n.say(e)
	}
}

func (n *node) finish() { n.once.Do(func() { close(n.ended) }) }

// over tells whether the load is to end.
func (n *node) over() bool {
	select {
	case <-n.ended:
		return true
	default:
		return false
	}
}

// commands carries out the runner's commands. Without a runner there is no node.
func (n *node) commands() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var c Command
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			n.wrong("command %q: %v", in.Text(), err)
			continue
		}
		if c.Do == doLoads {
			n.do(c) // the last one holds
		} else {
			go n.do(c) // a long command delays no other
		}
	}
	os.Exit(0)
}

func (n *node) do(c Command) {
	begun := time.Now()
	e := Event{Event: answer, Call: c.Call}
	err := n.command(c, &e)
	if err != nil {
		e.Text = err.Error()
	}
	e.MS = time.Since(begun).Milliseconds()
	n.say(e)
}

func (n *node) command(c Command, e *Event) error {
	switch c.Do {
	case doLoads:
		if !n.over() {
			n.setLoads(c.Loads)
		}
	case doBarrier:
		ctx, cancel := context.WithTimeout(n.ctx, c.Limit.Duration())
		defer cancel()
		return n.barrier(ctx, c.Group)
	case doFork:
		pid, err := hold()
		e.ID = pid
		return err
	case doBlock, doUnblock:
		n.mu.Lock()
		defer n.mu.Unlock()
		switch {
		case c.Do == doBlock && n.blocked == nil:
			n.blocked = make(chan struct{})
		case c.Do == doUnblock && n.blocked != nil:
			close(n.blocked)
			n.blocked = nil
		}
	case doSpin:
		before := n.ticks.Load()
		err := spin(c.File)
		e.ID = int(n.ticks.Load() - before)
		return err
	case doPush:
		return n.flood(c.N, c.Size, e)
	case doDrain:
		return n.drain(c.Limit.Duration())
	case doRounds:
		l := n.lane(&plan.Load{Size: max(c.Size, plan.MinSize), Limit: plan.Duration(c.Limit.Duration())}, 999)
		for i := range c.N {
			if err := l.round(); err != nil {
				return fmt.Errorf("round %d of %d: %w", i, c.N, err)
			}
		}
	case doFinish:
		n.finish()
	case doLeave:
		n.leave.Store(true)
		n.finish()
	default:
		return fmt.Errorf("no such command: %q", c.Do)
	}
	return nil
}

// hold starts a process that has every descriptor of this one open, as a fork would.
func hold() (pid int, err error) {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, err
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer syscall.Close(null)
	files := []uintptr{uintptr(null), uintptr(null), uintptr(null)}
	for _, e := range names {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 || fd == null {
			continue
		}
		if target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && target != "" {
			files = append(files, uintptr(fd))
		}
	}
	return syscall.ForkExec("/bin/sleep", []string{"sleep", "120"}, &syscall.ProcAttr{Files: files})
}

// flood pushes without waiting for anything.
func (n *node) flood(count, size int, e *Event) error {
	if n.worker == nil {
		return errors.New("only a plain worker can do that")
	}
	b := make([]byte, size)
	value.Origin{Kind: value.Pushed, Worker: n.rank, Process: n.b.Serial, Call: 1 << 60}.Fill(b)
	push, err := af.FromSlice(b)
	if err != nil {
		return err
	}
	for i := range count {
		e.ID = i
		call, err := n.worker.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, nil)
		if err == nil {
			_, _, _, err = cluster.Call(call).Customer().Batch(call.Timestamp()) // the error of a send
		}
		if err != nil {
			return err
		}
		n.flooded.Store(call.Timestamp())
	}
	e.ID = count
	return nil
}

// drain waits until the pushes of flood are answered. It fails if no message arrives for limit.
func (n *node) drain(limit time.Duration) error {
	meter, ok := van.As[van.Meter]((*cluster.Node)(n.n).Van())
	if n.worker == nil || !ok {
		return errors.New("only a plain worker can do that")
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	came, at := uint64(0), time.Now()
	for {
		_, answered, known, err := (*cluster.Node)(n.n).App().Customer(0, 0).Batch(n.flooded.Load())
		if err != nil {
			return err
		}
		if answered || !known { // finished, and released since no call waits for it
			return nil
		}
		if now := meter.Stats().ReceivedMessages; now != came {
			came, at = now, time.Now()
		} else if time.Since(at) > limit {
			return fmt.Errorf("pushes are not answered, and for %s nothing has come", limit)
		}
		<-tick.C
	}
}
