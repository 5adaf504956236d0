package logx

// The choice of the events that are logged, if many are similar.

import (
	"log/slog"
	"sync"
	"sync/atomic"
)

// Sparse chooses the events of one cause that are logged: the 1st, 2nd, 4th, 8th and so on, so that many events make
// few lines. The zero value is ready. It is safe for concurrent use and allocates nothing.
type Sparse struct{ n atomic.Uint64 }

// Next counts one more event. It returns the count, and whether to log this event.
func (s *Sparse) Next() (n uint64, show bool) {
	n = s.n.Add(1)
	return n, n&(n-1) == 0
}

// Count returns the number of events.
func (s *Sparse) Count() uint64 { return s.n.Load() }

// maxCauses bounds the number of causes in a Causes.
const maxCauses = 256

// Causes is a Sparse for each of several causes, which are texts. The zero value is ready. It is safe for concurrent
// use. Its memory is bounded: all causes after the first 256 are counted as one.
type Causes struct {
	mu sync.Mutex
	m  map[string]*Sparse
}

// Next counts one more event of cause. It returns the count, and whether to log this event.
func (c *Causes) Next(cause string) (n uint64, show bool) {
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

// silent logs nothing.
var silent = slog.New(slog.DiscardHandler)

// Log counts one more event of cause, and returns the logger for it: l with the count as "so far", or a logger that
// writes nothing.
func (c *Causes) Log(l *slog.Logger, cause string) *slog.Logger {
	n, show := c.Next(cause)
	if !show {
		return silent
	}
	return slog.New(&late{l.Handler(), []slog.Attr{slog.Uint64("so far", n)}})
}

// maxKind bounds the text of a cause.
const maxKind = 160

// Kind returns the text of err without its digits, for Causes: it is the same for errors that differ only in numbers,
// ids and addresses.
func Kind(err error) string {
	text := err.Error()
	b := make([]byte, 0, min(len(text), maxKind))
	for i := 0; i < len(text) && len(b) < maxKind; i++ {
		if c := text[i]; !isDigit(c) {
			b = append(b, c)
		}
	}
	return string(b)
}

// PeerKind is Kind without quoted text and without words that have an address. A peer chooses both: with them it could invent causes, each of
// which has lines of its own, until Causes counts all further causes as one.
func PeerKind(err error) string {
	text := err.Error()
	b := make([]byte, 0, min(len(text), maxKind))
	word, quoted := 0, false // word begins at b[word]
	for i := 0; i < len(text) && len(b) < maxKind; i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted || isDigit(c):
		case c == ':' && i+1 < len(text) && isDigit(text[i+1]):
			for b = b[:word]; i+1 < len(text) && text[i+1] != ' '; i++ {
			}
		default:
			if b = append(b, c); c == ' ' {
				word = len(b)
			}
		}
	}
	return string(b)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
