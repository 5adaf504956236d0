package bench

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	vanlocal "github.com/stepaf/stepaf-go/van/local"
)

// The nodes of a benchmark are child processes: the same binary, started with the hidden command "bench child" and the
// usual variables.

// The parent tells the ranks in lines what to measure, in blocks of calls, and a rank answers each line with the times of
// its calls. Measurements that are compared take turns.

// roles are the children by DMLC_ROLE, in the order of their start.
var roles = []string{"scheduler", "server", "worker"}

// processes is a set of child processes, in the order of their start, that are started, asked or ended together: a scheduler, servers and
// workers, or the ranks of gloo.
type processes []*child

// child is one of these processes.
type child struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader

	unused bool // its failure is not an error
}

// group is the processes that a run of a benchmark has started.
type group struct {
	ctx context.Context // ends them
	all processes
}

// line reads the child's next line.
func (p *child) line() (string, error) {
	s, err := p.out.ReadString('\n')
	return strings.TrimSuffix(s, "\n"), err
}

// start starts a process. The kernel kills it when the calling thread ends.
func (g *group) start(name string, command, environ []string, stderr io.Writer) error {
	cmd := exec.CommandContext(g.ctx, command[0], command[1:]...)
	cmd.Env, cmd.Stderr = environ, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	in, err := cmd.StdinPipe()
	var out io.Reader
	if err == nil {
		out, err = cmd.StdoutPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		g.all = append(g.all, &child{name: name, cmd: cmd, in: in, out: bufio.NewReader(out)})
	}
	return err
}

// childCommand returns the command of a child that gets spec.
func childCommand(spec ...any) ([]string, error) {
	self, err := os.Executable()
	args := []string{self, "bench", "child"}
	for _, x := range spec {
		args = append(args, fmt.Sprint(x))
	}
	return args, err
}

// startNodes starts a scheduler, servers and workers. node returns the command of a node and variables of its own.
func (g *group) startNodes(c *cli.Context, host string, servers, workers int,
	node func(role string, rank int) (command, variables []string)) (processes, error) {
	port, err := freeport.Find()
	if err != nil {
		return nil, err
	}
	host = cmp.Or(host, "127.0.0.1")
	environ := append(env.Strip(os.Environ()),
		"DMLC_NUM_WORKER="+strconv.Itoa(workers), "DMLC_NUM_SERVER="+strconv.Itoa(servers),
		"DMLC_PS_ROOT_URI="+host, "DMLC_PS_ROOT_PORT="+strconv.Itoa(port), "DMLC_NODE_HOST="+host)
	environ = append(environ, transport(c.String("van"))...)
	for _, keep := range passed {
		if v, ok := os.LookupEnv(keep); ok {
			environ = append(environ, keep+"="+v)
		}
	}
	first := len(g.all)
	for i, of := range []int{1, servers, workers} {
		for rank := range of {
			command, variables := node(roles[i], rank)
			own := slices.Concat(environ, []string{"DMLC_ROLE=" + roles[i]}, variables)
			name := roles[i]
			if of > 1 {
				name += " " + strconv.Itoa(rank)
				own = append(own, "DMLC_NODE_RANK="+strconv.Itoa(rank))
			}
			if err := g.start(name, command, own, os.Stderr); err != nil {
				return nil, err
			}
		}
	}
	return g.all[first:], nil
}

// startTorch starts n ranks of torch.distributed. node returns the command of a rank, and variables of its own.
func (g *group) startTorch(n int, node func(address string, rank int) (command, variables []string)) (processes, error) {
	port, err := freeport.Find()
	if err != nil {
		return nil, err
	}
	first := len(g.all)
	for rank := 0; rank < n && err == nil; rank++ {
		command, variables := node(fmt.Sprintf("tcp://127.0.0.1:%d", port), rank)
		err = g.start("rank "+strconv.Itoa(rank), command, slices.Concat(os.Environ(), []string{"GLOO_SOCKET_IFNAME=lo"}, variables), nil)
	}
	return g.all[first:], err
}

// Values of --van. local means shared memory, which is not a van of its own.
const (
	zmq     = "zmq"
	ibverbs = "ibverbs"
	local   = "local"
)

// transport returns the variables that choose the transport of data.
func transport(van string) []string {
	if van == local {
		return []string{"DMLC_ENABLE_RDMA=" + zmq, "BYTEPS_ENABLE_IPC=1", "STEPAF_SHM_MAP=1"}
	}
	return []string{"DMLC_ENABLE_RDMA=" + van, "BYTEPS_ENABLE_IPC=0"}
}

// checkTransport refuses to measure over another transport than requested.
func checkTransport(node *postoffice.Node, peers []postoffice.NodeID) error {
	if node.Config().EnableIPC != 1 {
		return nil
	}
	for _, id := range peers {
		path := node.PathTo(id)
		if path.Over != vanlocal.SharedMemory {
			return fmt.Errorf("bench: %s and %s do not share memory: see the log of PS_VERBOSE=1", node.Name(), id)
		}
		if node.Backend().Device().Type == backend.GPU && !path.Device {
			return fmt.Errorf("bench: %s and %s do not reach each other's device: see the log of PS_VERBOSE=1", node.Name(), id)
		}
	}
	return nil
}

// passed are the variables of the caller that the children get too.
var passed = []string{"PS_VERBOSE", "STEPAF_BUSY_POLL_ENABLE", "BYTEPS_ZMQ_NTHREADS", "DMLC_LOCAL", "PS_RESEND", "PS_RESEND_TIMEOUT",
	"STEPAF_QP_NUM", "STEPMESH_SPLIT_QP_LAG", "BYTEPS_RDMA_START_DEPTH", "BYTEPS_RDMA_RX_DEPTH", "BYTEPS_RDMA_MAX_CONCURR_WR",
	"BYTEPS_ADDRESS_POOL_SIZE", "BYTEPS_PRINT_RDMA_LOG", "STEPMESH_MEM_SYNC", "STEPAF_SECRET_FILE", "STEPAF_SECRET", "STEPAF_AUTH", "STEPAF_TLS", "STEPAF_DATA"}

// wait waits for all children and returns the CPU seconds of each. The error names all failed children, first the
// children that a signal ended, since other failures follow from these.
func (c processes) wait() (map[string]float64, error) {
	for _, p := range c {
		_ = p.in.Close()
	}
	cpu := map[string]float64{}
	var killed, failed []error
	for _, p := range c {
		err, state := p.cmd.Wait(), p.cmd.ProcessState
		if p.unused {
			continue
		}
		if s, ok := state.Sys().(syscall.WaitStatus); ok && s.Signaled() {
			killed = append(killed, fmt.Errorf("%s: %w", p.name, err))
		} else if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.name, err))
		}
		cpu[p.name] = (state.UserTime() + state.SystemTime()).Seconds()
	}
	var all error
	for _, err := range append(killed, failed...) {
		if all == nil {
			all = err
		} else {
			all = fmt.Errorf("%w; %w", all, err) // on one line, unlike errors.Join
		}
	}
	return cpu, all
}

// answer is a rank's line: the nanoseconds of each call, or the reason why there are none.
type answer struct {
	NS    []int64 `json:"ns"`
	At    []int64 `json:"at,omitempty"` // by the clock of the host
	Error string  `json:"error,omitempty"`

	Took time.Duration `json:"took,omitempty"` // of all calls, with the checks
	CPU  time.Duration `json:"cpu,omitempty"`  // of the rank during the calls
}

// times is the answer of a rank that has only measured times.
func times(ns []int64, err error) (*answer, error) { return &answer{NS: ns}, err }

// unable is the reason why a rank could not make a call.
type unable string

func (u unable) Error() string { return string(u) }

// last returns the n processes that were started last.
func (c processes) last(n int) processes { return c[len(c)-n:] }

// askEach sends a line to all processes, unless the line is empty, and returns their answers. After an error the caller
// ends the processes: some may still compute their answers.
func (c processes) askEach(line string) ([]answer, error) {
	for _, rank := range c {
		if line == "" {
			break
		}
		if _, err := fmt.Fprintln(rank.in, line); err != nil {
			return nil, fmt.Errorf("%s: %w", rank.name, err)
		}
	}
	all, failed := make([]answer, len(c)), make(chan error, len(c))
	for i, rank := range c {
		go func() {
			text, err := rank.line()
			if err == nil {
				err = json.Unmarshal([]byte(text), &all[i])
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", rank.name, err)
			}
			failed <- err
		}()
	}
	for range c {
		if err := <-failed; err != nil { // others may wait for this rank
			return nil, err
		}
	}
	for i, rank := range c {
		if all[i].Error != "" {
			return nil, unable(all[i].Error)
		}
		if len(all[i].NS) != len(all[0].NS) {
			return nil, fmt.Errorf("%s: %d times, want %d as of the first", rank.name, len(all[i].NS), len(all[0].NS))
		}
	}
	return all, nil
}

// arguments reads the arguments of a child after the name of its benchmark.
func arguments(c *cli.Context, to ...any) error {
	if _, err := fmt.Sscan(strings.Join(c.Args().Tail(), " "), to...); err != nil {
		return exit.Usage("bench child is started by stepaf bench: %w", err)
	}
	return nil
}

// answerLines answers each line of the parent, "WHAT FORM AMOUNT CALLS", with the result of do.
func answerLines(c *cli.Context, do func(what, form string, amount, n int) (*answer, error)) error {
	for in := bufio.NewScanner(c.App.Reader); in.Scan(); {
		var what, form string
		var amount, n int
		if _, err := fmt.Sscan(in.Text(), &what, &form, &amount, &n); err != nil {
			return fmt.Errorf("bench child: %q: %w", in.Text(), err)
		}
		start, cpu := time.Now(), cpuTime()
		a, err := do(what, form, amount, n)
		if err != nil {
			return err
		}
		a.Took, a.CPU = time.Since(start), cpuTime()-cpu
		if err := json.NewEncoder(c.App.Writer).Encode(a); err != nil {
			return err
		}
	}
	return nil
}

// row is a measurement that takes turns with others.
type row struct {
	of   processes
	line string // without the number of calls

	ns, at    [][]int64 // by rank, as are took and cpu
	took, cpu []time.Duration
}

// row returns a measurement that the processes make when they get a line with these words and the number of calls. "-" is no form.
func (c processes) row(what, form string, amount int) *row {
	return &row{of: c, line: fmt.Sprint(what, " ", form, " ", amount)}
}

// slowest returns the time of each call: the time of the slowest rank.
func (r *row) slowest() []int64 {
	ns := slices.Clone(r.ns[0])
	for _, of := range r.ns[1:] {
		for i := range ns {
			ns[i] = max(ns[i], of[i])
		}
	}
	return ns
}

// inTurns measures the rows in turn, in blocks of calls. It does not keep the times of a row's first block, the warm-up. begin is
// called before each block, unless it is nil.
func inTurns(blocks []int, begin func(block int), rows ...*row) error {
	for block, n := range blocks {
		if begin != nil {
			begin(block)
		}
		for _, r := range rows {
			got, err := r.of.askEach(fmt.Sprint(r.line, " ", n))
			if err != nil {
				return fmt.Errorf("%s: %w", r.line, err)
			}
			if r.ns == nil { // the first block
				r.ns, r.at = make([][]int64, len(got)), make([][]int64, len(got))
				r.took, r.cpu = make([]time.Duration, len(got)), make([]time.Duration, len(got))
				continue
			}
			for k, a := range got {
				r.ns[k], r.at[k] = append(r.ns[k], a.NS...), append(r.at[k], a.At...)
				r.took[k] += a.Took
				r.cpu[k] += a.CPU
			}
		}
	}
	return nil
}

// passFloors sends the addresses of all servers' floors to the workers, and waits until the workers have connected.
func passFloors(servers, workers processes) error {
	var addrs []string
	for _, p := range servers {
		at, err := p.line()
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		addrs = append(addrs, at)
	}
	_, err := workers.askEach(strings.Join(addrs, " "))
	return err
}

// limited returns a context of the command that ends after --timeout.
func limited(c *cli.Context) (context.Context, context.CancelFunc) {
	limit := c.Duration("timeout")
	return context.WithTimeoutCause(c.Context, limit, fmt.Errorf("%w (--timeout %s)", context.DeadlineExceeded, limit))
}

// withProcesses calls f, which starts processes, and then ends them. It returns the CPU seconds of each. If f fails, it does not wait
// for processes that still compute.
func withProcesses(ctx context.Context, f func(g *group) error) (map[string]float64, error) {
	runtime.LockOSThread() // see start
	defer runtime.UnlockOSThread()
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	g := &group{ctx: running}
	err := f(g)
	if err != nil {
		cancel()
	}
	cpu, failed := g.all.wait()
	if err = cmp.Or(err, failed); err != nil {
		return nil, cmp.Or(context.Cause(ctx), err)
	}
	return cpu, nil
}

// runCluster starts a scheduler, servers and workers, which get spec, calls f with them, and ends them. It returns the CPU seconds of each. With floor,
// the servers print the addresses of floors, and the workers get them before f is called.
func runCluster(c *cli.Context, host string, at place, servers, workers int, floor bool, f func(g *group, servers, workers processes) error,
	spec ...any) (map[string]float64, error) {
	ctx, cancel := limited(c)
	defer cancel()
	cpu, err := withProcesses(ctx, func(g *group) error {
		child, err := childCommand(spec...)
		if err != nil {
			return err
		}
		cl, err := g.startNodes(c, host, servers, workers, func(role string, rank int) (command, variables []string) {
			return child, at.of(rank).env(role)
		})
		if err != nil {
			return err
		}
		of := cl.last(servers + workers)
		if floor {
			if err := passFloors(of[:servers], of[servers:]); err != nil {
				return err
			}
		}
		return f(g, of[:servers], of[servers:])
	})
	if err != nil {
		err = fmt.Errorf("bench %s: %w", c.Command.Name, err)
	}
	return cpu, err
}
