package vantest

import (
	"bytes"
	"log/slog"
	"sync"
)

// Log keeps what is logged, for tests that look into it. The zero value is ready; it may
// be written and read at once.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Logger returns a logger that writes to l.
func (l *Log) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String is all that was logged.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
