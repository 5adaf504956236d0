package logx

import (
	"sync"
	"sync/atomic"
)

// Sparse says which occurrences of one cause are worth a line: the 1st, 2nd, 4th,
// 8th and so on, so that a flood of events is no flood of lines. The zero value is
// ready. It is safe for concurrent use and allocates nothing.
type Sparse struct{ n atomic.Uint64 }

// Next counts one more and says how many there were and whether this one is to be
// logged.
func (s *Sparse) Next() (n uint64, speak bool) {
	n = s.n.Add(1)
	return n, n&(n-1) == 0
}

// maxCauses bounds what a Causes remembers.
const maxCauses = 256

// Causes is a Sparse for each of several causes that are known by a text. The zero
// value is ready. It is safe for concurrent use. What it remembers is bounded: all
// causes after the first 256 are counted as one.
type Causes struct {
	mu sync.Mutex
	m  map[string]*Sparse
}

// Next counts one more of cause and says how many there were and whether this one is
// to be logged.
func (c *Causes) Next(cause string) (n uint64, speak bool) {
	c.mu.Lock()
	s := c.m[cause]
	if s == nil {
		if c.m == nil {
			c.m = map[string]*Sparse{}
		}
		if len(c.m) >= maxCauses {
			cause = ""
		}
		if s = c.m[cause]; s == nil {
			s = new(Sparse)
			c.m[cause] = s
		}
	}
	c.mu.Unlock()
	return s.Next()
}

// maxKind bounds the text of a cause.
const maxKind = 160

// Kind is the text of err without its digits, for Causes: the same for errors that
// differ in numbers, ids and addresses only.
func Kind(err error) string {
	text := err.Error()
	b := make([]byte, 0, min(len(text), maxKind))
	for i := 0; i < len(text) && len(b) < maxKind; i++ {
		if c := text[i]; c < '0' || c > '9' {
			b = append(b, c)
		}
	}
	return string(b)
}
