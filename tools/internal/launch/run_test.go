package launch

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/env"
)

// The test binary also runs as the children of the tests: STEPAF_TEST_<ROLE> is the script of a process.
func TestMain(m *testing.M) {
	if role := os.Getenv("DMLC_ROLE"); os.Getenv("STEPAF_TEST_CHILDREN") != "" {
		os.Exit(behave(os.Getenv("STEPAF_TEST_" + strings.ToUpper(role) + "_" + os.Getenv("DMLC_NODE_RANK"))))
	}
	os.Exit(m.Run())
}

// behave runs the steps of a script and returns the exit status.
func behave(script string) int {
	for step := range strings.SplitSeq(script, "; ") {
		verb, arg, _ := strings.Cut(step, " ")
		switch verb {
		case "say":
			fmt.Println(arg)
		case "complain":
			fmt.Fprintln(os.Stderr, arg)
		case "mumble": // without newline
			fmt.Print(arg)
		case "chatter": // many lines, in pieces
			for i := range 200 {
				for _, piece := range []string{"line ", fmt.Sprint(i), " of ", arg, "\n"} {
					os.Stdout.WriteString(piece)
				}
			}
		case "flood":
			for {
				fmt.Println(arg)
			}
		case "ignore":
			signal.Ignore(syscall.SIGTERM)
		case "child", "leave": // a grandchild of the launcher, with our output and another connection; in a process group of its own
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "DMLC_ROLE=grandchild", "DMLC_NODE_RANK=0", "STEPAF_TEST_GRANDCHILD_0="+strings.ReplaceAll(arg, ",", ";"))
			cmd.Stdout = os.Stdout
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: verb == "leave"}
			if err := cmd.Start(); err != nil {
				fmt.Println(err)
				return 99
			}
		case "hang": // holding a connection to the test, which sees it break
			c, err := net.Dial("tcp", arg)
			if err != nil {
				fmt.Println(err)
				return 99
			}
			fmt.Fprintln(c, "here")
			_, _ = io.Copy(io.Discard, c)
			return 98 // the test has closed the connection
		case "wait": // like hang, then continue
			c, err := net.Dial("tcp", arg)
			if err != nil {
				fmt.Println(err)
				return 99
			}
			_, _ = io.Copy(io.Discard, c)
		case "secret": // report this process's variables of the secret
			cfg, err := env.LoadFrom(env.OS())
			if err != nil {
				fmt.Println(err)
				return 99
			}
			b, err := cfg.ReadSecret()
			fmt.Printf("secret %q file %q: %v\n", b, cfg.SecretFile, err)
		case "die":
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case "launch": // be a launcher
			os.Unsetenv("DMLC_ROLE")
			plan, err := Resolve(Spec{Part: Joint, NodeRank: -1, Command: os.Args[:1], SchedulerCommand: os.Args[:1], KillAfter: time.Hour}, os.Environ(), laptop())
			if err != nil {
				fmt.Println(err)
				return 99
			}
			err = Run(plan, Streams{os.Stdout, os.Stderr}, ends(), os.LookupEnv)
			return exit.Status(err)
		case "exit":
			var n int
			fmt.Sscan(arg, &n)
			return n
		}
	}
	return 0
}

// lock is a buffer that several goroutines may write.
type lock struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lock) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lock) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Split(strings.TrimSuffix(l.b.String(), "\n"), "\n")
}

// cluster is a launch of the test's children.
type cluster struct {
	spec     Spec
	scripts  map[string]string // by role, or role_rank
	signals  chan os.Signal
	out, err lock
}

func newCluster(scripts map[string]string) *cluster {
	s := base()
	s.Grace, s.KillAfter, s.Timeout = 20*time.Second, 20*time.Second, 40*time.Second
	return &cluster{spec: s, scripts: scripts, signals: make(chan os.Signal, 2)}
}

func environment(scripts map[string]string) []string {
	list := append(os.Environ(), "STEPAF_TEST_CHILDREN=1")
	for k, v := range scripts {
		if !strings.Contains(k, "_") {
			k += "_0"
		}
		list = append(list, "STEPAF_TEST_"+strings.ToUpper(k)+"="+v)
	}
	return list
}

func (c *cluster) run(t *testing.T) error { return c.runTo(t, &c.out) }

// runTo is run with another standard output.
func (c *cluster) runTo(t *testing.T, out io.Writer) error {
	t.Helper()
	m := laptop()
	m.Free = free
	plan, err := Resolve(c.spec, environment(c.scripts), m)
	if err != nil {
		t.Fatal(err)
	}
	return Run(plan, Streams{out, &c.err}, c.signals, func(string) (string, bool) { return "", false })
}

// visits is a listener to which children connect.
type visits struct {
	net.Listener
	conns chan net.Conn
}

func newVisits(t *testing.T) *visits {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	v := &visits{l, make(chan net.Conn)}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			v.conns <- c
		}
	}()
	t.Cleanup(func() { l.Close() })
	return v
}

// await returns the connections of n children.
func (v *visits) await(t *testing.T, n int) (all []net.Conn) {
	t.Helper()
	for range n {
		select {
		case c := <-v.conns:
			t.Cleanup(func() { c.Close() })
			all = append(all, c)
		case <-time.After(30 * time.Second):
			t.Errorf("%d of %d processes have come within 30s", len(all), n)
			return all
		}
	}
	return all
}

// gone checks that the processes of the connections have ended.
func gone(t *testing.T, all []net.Conn) {
	t.Helper()
	for i, c := range all {
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, c); os.IsTimeout(err) {
			t.Errorf("process %d still runs", i)
		}
	}
}

func TestAllWell(t *testing.T) {
	c := newCluster(map[string]string{"worker": "chatter W; mumble the end", "server": "chatter S; complain oops", "scheduler": "say hello"})
	c.spec.Banner, c.spec.Notes = "at {host}:{port}", []string{"noted"}
	c.spec.Port = 4711
	if err := c.run(t); err != nil {
		t.Fatal(err)
	}
	out := c.out.lines()
	if out[0] != "at 127.0.0.1:4711" {
		t.Errorf("first line %q", out[0])
	}
	for label, want := range map[string][]string{"worker 0": {"W", "the end"}, "server 0": {"S"}, "scheduler": nil} {
		var expect []string
		if want == nil {
			expect = append(expect, "[scheduler] hello")
		} else {
			for i := range 200 {
				expect = append(expect, fmt.Sprintf("[%s] line %d of %s", label, i, want[0]))
			}
			for _, w := range want[1:] {
				expect = append(expect, "["+label+"] "+w)
			}
		}
		var got []string
		for _, l := range out[1:] {
			if strings.HasPrefix(l, "["+label+"]") {
				got = append(got, l)
			}
		}
		if !slices.Equal(got, expect) {
			t.Errorf("%s: %d lines %q, want %d", label, len(got), got, len(expect))
		}
	}
	if len(out) != 1+200+1+200+1 {
		t.Errorf("%d lines in all", len(out))
	}
	if e := c.err.lines(); !slices.Equal(e, []string{"stepaf: noted", "[server 0] oops"}) {
		t.Errorf("standard error %q", e)
	}
}

func TestFailures(t *testing.T) {
	v, workers := newVisits(t), newVisits(t)
	hang := "hang " + v.Addr().String()
	wait := "wait " + workers.Addr().String() // until the others have connected
	for _, c := range []struct {
		name    string
		scripts map[string]string
		spec    func(*Spec)
		hanging int // processes to wait for before release, and to be gone afterwards
		signals []os.Signal
		status  int
		want    []string
	}{
		{"worker", map[string]string{"worker": "say a; complain b; exit 7", "server": hang, "scheduler": hang}, nil, 0, nil,
			7, []string{"worker 0 failed: exit status 7 (group 0, instance 0, pid ", "\n    a", "\n    b"}},
		{"one of the servers", map[string]string{"worker": hang, "server": hang, "server_1": "exit 3", "scheduler": hang}, func(s *Spec) { s.Servers = 2 }, 0, nil,
			3, []string{"server 1 failed: exit status 3 (group 1", "printed nothing"}},
		{"scheduler", map[string]string{"worker": hang, "server": hang, "scheduler": "exit 4"}, nil, 0, nil, 4, []string{"scheduler failed: exit status 4"}},
		{"killed", map[string]string{"worker": "die", "server": hang, "scheduler": hang}, nil, 0, nil, 137, []string{"worker 0 failed: signal: killed"}},
		{"its line says so", map[string]string{"worker": "say Batch 3 FAILED 2/32", "server": hang, "scheduler": hang},
			func(s *Spec) { s.FailOn = regexp.MustCompile(" FAILED ") }, 0, nil, 1, []string{`printed "Batch 3 FAILED 2/32"`}},
		{"time limit", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, func(s *Spec) { s.Timeout = 300 * time.Millisecond }, 0, nil,
			exit.Timeout, []string{"--timeout 300ms; still running: scheduler, server 0, worker 0"}},
		{"server does not end", map[string]string{"worker": wait, "server": hang, "scheduler": hang}, func(s *Spec) { s.Grace = 300 * time.Millisecond }, 2, nil,
			1, []string{"did not end within 300ms of the last worker: scheduler, server 0"}},
		{"ignores SIGTERM", map[string]string{"worker": "ignore; " + hang, "server": "ignore; " + hang, "scheduler": hang},
			func(s *Spec) { s.KillAfter = 300 * time.Millisecond }, 3, []os.Signal{syscall.SIGTERM}, 143, []string{"stopped by signal: terminated"}},
		{"interrupted", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, nil, 3, []os.Signal{syscall.SIGINT}, 130, []string{"stopped by signal: interrupt"}},
		{"terminated", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, nil, 3, []os.Signal{syscall.SIGTERM}, 143, []string{"stopped by signal: terminated"}},
		{"a second signal kills", map[string]string{"worker": "ignore; " + hang, "server": hang, "scheduler": hang}, nil, 3,
			[]os.Signal{syscall.SIGINT, syscall.SIGINT}, 130, []string{"stopped by signal: interrupt"}},
		{"grandchildren", map[string]string{"worker": "child " + hang + "; " + hang, "server": "child ignore, " + hang + "; " + hang, "scheduler": hang}, nil, 5,
			[]os.Signal{syscall.SIGTERM}, 143, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newCluster(c.scripts)
			if c.spec != nil {
				c.spec(&k.spec)
			}
			done := make(chan error)
			go func() { done <- k.run(t) }()
			var conns []net.Conn
			if c.hanging > 0 {
				conns = v.await(t, c.hanging)
				for _, s := range c.signals {
					k.signals <- s
				}
			}
			if c.scripts["worker"] == wait {
				for _, worker := range workers.await(t, 1) {
					worker.Close()
				}
			}
			var err error
			for err == nil {
				select {
				case extra := <-v.conns: // of processes that may but need not connect
					defer extra.Close()
					continue
				case err = <-done:
				}
				break
			}
			if exit.Status(err) != c.status {
				t.Errorf("status %d, want %d; error %v", exit.Status(err), c.status, err)
			}
			for _, w := range c.want {
				if err != nil && !strings.Contains(err.Error(), w) {
					t.Errorf("error %q without %q", err, w)
				}
			}
			gone(t, conns)
		})
	}
}

// TestFirstFailure: the result is the failure of the child that failed first, also if its end is reported later than that of a child that
// failed because of it.
func TestFirstFailure(t *testing.T) {
	begun := time.Now()
	for _, c := range []struct {
		name   string
		second time.Duration // when the child failed whose end is reported second; the other one failed after a second
		ok     bool          // it did not fail
		status int
		want   string
	}{
		{"later", 2 * time.Second, false, 3, "server 0 failed: how"},
		{"at the same time", time.Second, false, 3, "server 0 failed: how"},
		{"earlier", 0, false, 7, "worker 0 failed: how"},
		{"earlier, but it has not failed", 0, true, 3, "server 0 failed: how"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out, err lock
			r := &run{plan: &Plan{}, out: newPrinter(Streams{&out, &err}, func(string) (string, bool) { return "", false })}
			child := func(role string) *process {
				p := &process{Child: &Child{Role: role}, cmd: &exec.Cmd{Process: &os.Process{}}, ended: true}
				r.living = append(r.living, p)
				return p
			}
			server, worker := child("server"), child("worker")
			r.exited(ended{p: server, status: 3, how: "how", at: begun.Add(time.Second)})
			r.exited(ended{p: worker, status: 7, how: "how", at: begun.Add(c.second), ok: c.ok})
			if r.result == nil || exit.Status(r.result) != c.status || !strings.Contains(r.result.Error(), c.want) {
				t.Errorf("status %d, error %v, want %d and %q", exit.Status(r.result), r.result, c.status, c.want)
			}
		})
	}
}

// TestOutputGoneWhileStopping: SIGPIPE, which each line to a closed pipe raises, does not kill the processes that a
// signal is stopping.
func TestOutputGoneWhileStopping(t *testing.T) {
	workers, others := newVisits(t), newVisits(t)
	hang := "hang " + others.Addr().String()
	k := newCluster(map[string]string{"worker": "ignore; wait " + workers.Addr().String() + "; say goodbye", "server": hang, "scheduler": hang})
	k.signals = make(chan os.Signal) // so that the launch has handled a signal when it takes the next one
	done := make(chan error, 1)
	go func() { done <- k.run(t) }()
	worker := workers.await(t, 1)
	others.await(t, 2)
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGPIPE, syscall.SIGPIPE} {
		select {
		case k.signals <- s:
		case err := <-done:
			t.Fatalf("the launch has ended before %v: %v", s, err)
		}
	}
	for _, c := range worker {
		c.Close()
	}
	if err := <-done; exit.Status(err) != 130 || !slices.Contains(k.out.lines(), "[worker 0] goodbye") {
		t.Errorf("%v, with %q; want status 130 and the worker's last line", err, k.out.lines())
	}
}

// TestOthersLive: a process with the name, the command line, the environment and even the parent of a child, which the
// launcher has not started, keeps running, however the launch ends.
func TestOthersLive(t *testing.T) {
	mine, theirs := newVisits(t), newVisits(t)
	hang := "hang " + theirs.Addr().String()
	for _, c := range []struct {
		name    string
		scripts map[string]string
		hanging int // processes to wait for before the signals
		signals []os.Signal
		status  int
	}{
		{"all is well", map[string]string{"worker": "say a"}, 0, nil, 0},
		{"a worker fails", map[string]string{"worker": "exit 7", "server": hang, "scheduler": hang}, 0, nil, 7},
		{"terminated", map[string]string{"worker": hang, "server": hang, "scheduler": hang}, 3, []os.Signal{syscall.SIGTERM}, 143},
		{"killed", map[string]string{"worker": "ignore; " + hang, "server": "ignore; " + hang, "scheduler": hang}, 3,
			[]os.Signal{syscall.SIGTERM, syscall.SIGTERM}, 143},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newCluster(c.scripts)
			var others []*exec.Cmd
			for _, role := range []string{"worker", "server", "scheduler"} {
				cmd := exec.Command(k.spec.Command[0], k.spec.Command[1:]...)
				cmd.Env = append(environment(map[string]string{role: "hang " + mine.Addr().String()}), "DMLC_ROLE="+role, "DMLC_NODE_RANK=0")
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				others = append(others, cmd)
			}
			conns := mine.await(t, len(others))
			done := make(chan error)
			go func() { done <- k.run(t) }()
			theirs.await(t, c.hanging)
			for _, s := range c.signals {
				k.signals <- s
			}
			var err error
			for ended := false; !ended; {
				select {
				case extra := <-theirs.conns: // of processes that may but need not connect
					defer extra.Close()
				case err = <-done:
					ended = true
				}
			}
			if exit.Status(err) != c.status {
				t.Errorf("status %d, want %d; error %v", exit.Status(err), c.status, err)
			}
			for _, conn := range conns {
				_ = conn.Close() // the processes end at this
			}
			for i, cmd := range others {
				if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 98 { // the status of hang
					t.Errorf("process %d, which the launcher has not started: %v, want that it ended by itself with status 98", i, cmd.ProcessState)
				}
			}
		})
	}
}

// TestOrphan: the launcher kills the processes in a child's group when the child ends, and does not wait for them.
func TestOrphan(t *testing.T) {
	v := newVisits(t)
	c := newCluster(map[string]string{"worker": "say before; child ignore, hang " + v.Addr().String() + "; exit 0"})
	done := make(chan error)
	go func() { done <- c.run(t) }()
	for {
		select {
		case conn := <-v.conns: // it may be killed before it connects
			gone(t, []net.Conn{conn})
			conn.Close()
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
}

// TestLauncherKilled: the children end with a launcher that was killed.
func TestLauncherKilled(t *testing.T) {
	v := newVisits(t)
	hang := "ignore; hang " + v.Addr().String()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(environment(map[string]string{"launcher": "launch", "worker": hang, "server": hang, "scheduler": hang}), "DMLC_ROLE=launcher", "DMLC_NODE_RANK=0",
		"TMPDIR="+t.TempDir()) // keeps the secret's directory
	var out lock
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conns := v.await(t, 3)
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	gone(t, conns)
	_ = cmd.Wait() // it was killed
	if t.Failed() {
		t.Log(out.lines())
	}
}

// TestNobodyReads: when the reader of the output has ended, all processes end as after a signal, with the processes
// that they have started.
func TestNobodyReads(t *testing.T) {
	v := newVisits(t)
	hang := "hang " + v.Addr().String()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(environment(map[string]string{"launcher": "launch", "worker": "child ignore, " + hang + "; flood line", "server": hang, "scheduler": hang}),
		"DMLC_ROLE=launcher", "DMLC_NODE_RANK=0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conns := v.await(t, 3)
	_ = out.Close() // while the worker goes on writing
	gone(t, conns)
	_ = cmd.Wait() // the status is checked below
	if s := cmd.ProcessState.ExitCode(); s != 141 {
		t.Errorf("%v, want status 141", cmd.ProcessState)
	}
}

func TestLines(t *testing.T) {
	long := strings.Repeat("x", maxLine/2)
	for _, c := range []struct{ in, want []string }{
		{nil, nil},
		{[]string{"a\n", "b"}, []string{"a", "b"}},
		{[]string{"a", "b\nc\n\nd", "\n"}, []string{"ab", "c", "", "d"}},
		{[]string{"dos\r\n", "\n"}, []string{"dos", ""}},
		{[]string{"dos\r", "\nx\r\n"}, []string{"dos", "x"}},
		{[]string{"\r10 %", "\r20 %\r", "done\n"}, []string{"10 %", "20 %", "done"}},
		{[]string{"\r10 %\r", "\r"}, []string{"10 %"}},
		{[]string{long, "y\n", "z"}, []string{long + "y", "z"}},
	} {
		var got []string
		var in []io.Reader
		for _, s := range c.in {
			in = append(in, strings.NewReader(s))
		}
		eachLine(io.MultiReader(in...), func(l []byte) { got = append(got, string(l)) })
		if !slices.Equal(got, c.want) {
			t.Errorf("%.60q gives %.60q, want %.60q", c.in, got, c.want)
		}
	}
	n, total := 0, 0
	eachLine(io.LimitReader(zeros{}, 5*maxLine), func(l []byte) { n++; total += len(l) })
	if total != 5*maxLine || n < 2 {
		t.Errorf("an endless line came in %d pieces, %d bytes", n, total)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestColour(t *testing.T) {
	var out bytes.Buffer
	p := newPrinter(Streams{&out, io.Discard}, func(string) (string, bool) { return "xterm", true })
	p.line(toOut, "worker 0", 32, []byte("x"))
	p.colour[toOut] = true
	p.line(toOut, "worker 0", 32, []byte("x"))
	if got, want := out.String(), "[worker 0] x\n\x1b[32m[worker 0]\x1b[0m x\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestPythonsProgress: a line that a Python program prints appears at once, and is not lost when the user ends the run.
func TestPythonsProgress(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3")
	}
	s := base()
	s.Command = []string{python, "-c", "print('a step', flush=False)\nimport time\ntime.sleep(600)"}
	s.SchedulerCommand = s.Command
	s.KillAfter, s.Timeout = 20*time.Second, 60*time.Second
	environ := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "PYTHONUNBUFFERED=") })
	m := laptop()
	m.Free = free
	plan, err := Resolve(s, environ, m)
	if err != nil {
		t.Fatal(err)
	}
	read, write := io.Pipe()
	signals, done := make(chan os.Signal, 1), make(chan error, 1)
	go func() {
		done <- Run(plan, Streams{write, io.Discard}, signals, func(string) (string, bool) { return "", false })
		write.Close()
	}()
	lines, seen := bufio.NewScanner(read), map[string]bool{}
	for len(seen) < 3 && lines.Scan() {
		seen[lines.Text()] = true
	}
	for _, want := range []string{"[scheduler] a step", "[server 0] a step", "[worker 0] a step"} {
		if !seen[want] {
			t.Errorf("%q was not printed while the program ran: %v", want, seen)
		}
	}
	signals <- os.Interrupt
	go func() { _, _ = io.Copy(io.Discard, read) }()
	if err := <-done; exit.Status(err) != 128+int(syscall.SIGINT) {
		t.Errorf("Run: %v, want the signal's status", err)
	}
}
