package resend

import (
	"math"

	"github.com/stepaf/stepaf-go/van"
)

// Bounds of what is remembered of received messages.
const (
	windowSize = 1 << 16 // timestamps of one stream: 8 KiB
	maxStreams = 64      // streams of one peer
	maxPeers   = 256     // more only if they are connected
)

// stream is one sequence of timestamps. It has what signatures lack.
type stream struct {
	app, customer         int32
	cmd                   van.Command
	request, push, simple bool
}

// history is what has been received from one peer.
type history struct {
	clock   uint64
	streams map[stream]*window
}

// window remembers the last windowSize timestamps up to top.
type window struct {
	used uint64 // history.clock at the last use
	any  bool
	top  int32
	bits [windowSize / 64]uint64
}

// add notes ts and reports whether it was there already or is too old to tell.
// Timestamps have 31 bits: after the largest come the small ones.
func (w *window) add(ts int32) bool {
	ts &= math.MaxInt32
	if !w.any {
		w.any, w.top = true, ts
	}
	ahead := (ts - w.top) << 1 >> 1
	switch {
	case ahead >= windowSize:
		clear(w.bits[:])
		w.top = ts
	case ahead > 0:
		for w.top != ts {
			w.top = (w.top + 1) & math.MaxInt32
			i := uint32(w.top) % windowSize
			w.bits[i/64] &^= 1 << (i % 64)
		}
	case ahead <= -windowSize:
		return true
	}
	i := uint32(ts) % windowSize
	was := w.bits[i/64]&(1<<(i%64)) != 0
	w.bits[i/64] |= 1 << (i % 64)
	return was
}

// note notes m and reports whether it has come before.
func (v *Van) note(m *van.Message) bool {
	v.seenMu.Lock()
	defer v.seenMu.Unlock()
	h := v.seen[m.Sender]
	if h == nil {
		if len(v.seen) >= maxPeers && !v.connected(m.Sender) {
			return false
		}
		h = &history{streams: map[stream]*window{}}
		v.seen[m.Sender] = h
	}
	h.clock++
	s := stream{m.AppID, m.CustomerID, m.Control.Cmd, m.Request, m.Push, m.SimpleApp}
	w := h.streams[s]
	if w == nil {
		if len(h.streams) >= maxStreams {
			h.evict()
		}
		w = &window{}
		h.streams[s] = w
	}
	w.used = h.clock
	return w.add(m.Timestamp)
}

// evict forgets the stream that was silent for longest.
func (h *history) evict() {
	var oldest stream
	at := h.clock + 1
	for s, w := range h.streams {
		if w.used < at {
			oldest, at = s, w.used
		}
	}
	delete(h.streams, oldest)
}

func (v *Van) connected(id int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, ok := v.conns[id]
	return ok
}

// forget lets a peer begin anew.
func (v *Van) forget(id int) {
	v.seenMu.Lock()
	defer v.seenMu.Unlock()
	delete(v.seen, id)
}
