// Package local tests shared memory between real processes: values, deaths in
// mid-transfer, and peers that are not within reach.
package local

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
)

// behaviour is the variable that makes the test binary a node of a cluster, and
// says what it does.
const behaviour = "LOCAL_CHILD"

// What children do.
const (
	echo   = "echo"   // a server that answers with what was pushed
	floods = "floods" // a worker that makes large requests without end
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

// child is a node in a process of its own. It ends when its standard input does.
func child(what string) error {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	n, err := postoffice.Start(context.Background(), postoffice.Options{Config: cfg,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))})
	if err != nil {
		return err
	}
	switch what {
	case echo:
		s, err := af.NewTensorServer(n, af.Options{})
		if err == nil {
			err = s.SetRequestHandle(func(b af.Batch) {
				if err := answer(b); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			})
		}
		if err != nil {
			return err
		}
	case floods:
		w, err := af.NewTensorWorker(n, af.Options{})
		if err != nil {
			return err
		}
		go func() {
			for i := 0; ; i++ {
				if err := roundTrip(w, i, 8<<20); err != nil {
					fmt.Fprintln(os.Stderr, err)
					return
				}
				if i == 0 {
					fmt.Println("begun")
				}
			}
		}()
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	n.Close()
	return err
}

// fill makes b a value of which every page is known by seq.
func fill(b []byte, seq int) {
	for off := 0; off+8 <= len(b); off += 512 {
		binary.LittleEndian.PutUint64(b[off:], uint64(seq)<<32|uint64(off))
	}
}

// check tells where b is not what fill makes of it.
func check(b []byte, seq int) error {
	for off := 0; off+8 <= len(b); off += 512 {
		if x := binary.LittleEndian.Uint64(b[off:]); x != uint64(seq)<<32|uint64(off) {
			return fmt.Errorf("byte %d of value %d: %#x", off, seq, x)
		}
	}
	return nil
}

// answer answers each pull of a batch with its first push.
func answer(b af.Batch) error {
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		out[i] = af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val}
	}
	return b.Response(out, nil)
}

// request pushes value seq of n bytes under key 1 and pulls as much under key 2.
func request(w *af.TensorWorker, seq, n int) (handler int32, pull []byte, err error) {
	x := make([]byte, n)
	fill(x, seq)
	pull = make([]byte, n)
	push, err := af.FromSlice(x)
	if err != nil {
		return 0, nil, err
	}
	dst, err := af.FromSlice(pull)
	if err != nil {
		return 0, nil, err
	}
	handler, err = w.ZBatchPushPull([]af.KeyTensor{{Key: 1, Val: push}}, []af.KeyTensor{{Key: 2, Val: dst}})
	return handler, pull, err
}

// roundTrip makes a request of a server that echoes, and compares.
func roundTrip(w *af.TensorWorker, seq, n int) error {
	h, pull, err := request(w, seq, n)
	if err != nil {
		return err
	}
	if err := w.Wait(context.Background(), h); err != nil {
		return err
	}
	return check(pull, seq)
}

// process is a child.
type process struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	lines chan string   // of standard output
	done  chan struct{} // closed when it has ended
	errs  output
}

// output collects what a child writes.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// spawn starts a child as a node of c. It ends with the test.
func spawn(t testing.TB, c *testcluster.Cluster, role string, rank int, what string, attr *syscall.SysProcAttr) *process {
	t.Helper()
	p := &process{t: t, lines: make(chan string, 100), done: make(chan struct{})}
	// Through a descriptor, so that another user can execute it, too.
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	p.cmd = exec.Command("/proc/self/fd/3")
	p.cmd.ExtraFiles = []*os.File{self}
	p.cmd.SysProcAttr = attr
	p.cmd.Dir = "/"
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
		t.Skipf("needs more rights than this process has: %v", err)
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

// elsewhere starts one node of a cluster as a child.
func elsewhere(t testing.TB, role, what string, attr *syscall.SysProcAttr, p **process) func(*testcluster.Cluster, string, int) bool {
	return func(c *testcluster.Cluster, r string, i int) bool {
		if r != role || i != 0 {
			return false
		}
		*p = spawn(t, c, role, 0, what, attr)
		return true
	}
}

// returns waits until peer id of n is there again, after join has made it come.
func returns(t testing.TB, n *postoffice.Node, id int, join func()) {
	t.Helper()
	back := make(chan struct{}, 16)
	defer n.OnPeer(func(i int, up bool, _ error) {
		if i == id && up {
			back <- struct{}{}
		}
	})()
	join()
	select {
	case <-back:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: node %d did not come back", n.Name(), id)
	}
}

func worker(t testing.TB, n *postoffice.Node) *af.TensorWorker {
	t.Helper()
	w, err := af.NewTensorWorker(n, af.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// eventually waits for what nothing signals.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(20 * time.Second); !ok(); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("never: %s", what)
		}
	}
}

const serverID, workerID = 8, 9
