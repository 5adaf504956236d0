package resend

// The received messages, as far as they are remembered to recognise duplicates.

import (
	"math"
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// Bounds on the memory of received messages.
const (
	windowSize = 1 << 16 // timestamps of one stream: 8 KiB
	maxStreams = 64      // streams of one peer
	maxPeers   = 256     // more only if they are connected
	maxLives   = 2       // processes of one peer
)

// stream identifies a sequence of timestamps, by fields that signatures lack, too.
type stream struct {
	app, customer         int32
	cmd                   van.Command
	request, push, simple bool
}

// peer is the memory of one node id. A process's requests may arrive before the record
// that says that it has taken the id, so each process has a history of its own.
type peer struct {
	connected   bool
	incarnation uint32 // in its record; 0: a C++ StepMesh node, or a scheduler that is not known yet
	lives       []*history
}

// history is what has been received from one process.
type history struct {
	incarnation uint32 // 0: not known
	clock       uint64
	streams     map[stream]*window
}

// of returns the history of the process that marks its messages with from.
func (p *peer) of(id int, from uint32) *history {
	if p.connected && p.incarnation == 0 && id != van.SchedulerID || failpoint.On("incarnation") {
		from = 0 // C++ StepMesh does not set the field
	}
	for _, h := range p.lives {
		if h.incarnation == from {
			return h
		}
	}
	if len(p.lives) >= maxLives {
		i := 0
		if p.connected && p.lives[0].incarnation == p.incarnation {
			i = 1
		}
		p.lives = slices.Delete(p.lives, i, i+1)
	}
	h := &history{incarnation: from, streams: map[stream]*window{}}
	p.lives = append(p.lives, h)
	return h
}

// window holds which of the last windowSize timestamps up to top have been received.
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

// isAnother tells whether a message that is marked with from is of another process than the one
// that is connected.
func (p *peer) isAnother(from uint32) bool {
	return p.connected && p.incarnation != 0 && from != 0 && from != p.incarnation
}

// memory is that of all peers.
type memory struct {
	mu    sync.Mutex
	peers map[int]*peer
}

// isStranger tells whether m is of another process than the one that is connected under its
// sender's id.
func (r *memory) isStranger(m *van.Message) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[m.Sender]
	from, _ := m.Incarnations()
	return p != nil && p.isAnother(from)
}

// note notes m and reports whether it has come before, and whether it is of another process
// than the one that is connected under its sender's id.
func (r *memory) note(m *van.Message) (duplicate, stranger bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[m.Sender]
	if p == nil {
		if len(r.peers) >= maxPeers {
			return false, false
		}
		p = &peer{}
		r.peers[m.Sender] = p
	}
	from, _ := m.Incarnations()
	stranger = p.isAnother(from)
	h := p.of(m.Sender, from)
	h.clock++
	id := stream{m.AppID, m.CustomerID, m.Control.Cmd, m.Request, m.Push, m.SimpleApp}
	w := h.streams[id]
	if w == nil {
		if len(h.streams) >= maxStreams {
			h.evict()
		}
		w = &window{}
		h.streams[id] = w
	}
	w.used = h.clock
	return w.add(m.Timestamp), stranger
}

// evict removes the stream that was used least recently.
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

// begin notes that peer id is connected as node says. If it was connected before, what
// other processes with that id have sent is forgotten; what this process has sent is not.
func (r *memory) begin(id int, node *van.Node) {
	who, _ := node.Extension()
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[id]
	if p == nil {
		p = &peer{}
		r.peers[id] = p
	}
	p.follow(id, who.Incarnation)
}

// follow makes the process with the given incarnation the holder of the id.
func (p *peer) follow(id int, incarnation uint32) {
	if p.connected {
		p.lives = slices.DeleteFunc(p.lives, func(h *history) bool {
			if id == van.SchedulerID { // its record does not say which process it is
				return h.incarnation == 0
			}
			return h.incarnation == 0 || h.incarnation != incarnation
		})
	}
	p.connected, p.incarnation = true, incarnation
}

// rename gives a connected peer another id, from which messages may have come already.
func (r *memory) rename(old, id int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[old]
	if p == nil {
		return
	}
	delete(r.peers, old)
	if was := r.peers[id]; was != nil {
		was.follow(id, p.incarnation)
		p.lives = was.lives
	}
	r.peers[id] = p
}

// forget removes all that is known of a peer.
func (r *memory) forget(id int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.peers, id)
}
