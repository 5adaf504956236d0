package session

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
)

// Heads of messages, for tests outside.
const (
	WantOpen   = wantOpen
	WantAbort  = wantAbort
	WantLeave  = wantLeave
	WantForget = wantForget
)

// SetLongest sets how long a message may be.
func (s *Session) SetLongest(n int) { s.longest = n }

// MaxKills is the largest number of handles that one message releases.
const MaxKills = maxKills

// Left is what a session has when no call is under way and no error waits for Sync, "" if nothing.
func (s *Session) Left() string {
	l := &s.calls
	l.mu.Lock()
	defer l.mu.Unlock()
	s.handles.mu.Lock()
	defer s.handles.mu.Unlock()
	if len(l.all) == 0 && l.bytes == 0 && len(l.errs) == 0 && l.more == 0 && len(s.handles.kills) == 0 {
		return ""
	}
	return fmt.Sprintf("%d calls with %d bytes, %d and %d errors, %d handles to be killed", len(l.all), l.bytes, len(l.errs), l.more, len(s.handles.kills))
}

// Live is how many handles are in use.
func (s *Session) Live() int {
	s.handles.mu.Lock()
	defer s.handles.mu.Unlock()
	return len(s.handles.live)
}

// SetConfirmTime replaces confirmTime. Call it before Serve.
func (r *Rank) SetConfirmTime(d time.Duration) { r.confirmTime = d }

// NotifyPause is notifyPause.
func NotifyPause(elapsed time.Duration) time.Duration { return notifyPause(elapsed) }

// Nobody is serving.nobody of a rank on n.
func Nobody(n *postoffice.Node, lost map[int]time.Time) (again time.Duration, err error) {
	return (&serving{r: &Rank{node: (*cluster.Node)(n).App()}}).nobody(lost)
}
