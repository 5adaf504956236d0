package logx_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van/env"
)

func config(t testing.TB, environ ...string) *env.Config {
	t.Helper()
	c, err := env.LoadFrom(env.FromList(environ))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// emit sends a record with a fixed time and no source through log's handler.
func emit(t *testing.T, log *slog.Logger, msg string, args ...any) {
	t.Helper()
	r := slog.NewRecord(time.Date(2025, 7, 1, 9, 8, 7, 0, time.UTC), slog.LevelWarn, msg, 0)
	r.Add(args...)
	if err := log.Handler().Handle(context.Background(), r); err != nil {
		t.Fatal(err)
	}
}

type live struct{ n *atomic.Int64 }

func (l live) LogValue() slog.Value { return slog.Int64Value(l.n.Load()) }

func TestLine(t *testing.T) {
	worker := []string{"DMLC_ROLE=worker", "STEPMESH_GPU=3"}
	tests := []struct {
		name    string
		environ []string
		with    func(*slog.Logger) *slog.Logger
		msg     string
		args    []any
		want    string
	}{
		{"nothing known", nil, nil, "hello", nil, "[09:08:07] - - r-/- -: hello\n"},
		{"role and gpu", worker, nil, "hello", nil, "[09:08:07] worker 3 r-/- -: hello\n"},
		{"gpu 0 that was set", []string{"DMLC_ROLE=server", "STEPMESH_GPU=0"}, nil, "m", nil, "[09:08:07] server 0 r-/- -: m\n"},
		{"scheduler without gpu", []string{"DMLC_ROLE=scheduler"}, func(l *slog.Logger) *slog.Logger { return l.With("id", 1) }, "m", nil,
			"[09:08:07] scheduler - r-/1 -: m\n"},
		{"rank and id", worker, func(l *slog.Logger) *slog.Logger { return l.With("rank", 3, "id", 15) }, "m", []any{"k", 1},
			"[09:08:07] worker 3 r3/15 -: m k=1\n"},
		{"id is replaced", worker, func(l *slog.Logger) *slog.Logger { return l.With("id", 32767).With("rank", -1).With("id", 15) }, "m", nil,
			"[09:08:07] worker 3 r-/15 -: m\n"},
		{"no id yet", worker, func(l *slog.Logger) *slog.Logger { return l.With("id", 32767) }, "m", nil, "[09:08:07] worker 3 r-/- -: m\n"},
		{"role is replaced", worker, func(l *slog.Logger) *slog.Logger { return l.With("role", "joint", "gpu", 0) }, "m", nil,
			"[09:08:07] joint 0 r-/- -: m\n"},
		{"id of a record is a peer's", worker, nil, "peer", []any{"id", 9}, "[09:08:07] worker 3 r-/- -: peer id=9\n"},
		{"id in a group is not ours", worker, func(l *slog.Logger) *slog.Logger { return l.WithGroup("peer").With("id", 9) }, "m", []any{"x", true},
			"[09:08:07] worker 3 r-/- -: m peer.id=9 peer.x=true\n"},
		{"with", nil, func(l *slog.Logger) *slog.Logger { return l.With("a", 1).With("b", "x y") }, "m", []any{"c", 2.5},
			"[09:08:07] - - r-/- -: m a=1 b=\"x y\" c=2.5\n"},
		{"kinds", nil, nil, "m", []any{"d", 1500 * time.Millisecond, "u", uint64(1 << 63), "e", errors.New("it broke"), "n", nil,
			"t", time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC), "s", ""},
			"[09:08:07] - - r-/- -: m d=1.5s u=9223372036854775808 e=\"it broke\" n=<nil> t=2025-01-02T03:04:05Z s=\"\"\n"},
		{"groups", nil, nil, "m", []any{slog.Group("g", "a", 1, slog.Group("h", "b", 2)), slog.Group("", "c", 3), slog.Group("empty")},
			"[09:08:07] - - r-/- -: m g.a=1 g.h.b=2 c=3\n"},
		{"empty attribute", nil, nil, "m", []any{slog.Attr{}, "a", 1}, "[09:08:07] - - r-/- -: m a=1\n"},
		{"stays one line", nil, nil, "two\nlines\x1b[31m", []any{"a b", "x\ny", "utf8", "\xff"},
			"[09:08:07] - - r-/- -: two\\nlines\\x1b[31m \"a b\"=\"x\\ny\" utf8=\"\\xff\"\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			log := logx.New(&out, config(t, tt.environ...))
			if tt.with != nil {
				log = tt.with(log)
			}
			emit(t, log, tt.msg, tt.args...)
			if out.String() != tt.want {
				t.Errorf("got  %q\nwant %q", out.String(), tt.want)
			}
		})
	}
}

func TestLiveIdentity(t *testing.T) {
	var out bytes.Buffer
	var id atomic.Int64
	id.Store(-1)
	log := logx.New(&out, config(t)).With(logx.ID, live{&id}).With("part", "van")
	emit(t, log, "before")
	id.Store(12)
	emit(t, log, "after")
	want := "[09:08:07] - - r-/- -: before part=van\n[09:08:07] - - r-/12 -: after part=van\n"
	if out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestSourceAndTime(t *testing.T) {
	var out bytes.Buffer
	logx.New(&out, config(t)).Warn("here")
	if ok, _ := regexp.MatchString(`^\[\d\d:\d\d:\d\d\] - - r-/- logx_test.go:\d+: here\n$`, out.String()); !ok {
		t.Errorf("got %q", out.String())
	}
	out.Reset()
	r := slog.NewRecord(time.Time{}, slog.LevelWarn, "no time", 0)
	if err := logx.New(&out, config(t)).Handler().Handle(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	if want := "[--:--:--] - - r-/- -: no time\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestLevels(t *testing.T) {
	for verbose, want := range map[string]string{
		"-1": "", "0": "WE", "1": "IWE", "2": "DIWE", "3": "3DIWE", "4": "43DIWE",
	} {
		t.Run(verbose, func(t *testing.T) {
			var out bytes.Buffer
			log := logx.New(&out, config(t, "PS_VERBOSE="+verbose))
			for _, l := range []struct {
				level slog.Level
				name  string
			}{{-12, "4"}, {-8, "3"}, {slog.LevelDebug, "D"}, {slog.LevelInfo, "I"}, {slog.LevelWarn, "W"}, {slog.LevelError, "E"}} {
				log.Log(context.Background(), l.level, l.name)
			}
			var got string
			for line := range strings.Lines(out.String()) {
				got += strings.TrimSpace(line[strings.LastIndex(line, ": ")+2:])
			}
			if got != want {
				t.Errorf("PS_VERBOSE=%s shows %q, want %q", verbose, got, want)
			}
		})
	}
}

// onceWriter fails the test when writes overlap or are not whole lines.
type onceWriter struct {
	t     *testing.T
	busy  atomic.Bool
	lines atomic.Int64
}

func (w *onceWriter) Write(p []byte) (int, error) {
	if !w.busy.CompareAndSwap(false, true) {
		w.t.Error("writes overlap")
	}
	defer w.busy.Store(false)
	if bytes.Count(p, []byte("\n")) != 1 || p[len(p)-1] != '\n' {
		w.t.Errorf("not one line: %q", p)
	}
	w.lines.Add(1)
	return len(p), nil
}

func TestConcurrent(t *testing.T) {
	const loggers, lines = 8, 200
	w := &onceWriter{t: t}
	base := logx.New(w, config(t)).With("shared", 1)
	var wg sync.WaitGroup
	for i := range loggers {
		wg.Go(func() {
			log := base.With("i", i)
			for j := range lines {
				log.Warn("line", "j", j)
			}
		})
	}
	wg.Wait()
	if n := w.lines.Load(); n != loggers*lines {
		t.Errorf("%d lines, want %d", n, loggers*lines)
	}
}

// Loggers that derive from the same one must not overwrite each other's attributes.
func TestSiblings(t *testing.T) {
	var out bytes.Buffer
	base := logx.New(&out, config(t)).With("base", strings.Repeat("x", 20))
	a, b := base.With("k", "a"), base.With("k", "b")
	emit(t, a, "m")
	emit(t, b, "m")
	if s := out.String(); strings.Count(s, "k=a") != 1 || strings.Count(s, "k=b") != 1 {
		t.Errorf("got %q", s)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestWriteError(t *testing.T) {
	h := logx.New(failing{}, config(t)).Handler()
	err := h.Handle(context.Background(), slog.NewRecord(time.Time{}, slog.LevelWarn, "m", 0))
	if !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
}

func TestDisabledDoesNotAllocate(t *testing.T) {
	log := logx.New(io.Discard, config(t)).With("rank", 1)
	ctx, key := context.Background(), uint64(1<<40)
	for name, f := range map[string]func(){
		"Debug":        func() { log.Debug("message", "sender", "worker") },
		"LogAttrs":     func() { log.LogAttrs(ctx, slog.LevelDebug, "message", slog.Uint64("key", key)) },
		"Enabled":      func() { log.Enabled(ctx, slog.LevelDebug) },
		"Info no args": func() { log.Info("message") },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations, want 0", name, n)
		}
	}
}

func BenchmarkDisabled(b *testing.B) {
	log := logx.New(io.Discard, config(b))
	b.ReportAllocs()
	for b.Loop() {
		log.LogAttrs(context.Background(), slog.LevelDebug, "message", slog.Int("sender", 1234))
	}
}

func BenchmarkLine(b *testing.B) {
	log := logx.New(io.Discard, config(b)).With("rank", 1, "id", 11)
	b.ReportAllocs()
	for b.Loop() {
		log.LogAttrs(context.Background(), slog.LevelWarn, "message", slog.Int("sender", 1234), slog.String("what", "push"))
	}
}

// TestPrintable: the text of another process cannot break a line, or disturb a terminal.
func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{"worker 3": "worker 3", "a\nb\r\x1b[31mc\u202e": "a b  [31mc ", "\xffx": "?x", "größe": "größe", "": ""} {
		if got := logx.Printable(in); got != want {
			t.Errorf("%q is printed as %q, want %q", in, got, want)
		}
	}
}
