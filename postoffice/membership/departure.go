package membership

// The end of a cluster, on the scheduler: it leaves when every node that has requested the last barrier is known to
// have its release. A release in flight is lost when its connection breaks, and only the scheduler can repeat it.

import (
	"fmt"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

const (
	releaseRepeat  = time.Second
	maxCut         = 10 * time.Second // instead of Config.HeartbeatTimeout, if that is longer or 0
	departureSlack = 5 * time.Second  // to reconnect after a cut that was too short for any node to be declared dead
)

// departure is the scheduler's wait after the last barrier.
type departure struct {
	core
	key         barrierKey
	own         uint64         // key of the scheduler's own request
	unconfirmed map[int]uint64 // by id, the request keys of nodes that may lack their releases
	nextRepeat  time.Duration  // time of the next repeated releases
	deadline    time.Duration  // time at which the scheduler leaves in any case
	logged      bool           // the log names the nodes that it waits for
}

// limit is the scheduler's longest wait: until a node whose connection was cut shortly before has reconnected, or is
// dead.
func (d *departure) limit() time.Duration {
	if t := d.cfg.HeartbeatTimeout; 0 < t && t < maxCut {
		return t + departureSlack
	}
	return maxCut + departureSlack
}

// start begins to wait for the nodes of this library that requested the last barrier at the end of their programs.
// Nodes of C++ StepMesh do not confirm their releases. Nodes that have canceled, or have been dead for longer than
// the limit, are not waited for.
func (d *departure) start(now time.Duration, key barrierKey, came []barrierRequest) {
	d.key, d.nextRepeat, d.deadline = key, now+releaseRepeat, now+d.limit()
	d.unconfirmed = map[int]uint64{}
	for _, a := range came {
		switch {
		case a.id == van.SchedulerID:
			d.own = requestKey(a.stamp)
		case a.ending && !a.left && d.table.native(a.id) && !(d.alive.isDead(a.id) && now-d.alive.peers[a.id].deadSince >= d.limit()):
			d.unconfirmed[a.id] = requestKey(a.stamp)
		}
	}
	d.leaveIfDone()
}

// waiting reports whether the last barrier is over and the scheduler stays.
func (d *departure) waiting() bool { return len(d.unconfirmed) > 0 }

// leaveIfDone ends the scheduler's own wait if all releases are confirmed.
func (d *departure) leaveIfDone() {
	if !d.waiting() {
		d.out.release(van.SchedulerID, d.key.instance, 0, 0, d.own)
	}
}

// confirmed notes that a node no longer waits for the release of a request.
func (d *departure) confirmed(from int, key barrierKey, request uint64) {
	if want, waits := d.unconfirmed[from]; waits && d.key == key && want == request {
		delete(d.unconfirmed, from)
		d.leaveIfDone()
	}
}

// repeat sends another release to a node that may lack its release.
func (d *departure) repeat(id int) {
	if request, ok := d.unconfirmed[id]; ok {
		d.out.release(id, d.key.instance, 0, 0, request)
	}
}

// waitingFor names the nodes that the scheduler waits for; "" if there are none.
func (d *departure) waitingFor() string {
	if !d.waiting() {
		return ""
	}
	var names []string
	for _, id := range sortedIDs(d.unconfirmed) {
		names = append(names, d.table.peer(id))
	}
	return fmt.Sprintf("the %s barrier over %s, the last one, is over; not yet confirmed by %s", kindName(d.key.instance), groupName(d.key.group), list(names))
}

func (d *departure) tick(now time.Duration) {
	if late := now - d.nextRepeat; d.waiting() && late > releaseRepeat { // this process was paused, and has not read its messages
		d.deadline += late
	}
	switch {
	case !d.waiting():
	case now >= d.deadline:
		d.out.emit(Warning{Text: fmt.Sprintf("%s: leaves after %s: %s", d.table.name(), d.limit(), d.waitingFor())})
		clear(d.unconfirmed)
		d.leaveIfDone()
	case now >= d.nextRepeat:
		if !d.logged {
			d.logged = true
			d.out.emit(Warning{Text: fmt.Sprintf("%s: stays for up to %s: %s", d.table.name(), d.limit(), d.waitingFor())})
		}
		d.nextRepeat = now + releaseRepeat
		for _, id := range sortedIDs(d.unconfirmed) {
			d.repeat(id)
		}
	}
}

func (d *departure) next() time.Duration {
	if !d.waiting() {
		return math.MaxInt64
	}
	return min(d.nextRepeat, d.deadline)
}
