package postoffice_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// logText is a log that a test reads.
type logText struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{}
}

// logger writes to l, or nowhere when l is nil.
func (l *logText) logger() *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(l, nil))
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

// waitFor waits until the log has text.
func (l *logText) waitFor(t testing.TB, text string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		l.mu.Lock()
		s := l.b.String()
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		if strings.Contains(s, text) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("the log never had %q:\n%s", text, s)
		}
	}
}
