package vantest

import (
	"bytes"
	"log/slog"
	"sync"
)

// Log records log output for tests. The zero value is ready for use. Concurrent writes
// and reads are allowed.
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

// String returns the complete output.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
