package kv_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// lines is a buffer that several nodes write to.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Split(strings.TrimSpace(l.b.String()), "\n")
}

// TestEveryLineSaysWho: each line of a log that the program has set has the node's role, rank and id. This holds for the lines
// of the transport, of the node and of the application.
func TestEveryLineSaysWho(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		l := &lines{}
		o.Log = slog.New(slog.NewJSONHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})).With("job", "test").WithGroup("node")
		o.Set = func(c *postoffice.Config) { c.Resend = true }
		c := testcluster.Start(t, o)
		var sums kv.SummingHandler[float32]
		s := serve(t, c.Servers[0], sums.Handle)
		w := newWorker[float32](t, c.Workers[0])
		do(t, w)(w.Push([]kv.Key{1}, []float32{1}))
		if call, err := w.Push([]kv.Key{1}, []float32{1, 2}); err == nil { // refused, with a line
			_ = call.Wait(t.Context())
		}
		w.Close()
		s.Close()
		c.Finalize(t)
		named := map[string]bool{}
		for _, line := range l.all() {
			var x struct {
				Job  string
				Msg  string
				Node struct {
					Role string
					Rank any
					ID   any
				}
			}
			if err := json.Unmarshal([]byte(line), &x); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			if x.Node.Role == "" || x.Node.Rank == nil || x.Node.ID == nil || x.Job != "test" {
				t.Errorf("a line without role, rank or id: %s", line)
			}
			named[x.Node.Role] = true
			named[x.Msg] = true
		}
		for _, want := range []string{"scheduler", "server", "worker", "summing handler: request failed", "all nodes are known"} {
			if !named[want] {
				t.Errorf("no line of or with %q", want)
			}
		}
	})
}

// TestSkewIsSaid: if all keys of a worker belong to one of two servers, the worker logs one line. A worker with spread keys does not.
func TestSkewIsSaid(t *testing.T) {
	for _, spread := range []bool{false, true} {
		l := &lines{}
		c := testcluster.Start(t, testcluster.Options{Servers: 2, Log: slog.New(slog.NewJSONHandler(l, nil))})
		var sums kv.SummingHandler[float32]
		for _, n := range c.Servers {
			serve(t, n, sums.Handle)
		}
		w := newWorker[float32](t, c.Workers[0])
		for i := range 1100 {
			key := kv.Key(i % 64)
			if spread {
				key = kv.SpreadKey(key)
			}
			do(t, w)(w.Push([]kv.Key{key}, []float32{1}))
			if i == 998 { // the 1000th request has no keys
				do(t, w)(w.Push(nil, nil))
			}
		}
		want := 1
		if spread {
			want = 0
		}
		if n := strings.Count(strings.Join(l.all(), "\n"), "one server owns all keys of the first requests"); n != want {
			t.Errorf("spread %t: said %d times, want %d", spread, n, want)
		}
	}
}
