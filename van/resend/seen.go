package resend

// The memory of received messages, which recognises duplicates.

import (
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// Limits of the memory of received messages.
const (
	windowSize = 1 << 16       // timestamps of one stream: 8 KiB
	maxWindow  = 1 << 23       // likewise, after growth: 1 MiB
	maxGrowth  = 2 * maxWindow // of all windows of one process of a peer together, in timestamps
	maxStreams = 64            // streams of one peer
	maxPeers   = 256           // more only if they are connected
	maxLives   = 2             // processes of one peer
)

// stream identifies a sequence of timestamps, by fields that signatures lack, too.
type stream struct {
	app, customer         int32
	cmd                   van.Command
	request, push, simple bool
}

// peer is the memory of one node id. Requests of a process may arrive before the node record
// that assigns the id to it, so each process has its own history.
type peer struct {
	connected   bool
	incarnation uint32 // in its record; 0: a C++ StepMesh node, or a scheduler that is not known yet
	lives       []*history
}

// history records the messages received from one process.
type history struct {
	incarnation uint32 // 0: not known
	clock       uint64
	streams     map[stream]*window
	grown       int // timestamps by which the windows have grown
}

// of returns the history of the process whose messages carry the incarnation from.
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

// window records which of the last timestamps up to top have been received. It has windowSize timestamps at first. A process may
// send more while a message that it sends again is on the way: reserve then doubles the window.
type window struct {
	used uint64 // history.clock at the last use
	any  bool
	top  int32
	bits []uint64

	passed int    // how far top has advanced in the present half of the window
	since  uint64 // clock.Now when that half began
}

func newWindow(now uint64) *window {
	return &window{bits: make([]uint64, windowSize/64), since: now}
}

// size is the number of timestamps that w records, a power of two.
func (w *window) size() int { return 64 * len(w.bits) }

func (w *window) bit(ts int32) (word *uint64, mask uint64) {
	i := int(ts) & (w.size() - 1)
	return &w.bits[i/64], 1 << (i % 64)
}

// add records ts. It returns true if ts was received before or is too old to tell.
// Timestamps have 31 bits and wrap around.
func (w *window) add(ts int32) bool {
	ts &= math.MaxInt32
	if !w.any {
		w.any, w.top = true, ts
	}
	ahead := int(w.ahead(ts))
	switch {
	case ahead >= w.size():
		clear(w.bits)
		w.top = ts
	case ahead > 0:
		for w.top != ts {
			w.top = (w.top + 1) & math.MaxInt32
			word, mask := w.bit(w.top)
			*word &^= mask
		}
	case w.forgotten(ts):
		return true
	}
	word, mask := w.bit(ts)
	was := *word&mask != 0
	*word |= mask
	return was
}

// reserve is called before add(ts). It doubles w while top advances by half of w in less time than life, so that w remembers each
// timestamp for at least life. w grows by room timestamps at most; reserve returns the growth.
func (w *window) reserve(nano func() uint64, ts int32, life time.Duration, room int) (grown int) {
	ahead := int(w.ahead(ts & math.MaxInt32))
	if !w.any || ahead <= 0 || ahead >= maxWindow {
		return 0
	}
	if w.passed += ahead; w.passed < w.size()/2 {
		return 0
	}
	now := nano()
	for w.passed >= w.size()/2 {
		if size := w.size(); time.Duration(now-w.since) < life && size < maxWindow && grown+size <= room {
			w.double()
			grown += size
			continue
		}
		w.since, w.passed = now, w.passed-w.size()/2
	}
	return grown
}

// double doubles w. Timestamps that w has forgotten stay so: they count as received.
func (w *window) double() {
	old := *w
	w.bits = make([]uint64, 2*len(old.bits))
	for i := range w.bits {
		w.bits[i] = math.MaxUint64
	}
	for i := range old.size() {
		ts := (w.top - int32(i)) & math.MaxInt32
		if word, mask := old.bit(ts); *word&mask == 0 {
			word, mask = w.bit(ts)
			*word &^= mask
		}
	}
}

// ahead returns by how many timestamps ts, which has 31 bits, is ahead of top.
func (w *window) ahead(ts int32) int32 { return (ts - w.top) << 1 >> 1 }

// forgotten reports whether ts is too old to tell whether it was received.
func (w *window) forgotten(ts int32) bool { return w.any && int(w.ahead(ts)) <= -w.size() }

// isOtherProcess reports whether from is the incarnation of another process than the connected
// one.
func (p *peer) isOtherProcess(from uint32) bool {
	return p.connected && p.incarnation != 0 && from != 0 && from != p.incarnation
}

// memory records the received messages of all peers.
type memory struct {
	life  time.Duration // no message is sent again later than this after it was sent first
	mu    sync.Mutex
	peers map[int]*peer
}

// fromOtherProcess reports whether m is from another process than the one that is connected under its
// sender's id.
func (r *memory) fromOtherProcess(m *van.Message) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[m.Sender]
	from, _ := m.Incarnations()
	return p != nil && p.isOtherProcess(from)
}

// note records m. duplicate says that m was received before; other, that it is from another process
// than the one that is connected under its sender's id.
func (r *memory) note(m *van.Message) (duplicate, other bool) {
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
	other = p.isOtherProcess(from)
	h := p.of(m.Sender, from)
	h.clock++
	id := stream{m.AppID, m.CustomerID, m.Control.Cmd, m.Request, m.Push, m.SimpleApp}
	w := h.streams[id]
	if w == nil {
		if len(h.streams) >= maxStreams {
			h.evict()
		}
		w = newWindow(clock.Now())
		h.streams[id] = w
	}
	w.used = h.clock
	if p.connected {
		h.grown += w.reserve(clock.Now, m.Timestamp, r.life, maxGrowth-h.grown)
	}
	if isAnswer := !m.Request && !m.IsControl(); isAnswer && w.forgotten(m.Timestamp) {
		return false, other // the application knows whether it waits for the answer
	}
	return w.add(m.Timestamp), other
}

// evict removes the least recently used stream.
func (h *history) evict() {
	var oldest stream
	at := h.clock + 1
	for s, w := range h.streams {
		if w.used < at {
			oldest, at = s, w.used
		}
	}
	if w := h.streams[oldest]; w != nil {
		h.grown -= w.size() - windowSize
	}
	delete(h.streams, oldest)
}

// begin records that peer id is connected to the process of node. If the id was connected before, the
// histories of other processes are removed; that of this process stays.
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
			if id == van.SchedulerID { // its record has no incarnation
				return h.incarnation == 0
			}
			return h.incarnation == 0 || h.incarnation != incarnation
		})
	}
	p.connected, p.incarnation = true, incarnation
}

// rename changes a connected peer's id. Messages with the new id may have arrived already.
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

// remove removes the memory of a peer.
func (r *memory) remove(id int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.peers, id)
}
