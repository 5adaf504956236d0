package session

// Heads of messages, for tests outside.
const (
	WantOpen   = wantOpen
	WantAbort  = wantAbort
	WantLeave  = wantLeave
	WantForget = wantForget
)

// SetLongest sets how long a message may be.
func (s *Session) SetLongest(n int) { s.longest = n }

// MaxKills is how many handles a message gives up at most.
const MaxKills = maxKills
