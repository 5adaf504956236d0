// Package rdma tests whole clusters over RDMA: values, failures and costs. The nodes
// are processes, or several in the process of the test. Without an RDMA device the
// tests are skipped; make rdma-test runs them in a virtual machine.
package rdma

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
)

// behaviour is the variable that makes the test binary a node of a cluster, and
// says what it does.
const behaviour = "RDMA_TEST_CHILD"

// What children do.
const (
	answers = "answers" // a server that answers as expected() says
	slots   = "slots"   // the same, with registered receive buffers
	mute    = "mute"    // a server that says when it has a batch, and never answers
	works   = "works"   // a worker that exchanges batches until the end
	sums    = "sums"    // a kv server that adds up
	rules   = "rules"   // a scheduler
)

func TestMain(m *testing.M) {
	if what := os.Getenv(behaviour); what != "" {
		if err := child(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child is a node in a process of its own. It says what happens on standard output
// and ends when its standard input does: "leave" before makes it leave in order.
func child(what string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	defer n.Close()
	var failed sync.Once
	fail := func(err error) {
		failed.Do(func() { fmt.Println("failed: " + strings.ReplaceAll(err.Error(), "\n", " ")) })
	}
	var wg sync.WaitGroup
	switch what {
	case answers, slots:
		if err := serveAnswers(n, what == slots, fail); err != nil {
			return err
		}
	case mute:
		if err := serve(n, func(af.Batch) { fmt.Println("got a batch") }); err != nil {
			return err
		}
	case works:
		w, err := af.NewTensorWorker(n, af.Options{})
		if err != nil {
			return err
		}
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := (&client{n: n, w: w}).mixed(ctx, i); err != nil && ctx.Err() == nil {
					fail(err)
					return
				}
				if i == 0 {
					fmt.Println("works")
				}
			}
		})
	case sums:
		s, err := kv.NewServer[float32](n, 0)
		if err != nil {
			return err
		}
		s.SimpleApp().SetRequestHandle(func(d kv.SimpleData, a *kv.SimpleApp) {
			if err := a.Response(d, fmt.Appendf(nil, "%d %s", d.Head, d.Body)); err != nil {
				fail(err)
			}
		})
		if err := s.SetRequestHandle(new(kv.SummingHandler[float32]).Handle); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	last := ""
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		last = in.Text()
	}
	cancel()
	wg.Wait()
	if last == "leave" {
		return n.Finalize(context.Background())
	}
	return nil
}

// process is a child.
type process struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string   // of standard output
	done  chan struct{} // closed when it has ended
	errs  text
}

// text is what a process has written.
type text struct {
	mu sync.Mutex
	b  strings.Builder
}

func (x *text) Write(b []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.Write(b)
}

func (x *text) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.String()
}

// spawn starts the test binary as a node of c on host, which is from 1. It ends with
// the test.
func (c *cluster) spawn(role string, rank int, what string, host int) *process {
	c.t.Helper()
	command := []string{os.Args[0]}
	if host > 1 {
		command = append([]string{"rdma-host", strconv.Itoa(host)}, command...)
	}
	p := &process{t: c.t, name: fmt.Sprintf("%s %d (%s)", role, rank, what), lines: make(chan string, 1000), done: make(chan struct{})}
	p.cmd = exec.Command(command[0], command[1:]...)
	p.cmd.Env = append(append(os.Environ(), c.environ(role, rank, host)...), behaviour+"="+what)
	p.cmd.Stderr = &p.errs
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	p.stdin = stdin
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
		_ = p.cmd.Wait()
		close(p.done)
	}()
	c.t.Cleanup(func() {
		p.kill()
		for more := true; more; {
			select {
			case line := <-p.lines:
				if strings.HasPrefix(line, "failed: ") {
					c.t.Errorf("%s: %s", p.name, line)
				}
			default:
				more = false
			}
		}
		if c.t.Failed() {
			c.t.Logf("standard error of %s:\n%s", p.name, p.errs.String())
		}
	})
	return p
}

// expect waits until the child writes a line.
func (p *process) expect(want string) {
	p.t.Helper()
	limit := time.After(30 * time.Second)
	for {
		select {
		case line := <-p.lines:
			if line == want {
				return
			}
			if strings.HasPrefix(line, "failed: ") {
				p.t.Fatalf("%s: %s", p.name, line)
			}
		case <-p.done:
			p.t.Fatalf("%s ended before it wrote %q: %s\n%s", p.name, want, p.cmd.ProcessState, p.errs.String())
		case <-limit:
			p.t.Fatalf("%s never wrote %q", p.name, want)
		}
	}
}

// kill ends the child as a crash would.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// leave tells the child to leave in order once the others do.
func (p *process) leave() {
	_, _ = io.WriteString(p.stdin, "leave\n")
	_ = p.stdin.Close()
}

// left checks that it has.
func (p *process) left() {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.t.Fatalf("%s does not end", p.name)
	}
	if !p.cmd.ProcessState.Success() {
		p.t.Errorf("%s: %s", p.name, p.cmd.ProcessState)
	}
}
