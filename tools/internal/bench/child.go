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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	vanlocal "github.com/stepaf/stepaf-go/van/local"
)

// A benchmark's nodes are child processes of this one: the same binary, started
// with the hidden command "bench child" and the usual variables.

// result is what the worker reports on its standard output.
type result struct {
	Ours, Floor []int64
	Bare        []int64 // rounds of ZMQ by itself
	CPU         float64 // seconds of the worker in the measured part
	Checked     bool
	Bytes       int64 // moved in the measured part (kv)
	Seconds     float64
	FloorBps    float64
}

// roles are the children, as DMLC_ROLE names them, in the order in which they are started.
var roles = []string{"scheduler", "server", "worker"}

// cluster is processes that are started, asked and ended together: a scheduler, a server and
// workers, or others that they are compared with.
type cluster struct {
	names []string // in the order in which they were started
	cmds  map[string]*exec.Cmd
	outs  map[string]*lineReader
	ins   map[string]io.WriteCloser
}

// newCluster is one without processes yet.
//
// They die with the calling goroutine's thread, to which it is locked.
func newCluster() *cluster {
	runtime.LockOSThread()
	return &cluster{cmds: map[string]*exec.Cmd{}, ins: map[string]io.WriteCloser{}, outs: map[string]*lineReader{}}
}

// start starts cmd as one of the cluster. If it cannot, all others are ended.
func (c *cluster) start(name string, cmd *exec.Cmd) error {
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
	if err != nil {
		c.kill()
		return err
	}
	c.names = append(c.names, name)
	c.cmds[name], c.ins[name], c.outs[name] = cmd, in, &lineReader{r: out}
	return nil
}

// startCluster starts the children: a scheduler, servers and workers. spec is handed to each.
func startCluster(ctx context.Context, van, host string, at place, servers, workers int, spec []string, stderr io.Writer) (*cluster, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	port, err := freeport.Find()
	if err != nil {
		return nil, err
	}
	host = cmp.Or(host, "127.0.0.1")
	c := newCluster()
	for i := range 1 + servers + workers {
		role, rank, of := roles[0], i, 1
		switch {
		case i > servers:
			role, rank, of = roles[2], i-servers-1, workers
		case i > 0:
			role, rank, of = roles[1], i-1, servers
		}
		name := role
		if of > 1 {
			name += " " + strconv.Itoa(rank)
		}
		cmd := exec.CommandContext(ctx, self, append([]string{"bench", "child"}, spec...)...)
		cmd.Env = append(env.Strip(os.Environ()),
			"DMLC_ROLE="+role, "DMLC_NUM_WORKER="+strconv.Itoa(workers), "DMLC_NUM_SERVER="+strconv.Itoa(servers), "DMLC_PS_ROOT_URI="+host,
			"DMLC_PS_ROOT_PORT="+strconv.Itoa(port), "DMLC_NODE_HOST="+host)
		cmd.Env = append(cmd.Env, transport(van)...)
		if role == roles[2] {
			cmd.Env = append(cmd.Env, at.of(i-servers-1).env(role)...)
		} else {
			cmd.Env = append(cmd.Env, at.env(role)...)
		}
		if name != role {
			cmd.Env = append(cmd.Env, "DMLC_NODE_RANK="+strconv.Itoa(rank))
		}
		for _, keep := range passed {
			if v, ok := os.LookupEnv(keep); ok {
				cmd.Env = append(cmd.Env, keep+"="+v)
			}
		}
		cmd.Stderr = stderr
		if err := c.start(name, cmd); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// rankName names one of several workers.
func rankName(i int) string { return "worker " + strconv.Itoa(i) }

// Vans, as --van names them. local is the name here for shared memory, which is not a
// van by itself.
const (
	zmq     = "zmq"
	ibverbs = "ibverbs"
	local   = "local"
)

// transport is the variables that choose what data goes over, and nothing else.
func transport(van string) []string {
	if van == local {
		return []string{"DMLC_ENABLE_RDMA=" + zmq, "BYTEPS_ENABLE_IPC=1"}
	}
	return []string{"DMLC_ENABLE_RDMA=" + van, "BYTEPS_ENABLE_IPC=0"}
}

// checkTransport refuses to measure something else than what was asked for.
func checkTransport(node *postoffice.Node, peers []int) error {
	if node.Config().EnableIPC != 1 {
		return nil
	}
	for _, id := range peers {
		path := van.PathTo(node.Van(), id)
		if path.Over != vanlocal.SharedMemory {
			return fmt.Errorf("bench: %s and %s do not share memory: see the log of PS_VERBOSE=1", node.Name(), van.NodeName(id))
		}
		if node.Backend().Device().Type == backend.GPU && !path.Device {
			return fmt.Errorf("bench: %s and %s do not reach each other's device: see the log of PS_VERBOSE=1", node.Name(), van.NodeName(id))
		}
	}
	return nil
}

// passed are the variables of the caller that the children see too.
var passed = []string{"PS_VERBOSE", "STEPAF_BUSY_POLL_ENABLE", "BYTEPS_ZMQ_NTHREADS", "DMLC_LOCAL", "PS_RESEND", "PS_RESEND_TIMEOUT",
	"STEPAF_QP_NUM", "STEPMESH_SPLIT_QP_LAG", "BYTEPS_RDMA_START_DEPTH", "BYTEPS_RDMA_RX_DEPTH", "BYTEPS_RDMA_MAX_CONCURR_WR",
	"BYTEPS_ADDRESS_POOL_SIZE", "BYTEPS_PRINT_RDMA_LOG", "STEPMESH_MEM_SYNC"}

func (c *cluster) kill() {
	defer runtime.UnlockOSThread()
	for _, cmd := range c.cmds {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// wait waits for all children and returns the CPU seconds of each. The error names all
// that failed: first those that a signal ended, since others fail because of them.
func (c *cluster) wait() (map[string]float64, error) {
	defer runtime.UnlockOSThread()
	for _, in := range c.ins {
		_ = in.Close()
	}
	cpu := map[string]float64{}
	var killed, failed []error
	for _, role := range c.names {
		cmd := c.cmds[role]
		if err := cmd.Wait(); signalled(cmd) {
			killed = append(killed, fmt.Errorf("%s: %w", role, err))
		} else if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", role, err))
		}
		cpu[role] = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
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

// signalled tells whether a signal has ended cmd.
func signalled(cmd *exec.Cmd) bool {
	s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && s.Signaled()
}

// lineReader reads lines without losing what follows.
type lineReader struct {
	r   io.Reader
	buf *bufio.Reader
}

func (l *lineReader) line() (string, error) {
	if l.buf == nil {
		l.buf = bufio.NewReader(l.r)
	}
	s, err := l.buf.ReadString('\n')
	return strings.TrimSuffix(s, "\n"), err
}

// startNode joins the cluster that the environment describes.
func startNode(ctx context.Context) (*postoffice.Node, error) {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return nil, err
	}
	cfg.StartTimeout = 30 * time.Second
	return postoffice.Start(ctx, postoffice.Options{Config: cfg})
}

// report writes the worker's result as one line.
func report(w io.Writer, r *result) error { return json.NewEncoder(w).Encode(r) }

// runCluster runs the three children and returns the worker's result and the CPU
// seconds of each.
func runCluster(c *cli.Context, host string, at place, spec []string) (*result, map[string]float64, error) {
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	cl, err := startCluster(ctx, c.String("van"), host, at, 1, 1, spec, os.Stderr)
	if err != nil {
		return nil, nil, err
	}
	// The server says where its floor listens; the worker is told.
	addr, err := cl.outs["server"].line()
	if err == nil {
		_, err = fmt.Fprintln(cl.ins["worker"], addr)
	}
	var text string
	if err == nil {
		text, err = cl.outs["worker"].line()
	}
	cpu, failed := cl.wait()
	switch {
	case ctx.Err() != nil:
		return nil, nil, fmt.Errorf("bench: %w (--timeout %s)", context.Cause(ctx), c.Duration("timeout"))
	case failed != nil:
		return nil, nil, fmt.Errorf("bench: %w", failed)
	case err != nil:
		return nil, nil, fmt.Errorf("bench: a child ended early: %w", err)
	}
	var r result
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return nil, nil, fmt.Errorf("bench: worker's report: %w", err)
	}
	return &r, cpu, nil
}
