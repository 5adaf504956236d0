package membership

// Who is alive, on the scheduler: what a death or a return means to open barriers, and what the
// nodes are told of each other, records of the table and notices.

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

type watch struct {
	base
	barriers     *barriers
	lastReplaced time.Duration    // when a node was last replaced; 0: never
	unheard      map[int]*unheard // replacements, by id
}

// unheard is a replacement of this library that no message has come from since it was sent the
// table. That may be lost: the connection to the process before, at the same address, may take the
// place of the new one after the table was written. A node that lacks it only waits, so it is sent
// again.
type unheard struct {
	at    time.Duration // of the next table
	pause time.Duration
	left  int
}

const (
	tableRepeats = 4               // at most
	tableRepeat  = 2 * time.Second // after the first time; each pause is twice the one before
)

// open begins the life of a cluster of these nodes.
func (w *watch) open(now time.Duration, nodes []van.Node) {
	w.life.phase, w.alive.lastCheck = ready, now
	w.table.fill(nodes)
	w.alive.begin(now, van.SchedulerID)
	for id, i := range w.table.at {
		w.alive.begin(now, id)
		w.table.learn(id, &nodes[i])
	}
}

func (w *watch) down(now time.Duration, id int, r reason, cause error) {
	h := w.alive.peers[id]
	wasCut := h.down != 0 && lossVerb(h.cause) == verbCut
	switch first := w.alive.markDown(now, id, r, cause); {
	case first:
		w.tellAll(id, notice{verb: lossVerb(cause), id: id, text: cause.Error()})
		w.barriers.recheck(now)
	case wasCut && r == silent && !w.life.leaving: // a node that has passed over the cut must hear of this
		h.cause = &lossError{text: fmt.Sprintf("%s, and %s", h.cause, cause)}
		w.tellAll(id, notice{verb: verbDead, id: id, text: h.cause.Error()})
	}
}

func (w *watch) up(now time.Duration, id int, r reason) {
	if w.alive.markUp(now, id, r) {
		w.tellAll(id, notice{verb: verbBack, id: id})
		w.catchUp(id)
		w.barriers.recheck(now)
	}
}

func (w *watch) heard(now time.Duration, id int) {
	if w.alive.heard(now, id) {
		w.up(now, id, silent)
	}
}

func (w *watch) records(id int, nodes []van.Node) {
	meta := w.out.control(van.AddNode)
	meta.Control.Nodes = nodes
	if w.table.native(id) {
		meta.Key = uint64(w.table.generation)
	}
	w.out.send(id, meta)
}

// recordsToAll sends the whole table to all nodes.
func (w *watch) recordsToAll() {
	whole := w.table.whole()
	for _, id := range w.table.ids() {
		w.records(id, whole)
	}
}

// introduce sends a node the whole table, and which nodes of it are dead.
func (w *watch) introduce(to int) {
	w.records(to, w.table.whole())
	for _, id := range w.table.ids() {
		if id != to && w.alive.isDown(id) {
			cause := w.alive.peers[id].cause
			w.out.tellAbout(to, notice{verb: lossVerb(cause), id: id, text: cause.Error()}, uint64(w.table.incs[id]))
		}
	}
}

// tellAll sends a notice about one worker or server to every other live one. Its key names
// the process that it is about, since it may arrive after the record of the next one.
func (w *watch) tellAll(about int, n notice) {
	for _, id := range w.table.ids() {
		if id != about && !w.alive.isDown(id) {
			w.out.tellAbout(id, n, uint64(w.table.incs[about]))
		}
	}
}

// catchUp tells a node that is back what it may have missed: notices and records that were sent
// while its connection was down, or were under way when it broke. A C++ StepMesh node gets the
// records of all live replacements, each in a message of its own, as at first; it ignores those
// whose address it is connected to.
func (w *watch) catchUp(id int) {
	h := w.alive.peers[id] // what was sent since it was last heard, or shortly before, may have been on its way for as long
	replaced := w.lastReplaced > 0 && w.lastReplaced >= min(h.heard, h.since-time.Second)
	if !w.table.native(id) {
		for i := range w.table.nodes {
			if n := &w.table.nodes[i]; replaced && n.ID != id && n.IsRecovery && !w.alive.isDown(n.ID) {
				w.records(id, []van.Node{*n})
			}
		}
		return
	}
	if replaced {
		w.records(id, w.table.whole())
	}
	var dead []string
	for _, o := range w.table.ids() {
		if o != id && w.alive.isDown(o) {
			dead = append(dead, strconv.Itoa(o))
		}
	}
	w.out.tell(id, notice{verb: verbDown, text: strings.Join(dead, ",")})
}

// expect begins to wait for a message of id, which has been sent the table.
func (w *watch) expect(now time.Duration, id int) {
	delete(w.unheard, id)
	if w.table.native(id) { // C++ StepMesh takes a second table for other nodes'
		w.unheard[id] = &unheard{at: now + tableRepeat, pause: tableRepeat, left: tableRepeats}
	}
}

func (w *watch) tick(now time.Duration) {
	for _, id := range w.alive.fallen(now) {
		w.down(now, id, silent, w.alive.silence(now, id))
	}
	for _, id := range sortedIDs(w.unheard) {
		u := w.unheard[id]
		switch {
		case w.alive.peers[id].heard > 0 || w.alive.isDown(id) || u.left == 0:
			delete(w.unheard, id)
		case now >= u.at:
			w.introduce(id)
			u.pause *= 2
			u.at, u.left = now+u.pause, u.left-1
		}
	}
}

func (w *watch) next() time.Duration {
	next := w.alive.nextCheck()
	for _, u := range w.unheard {
		next = min(next, u.at)
	}
	return next
}
