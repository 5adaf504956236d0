package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
)

// answer answers each pull of a batch with its first push.
func answer(b af.Batch) error {
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		out[i] = af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val}
	}
	return b.Response(out, nil)
}

// request pushes x under key 1 and pulls as much from each server under key 2.
func request(w *af.TensorWorker, servers int, x []byte) (handler int32, pulls [][]byte, err error) {
	push, err := af.FromSlice(x)
	if err != nil {
		return 0, nil, err
	}
	pull := make([]af.KeyTensor, servers)
	pulls = make([][]byte, servers)
	for s := range pull {
		pulls[s] = make([]byte, len(x))
		pull[s].Key = 2
		if pull[s].Val, err = af.FromSlice(pulls[s]); err != nil {
			return 0, nil, err
		}
	}
	handler, err = w.ZBatchPushPull([]af.KeyTensor{{Key: 1, Val: push}}, pull)
	return handler, pulls, err
}

// roundTrip makes a request of servers that echo, and compares.
func roundTrip(ctx context.Context, w *af.TensorWorker, servers int, x []byte) error {
	h, pulls, err := request(w, servers, x)
	if err != nil {
		return err
	}
	if err := w.Wait(ctx, h); err != nil {
		return err
	}
	for s := range pulls {
		if !bytes.Equal(pulls[s], x) {
			return fmt.Errorf("server %d returned %q, want %q", s, pulls[s], x)
		}
	}
	return nil
}

// serve makes n a tensor server.
func serve(t testing.TB, n *postoffice.Node, h af.Handler) {
	t.Helper()
	s, err := af.NewTensorServer(n, af.Options{})
	if err == nil {
		err = s.SetRequestHandle(h)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// echoes is a handler that reports its errors.
func echoes(t testing.TB) af.Handler {
	return func(b af.Batch) {
		if err := answer(b); err != nil {
			t.Error(err)
		}
	}
}

// serveAll makes all servers of this process echo.
func serveAll(t testing.TB, c *testcluster.Cluster) {
	t.Helper()
	for _, n := range c.Servers {
		if n != nil {
			serve(t, n, echoes(t))
		}
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

// work checks that requests of all of ws are answered.
func work(t testing.TB, servers int, ws ...*af.TensorWorker) {
	t.Helper()
	var wg sync.WaitGroup
	for i, w := range ws {
		wg.Go(func() {
			for k := range 5 {
				if err := roundTrip(t.Context(), w, servers, fmt.Appendf(nil, "worker %d round %d", i, k)); err != nil {
					t.Errorf("worker %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// fails checks that err wraps sentinel and names everything in texts.
func fails(t testing.TB, err, sentinel error, texts ...string) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Errorf("got %v, want an error that wraps %q", err, sentinel)
		return
	}
	for _, s := range texts {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q does not say %q", err, s)
		}
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// elsewhere starts one node of a cluster as a child.
func elsewhere(t testing.TB, role string, rank int, what string, p **process) func(*testcluster.Cluster, string, int) bool {
	return func(c *testcluster.Cluster, r string, i int) bool {
		if r != role || i != rank {
			return false
		}
		*p = spawn(t, c, role, rank, what)
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
	case <-within(t, 20*time.Second).Done():
		t.Fatalf("%s: node %d did not come back", n.Name(), id)
	}
}

// logText is a log that a test reads.
type logText struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{}
}

// logger writes everything to l, also a line for each message.
func (l *logText) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
	return l.b.Write(p)
}

// waitFor waits until a line of the log has all of texts.
func (l *logText) waitFor(t testing.TB, texts ...string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		l.mu.Lock()
		lines := strings.Split(l.b.String(), "\n")
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		if slices.ContainsFunc(lines, func(line string) bool {
			return !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(line, s) })
		}) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("the log never had %q:\n%s", texts, strings.Join(lines, "\n"))
		}
	}
}
