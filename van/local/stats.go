package local

import (
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// stats are the van's counters, which need no lock.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64
	refused                               atomic.Uint64 // values for which the device had no memory
	unsent                                atomic.Uint64 // messages refused because too much was unsent
	fenced                                atomic.Uint64 // messages dropped because their process was replaced
	late                                  atomic.Uint64 // answers dropped because their request ended while they arrived
	pinned                                atomic.Int64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }

// add returns the sums of o, the counters of the van inside, and s.
func (s *stats) add(o van.Stats) van.Stats {
	o.SentMessages += s.sentN.Load()
	o.SentBytes += s.sentB.Load()
	o.ReceivedMessages += s.recvN.Load()
	o.ReceivedBytes += s.recvB.Load()
	o.Malformed += s.malformed.Load()
	o.LentValues += uint64(s.pinned.Load())
	o.RefusedSends += s.unsent.Load()
	o.FencedMessages += s.fenced.Load()
	o.LateAnswers += s.late.Load()
	return o
}
