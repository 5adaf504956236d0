package session

// Handles: the names of results that are on the ranks, and which of them are in use.

import (
	"context"
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/van"
)

// Handle names a result that is on the ranks.
type Handle struct {
	s    *Session
	id   uint64
	made *call
}

// ID is the number of the handle, from 1; none is used twice in a session.
func (h *Handle) ID() uint64 { return h.id }

// Wait waits until the call that h is the result of has ended on all ranks, and returns its
// error: a RankError, or several joined, or why the session has failed. If ctx ends first,
// the call goes on; the error names the ranks that have not answered.
func (h *Handle) Wait(ctx context.Context) error { return h.made.wait(ctx) }

// maxKills is how many handles a message gives up at most.
const maxKills = 4096

// handles are those of a session.
type handles struct {
	mu    sync.Mutex
	live  map[uint64]bool
	kills []uint64 // that ranks have not been told of yet
}

// owns refuses handles that do not name anything in s.
func (s *Session) owns(h *Handle) error {
	s.handles.mu.Lock()
	defer s.handles.mu.Unlock()
	switch {
	case h == nil || h.s == nil:
		return fmt.Errorf("%w: not a handle of a call", van.ErrInvalid)
	case h.s != s:
		return fmt.Errorf("%w: handle %d of another session", van.ErrInvalid, h.id)
	case !s.handles.live[h.id]:
		return fmt.Errorf("%w: handle %d was killed", van.ErrInvalid, h.id)
	}
	return nil
}

// add puts one in use.
func (l *handles) add(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live[id] = true
}

// killed are those that the next message gives up; told, that n of them were given up.
func (l *handles) killed() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.kills[:min(len(l.kills), maxKills)]
}

func (l *handles) told(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kills = l.kills[n:]
}
