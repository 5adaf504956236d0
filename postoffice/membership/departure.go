package membership

// The end of a cluster, on the scheduler: it leaves when those who have asked for the end of the program are known to
// have their releases. One that is on its way when its connection breaks is lost, and nobody else can repeat it.

import (
	"fmt"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

const (
	releaseRepeat  = time.Second
	maxCut         = 10 * time.Second // instead of Config.HeartbeatTimeout, if that is longer or 0
	departureSlack = 5 * time.Second  // for connections to be made again after a cut that was too short for anybody to be dead
)

type departure struct {
	core
	key         barrierKey
	own         uint64         // names the scheduler's own request
	unconfirmed map[int]uint64 // by id, the requests of those who are not known to have their releases
	nextRepeat  time.Duration  // when these are repeated
	deadline    time.Duration  // when the scheduler leaves all the same
	logged      bool           // the log says whom it waits for
}

// limit is how long the scheduler waits at most: until a node that was cut off shortly before has been heard again, or is dead.
func (d *departure) limit() time.Duration {
	if t := d.cfg.HeartbeatTimeout; 0 < t && t < maxCut {
		return t + departureSlack
	}
	return maxCut + departureSlack
}

// start waits for the nodes of this library that came to the last barrier at the end of their programs. Others do not say
// that they have their releases. Who has given up, or been dead for longer than the limit, is not waited for.
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

// waiting tells whether the last barrier is over and the scheduler stays.
func (d *departure) waiting() bool { return len(d.unconfirmed) > 0 }

// leaveIfDone ends the scheduler's own wait, if there is nobody to wait for.
func (d *departure) leaveIfDone() {
	if !d.waiting() {
		d.out.release(van.SchedulerID, d.key.instance, 0, 0, d.own)
	}
}

// confirmed notes that a node waits no more for the release of a request.
func (d *departure) confirmed(from int, key barrierKey, request uint64) {
	if want, waits := d.unconfirmed[from]; waits && d.key == key && want == request {
		delete(d.unconfirmed, from)
		d.leaveIfDone()
	}
}

// repeat sends a node that may lack its release another one.
func (d *departure) repeat(id int) {
	if request, ok := d.unconfirmed[id]; ok {
		d.out.release(id, d.key.instance, 0, 0, request)
	}
}

// waitingFor says whom the scheduler waits for, "" if for nobody.
func (d *departure) waitingFor() string {
	if !d.waiting() {
		return ""
	}
	var names []string
	for _, id := range sortedIDs(d.unconfirmed) {
		names = append(names, d.table.peer(id))
	}
	return fmt.Sprintf("the %s barrier over %s, the last one, is over; not known to have heard of it: %s", kindName(d.key.instance), groupName(d.key.group), list(names))
}

func (d *departure) tick(now time.Duration) {
	if late := now - d.nextRepeat; d.waiting() && late > releaseRepeat { // this process stood still, and has not read what came
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
