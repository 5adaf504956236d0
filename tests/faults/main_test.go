// Package faults tests what failures and bad input get: an error that says who,
// what and what to do, in time, while the rest of the cluster works on.
package faults

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// behaviour is the variable that makes the test binary a node of a cluster, and
// says what it does.
const behaviour = "FAULTS_CHILD"

// What children do.
const (
	echo   = "echo"   // a server that answers with what was pushed
	mute   = "mute"   // a server that says when it has a batch, and never answers
	panics = "panics" // a server whose handler panics
	begins = "begins" // a worker that begins a batch and does not end it
	asks   = "asks"   // a worker that asks once, and waits
	works  = "works"  // a worker that makes 20 round trips, and waits
	rules  = "rules"  // a scheduler
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
// and ends when its standard input does.
func child(what string) error {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	n, err := postoffice.Start(context.Background(), postoffice.Options{Config: cfg, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	switch what {
	case echo, mute, panics:
		s, err := af.NewTensorServer(n, af.Options{})
		if err != nil {
			return err
		}
		if err := s.SetRequestHandle(func(b af.Batch) {
			switch what {
			case mute:
				fmt.Println("got a batch")
			case panics:
				panic("no idea what to do with this batch")
			default:
				if err := answer(b); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		}); err != nil {
			return err
		}
	case begins, asks, works:
		if err := childWorker(n, what); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	n.Close()
	return err
}

func childWorker(n *postoffice.Node, what string) error {
	if what == begins {
		for _, id := range n.ServerInstances() {
			if err := n.Send(pushMessage(id, 0, van.BatchStart, 1, []byte("a batch that nobody ends"))); err != nil {
				return err
			}
		}
		return nil
	}
	w, err := af.NewTensorWorker(n, af.Options{})
	if err != nil {
		return err
	}
	if what == asks {
		_, _, err := request(w, n.NumServers(), []byte("asked once"))
		return err
	}
	for i := range 20 {
		if err := roundTrip(context.Background(), w, n.NumServers(), fmt.Appendf(nil, "round %d", i)); err != nil {
			return err
		}
	}
	return nil
}

// pushMessage is a push as a tensor worker sends it.
func pushMessage(to int, ts int32, flag van.BatchFlag, key uint64, x []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.AppID, m.CustomerID, m.Timestamp = to, true, true, flag, 0, 0, ts
	m.Key, m.ValLen, m.IsTensor, m.Dtype, m.Dim = key, int32(len(x)), true, int32(af.Uint8), 1
	m.Shape[0] = int64(len(x))
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	m.Frames, m.Keys, m.Vals = 2, backend.Slice([]uint64{key}), backend.Bytes(x)
	m.DataSize = int32(m.PayloadLen())
	return m
}

// process is a child.
type process struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	lines chan string   // of standard output
	done  chan struct{} // closed when it has ended
	errs  strings.Builder
}

// spawn starts a child as a node of c. It ends with the test.
func spawn(t testing.TB, c *testcluster.Cluster, role string, rank int, what string) *process {
	t.Helper()
	p := &process{t: t, lines: make(chan string, 100), done: make(chan struct{})}
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(c.Environ(role, rank), behaviour+"="+what, "STEPMESH_BAKCEND=CPU", "STEPAF_START_TIMEOUT=20", "PATH="+os.Getenv("PATH"))
	p.cmd.Stderr = &p.errs
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
		_ = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("standard error of %s %d:\n%s", role, rank, p.errs.String())
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
		case <-p.done:
			p.t.Fatalf("the child ended before it wrote %q: %s\n%s", want, p.cmd.ProcessState, p.errs.String())
		case <-limit:
			p.t.Fatalf("the child never wrote %q", want)
		}
	}
}

// kill ends the child as a crash would.
func (p *process) kill() {
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	<-p.done
}

// finish lets the child leave.
func (p *process) finish() {
	p.t.Helper()
	_ = p.stdin.Close()
	<-p.done
	if !p.cmd.ProcessState.Success() {
		p.t.Errorf("child: %s\n%s", p.cmd.ProcessState, p.errs.String())
	}
}
