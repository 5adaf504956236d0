package nodetest

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Text is the output of a process or a log. The zero value is ready for use, by
// several goroutines at once.
type Text struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{} // closed at the next Write; nil without waiters
}

func (x *Text) Write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.changed != nil {
		close(x.changed)
		x.changed = nil
	}
	return x.b.Write(p)
}

func (x *Text) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.String()
}

// Logger is a log in x of records of this level or above. At slog.LevelDebug nodes
// write a line for each message.
func (x *Text) Logger(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(x, &slog.HandlerOptions{Level: level}))
}

// Wait waits until a line has all of texts.
func (x *Text) Wait(t testing.TB, texts ...string) {
	t.Helper()
	if !x.Comes(nil, patience, texts...) {
		t.Fatalf("no line ever had %q:\n%s", texts, x)
	}
}

// Comes waits for the same, until over is closed or so long, and tells whether it has
// come.
func (x *Text) Comes(over <-chan struct{}, limit time.Duration, texts ...string) bool {
	deadline := time.After(limit)
	for last := false; ; {
		x.mu.Lock()
		lines := strings.Split(x.b.String(), "\n")
		if x.changed == nil {
			x.changed = make(chan struct{})
		}
		changed := x.changed
		x.mu.Unlock()
		if slices.ContainsFunc(lines, func(line string) bool {
			return !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(line, s) })
		}) {
			return true
		}
		if last {
			return false
		}
		select {
		case <-changed:
		case <-over:
			last = true // checks lines written just before
		case <-deadline:
			last = true
		}
	}
}
