package real

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// patience is how long a busy machine may need for an expected event.
const patience = 30 * time.Second

// startSeconds is the STEPAF_START_TIMEOUT of nodes that are given no other.
const startSeconds = 30

// Leg is how data travels between the processes.
type Leg string

// Legs. RDMA needs devices, which the virtual machine of tools/rdma-vm has.
const (
	TCP  Leg = "tcp" // ZeroMQ over TCP
	SHM  Leg = "shm" // shared memory
	RDMA Leg = "rdma"
)

// Options of a cluster.
type Options struct {
	Workers, Servers int // groups; 0 means 1
	Group            int // processes of each; 0 means 1
	Leg              Leg
	Program          string                               // Plain unless given
	PlainScheduler   bool                                 // the scheduler's is Plain
	LoopEnds         bool                                 // servers stop when get_batch reports that all workers have ended
	Under            []string                             // a command that each process is an argument of
	Loads            []plan.Load                          // of workers, from the start
	Wait             bool                                 // scheduler and servers do not call Finalize before a command does
	Env              []string                             // of all processes, after the runner's variables
	NodeEnv          func(role string, rank int) []string // of one
	Foreign          []plan.Node                          // nodes that behave like those of the original
	Separate         bool                                 // each process has a network of its own, so that Cut works; needs root, and not with SHM
	Host             string                               // RDMA: the address of the device
	Dir              string                               // where logs are kept; "" keeps the end of each in memory
	Log              func(line string)
	Faults           []string // planted in all processes
	Slow             int      // how many times as slow the machine is as others; 0 means 1
}

// Cluster is processes and their violations.
type Cluster struct {
	o       Options
	port    int
	began   time.Time
	network *network

	mu       sync.Mutex
	closed   bool
	serial   uint32
	all      []*Process
	present  map[string]*Process
	wrongs   []string
	timeline []string
}

// New makes a cluster without processes.
func New(o Options) (*Cluster, error) {
	o.Workers, o.Servers, o.Group, o.Slow = max(o.Workers, 1), max(o.Servers, 1), max(o.Group, 1), max(o.Slow, 1)
	if o.Program == "" {
		o.Program = Plain
	}
	if o.Log == nil {
		o.Log = func(string) {}
	}
	if o.Dir != "" {
		if err := os.MkdirAll(o.Dir, 0o755); err != nil {
			return nil, err
		}
	}
	c := &Cluster{o: o, began: time.Now(), present: map[string]*Process{}}
	var err error
	if o.Separate {
		if c.network, err = newNetwork(1 + (o.Workers+o.Servers)*o.Group); err != nil {
			return nil, err
		}
		c.port = 9000
	} else if c.port, err = freeport.Find(); err != nil {
		return nil, err
	}
	return c, nil
}

// slowly is d on this machine.
func (c *Cluster) slowly(d time.Duration) time.Duration { return d * time.Duration(c.o.Slow) }

// Port is the scheduler's.
func (c *Cluster) Port() int { return c.port }

// note adds a line to the timeline.
func (c *Cluster) note(format string, args ...any) {
	line := fmt.Sprintf("%8.3f  ", time.Since(c.began).Seconds()) + fmt.Sprintf(format, args...)
	c.mu.Lock()
	c.timeline = append(c.timeline, line)
	c.mu.Unlock()
	c.o.Log(line)
}

// Note adds a line to the timeline.
func (c *Cluster) Note(format string, args ...any) { c.note(format, args...) }

// wrong notes that something must not have happened.
func (c *Cluster) wrong(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.note("WRONG: %s", text)
	c.mu.Lock()
	c.wrongs = append(c.wrongs, text)
	c.mu.Unlock()
}

// Wrong lists the violations.
func (c *Cluster) Wrong() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.wrongs)
}

// Timeline is the events, a line each.
func (c *Cluster) Timeline() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.timeline, "\n")
}

func key(role string, rank int) string { return fmt.Sprint(role, " ", rank) }

// Get is the process that has the place, nil before the first.
func (c *Cluster) Get(role string, rank int) *Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.present[key(role, rank)]
}

// takes gives a process its place.
func (c *Cluster) takes(p *Process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.present[key(p.Role, p.Rank)] = p
}

// release ends the children that killed processes of a place have left: see Fork.
func (c *Cluster) release(role string, rank int) {
	for _, p := range c.All() {
		if s := p.State(); p.Role == role && p.Rank == rank && (s.Killed || s.Ended) {
			p.release()
		}
	}
}

// All are all processes there have been, in order.
func (c *Cluster) All() []*Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.all)
}

// Living are those that have their place and have not ended, by role and rank.
func (c *Cluster) Living() []*Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	var l []*Process
	for _, p := range c.all {
		if c.present[key(p.Role, p.Rank)] == p && !p.State().Ended {
			l = append(l, p)
		}
	}
	return l
}

// place is the number of a process's network.
func (c *Cluster) place(role string, rank int) int {
	switch role {
	case "scheduler":
		return 0
	case "server":
		return 1 + rank
	}
	return 1 + c.o.Servers*c.o.Group + rank
}

func (c *Cluster) host(role string, rank int) string {
	switch {
	case c.network != nil:
		return c.network.address(c.place(role, rank))
	case c.o.Leg == RDMA:
		return c.o.Host
	}
	return "127.0.0.1"
}

func (c *Cluster) environ(role string, rank int) []string {
	host := c.host(role, rank)
	e := []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.TempDir(),
		"DMLC_ROLE=" + role, fmt.Sprintf("DMLC_NUM_WORKER=%d", c.o.Workers), fmt.Sprintf("DMLC_NUM_SERVER=%d", c.o.Servers),
		"DMLC_PS_ROOT_URI=" + c.host("scheduler", 0), fmt.Sprintf("DMLC_PS_ROOT_PORT=%d", c.port), "DMLC_NODE_HOST=" + host,
		fmt.Sprintf("DMLC_GROUP_SIZE=%d", c.o.Group), fmt.Sprintf("DMLC_NODE_RANK=%d", rank/c.o.Group),
		fmt.Sprintf("STEPMESH_GPU=%d", rank%c.o.Group), "STEPMESH_BAKCEND=CPU",
		fmt.Sprintf("STEPAF_START_TIMEOUT=%d", startSeconds*c.o.Slow), fmt.Sprintf("STEPAF_STOP_TIMEOUT=%d", 30*c.o.Slow), "PS_VERBOSE=1",
	}
	switch c.o.Leg {
	case TCP:
		e = append(e, "BYTEPS_ENABLE_IPC=0")
	case RDMA:
		e = append(e, "BYTEPS_ENABLE_IPC=0", "DMLC_ENABLE_RDMA=ibverbs")
	}
	for _, name := range []string{"LD_LIBRARY_PATH", "GOCOVERDIR", "RDMAV_FORK_SAFE"} {
		if v, ok := os.LookupEnv(name); ok {
			e = append(e, name+"="+v)
		}
	}
	if len(c.o.Foreign) > 0 {
		e = append(e, "STEPAF_FOREIGN=1")
	}
	e = append(e, c.o.Env...)
	if c.o.NodeEnv != nil {
		e = append(e, c.o.NodeEnv(role, rank)...)
	}
	return e
}

// Spawn starts the process of a place. An earlier process of the place, which may be killed,
// stopped, or well, is not touched.
func (c *Cluster) Spawn(role string, rank int) (*Process, error) { return c.SpawnAs(role, rank, nil) }

// SpawnAs is Spawn with a change of the process's behavior, and further variables.
func (c *Cluster) SpawnAs(role string, rank int, change func(b *Behaviour), env ...string) (*Process, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, errors.New("the cluster is closed")
	}
	c.serial++
	p := &Process{Role: role, Rank: rank, Serial: c.serial, c: c, log: &tail{}, gone: make(chan struct{}), began: time.Now(),
		changed: make(chan struct{}), answers: map[int]chan Event{}, oks: map[int64]int64{}}
	c.mu.Unlock()
	program := c.o.Program
	if role == "scheduler" && c.o.PlainScheduler {
		program = Plain
	}
	b := Behaviour{Program: program, Serial: p.Serial, Loads: c.o.Loads, Wait: c.o.Wait, LoopEnds: c.o.LoopEnds, Faults: c.o.Faults, Foreign: c.o.Foreign}
	if change != nil {
		change(&b)
	}
	text, err := json.Marshal(b)
	if err != nil {
		return nil, err
	}
	argv := []string{"/proc/self/exe"}
	if self, err := os.Executable(); err == nil {
		argv[0] = self
	}
	argv = append(slices.Clone(c.o.Under), argv...)
	if c.network != nil {
		argv = c.network.inside(c.place(role, rank), argv)
	}
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Env = append(append(c.environ(role, rank), env...), variable+"="+string(text))
	if c.o.Dir != "" {
		f, err := os.Create(filepath.Join(c.o.Dir, fmt.Sprintf("%03d-%s-%d.log", p.Serial, role, rank)))
		if err != nil {
			return nil, err
		}
		p.log.file = f
	}
	p.cmd.Stderr = p.log
	p.cmd.WaitDelay = time.Second // a child of it may have its standard error
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.stdin = stdin
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	if c.closed {
		err = errors.New("the cluster is closed")
	} else if err = p.cmd.Start(); err == nil {
		c.all = append(c.all, p)
		if now := c.present[key(role, rank)]; now == nil || now.State().Ended {
			c.present[key(role, rank)] = p
		} // else it has the place when it has started
	}
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	c.note("%s begins, pid %d", p, p.PID())
	go p.events(stdout)
	return p, nil
}

// Start starts the scheduler, all servers and all workers, and waits until they have
// started.
func (c *Cluster) Start() error {
	var all []*Process
	each := func(role string, n int) error {
		for i := range n {
			p, err := c.Spawn(role, i)
			if err != nil {
				return err
			}
			all = append(all, p)
		}
		return nil
	}
	if err := errors.Join(each("scheduler", 1), each("server", c.o.Servers*c.o.Group), each("worker", c.o.Workers*c.o.Group)); err != nil {
		return err
	}
	for _, p := range all {
		if err := p.Await(c.slowly(patience), "Start returns", func(s State) bool { return s.Started || s.Ended }); err != nil {
			return err
		}
		if s := p.State(); s.Ended {
			return fmt.Errorf("%s has not started: %s\n%s", p, s, p.Log())
		}
	}
	return nil
}

// Works waits until each living worker has made so many calls that ended well since now,
// without one that failed among them.
func (c *Cluster) Works(calls int, limit time.Duration) error {
	end := time.Now().Add(limit)
	for _, p := range c.Living() {
		if p.Role != "worker" || p.State().Stopped {
			continue
		}
		// Calls in flight may have begun before.
		from := p.State().Stats.OK + p.State().Stats.Failed
		err := p.Await(time.Until(end), fmt.Sprintf("%d calls in a row end well", calls), func(s State) bool {
			done := s.Stats.OK + s.Stats.Failed - from
			return s.Stats.Streak >= int64(calls) && done >= int64(calls) || s.Ended
		})
		if err != nil {
			return err
		}
		if s := p.State(); s.Ended {
			return fmt.Errorf("%s: %s", p, s)
		}
	}
	return nil
}

// Finish tells all that have a place to leave, and waits until they have.
func (c *Cluster) Finish(limit time.Duration) error {
	living := c.Living()
	for _, p := range living {
		p.Begin(Command{Do: doFinish})
	}
	end := time.Now().Add(limit)
	var errs []error
	for _, p := range living {
		err := p.Await(time.Until(end), "it leaves", func(s State) bool { return s.Ended })
		if s := p.State(); err == nil && s.Error != "" {
			err = fmt.Errorf("%s: %s", p, s.Error)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Cut makes the network between two nodes swallow everything, both ways.
func (c *Cluster) Cut(roleA string, a int, roleB string, b int) error {
	if c.network == nil {
		return errors.New("cut: the processes share a network")
	}
	return c.network.cut(c.place(roleA, a), c.place(roleB, b), true)
}

// Heal ends a Cut.
func (c *Cluster) Heal(roleA string, a int, roleB string, b int) error {
	if c.network == nil {
		return errors.New("heal: the processes share a network")
	}
	return c.network.cut(c.place(roleA, a), c.place(roleB, b), false)
}

// Close ends all processes.
func (c *Cluster) Close() {
	c.mu.Lock()
	done := c.closed
	c.closed = true
	c.mu.Unlock()
	if done {
		return
	}
	var wg sync.WaitGroup
	for _, p := range c.All() {
		wg.Go(func() {
			p.Kill()
			p.release()
			if p.log.file != nil {
				_ = p.log.file.Close()
			}
		})
	}
	wg.Wait()
	if c.network != nil {
		c.network.close()
	}
}
