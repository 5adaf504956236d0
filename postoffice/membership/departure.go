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
	base
	key   gatherKey
	own   uint64         // names the scheduler's own request
	waits map[int]uint64 // by id, the requests of those who are not known to have their releases
	again time.Duration  // when these are repeated
	until time.Duration  // when the scheduler leaves all the same
	told  bool           // the log says whom it waits for
}

// limit is how long the scheduler waits at most: until a node that was cut off shortly before has been heard again, or is dead.
func (d *departure) limit() time.Duration {
	if t := d.cfg.HeartbeatTimeout; 0 < t && t < maxCut {
		return t + departureSlack
	}
	return maxCut + departureSlack
}

// begin waits for the nodes of this library that came to the last barrier at the end of their programs. Others do not say
// that they have their releases. Who has given up, or been dead for longer than the limit, is not waited for.
func (d *departure) begin(now time.Duration, key gatherKey, came []arrival) {
	d.key, d.again, d.until = key, now+releaseRepeat, now+d.limit()
	d.waits = map[int]uint64{}
	for _, a := range came {
		switch {
		case a.id == van.SchedulerID:
			d.own = named(a.stamp)
		case a.final && !a.gone && d.table.native(a.id) && !(d.alive.isDown(a.id) && now-d.alive.peers[a.id].since >= d.limit()):
			d.waits[a.id] = named(a.stamp)
		}
	}
	d.leave()
}

// open tells whether the last barrier is over and the scheduler stays.
func (d *departure) open() bool { return len(d.waits) > 0 }

// leave ends the scheduler's own wait, if there is nobody to wait for.
func (d *departure) leave() {
	if !d.open() {
		d.out.release(van.SchedulerID, d.key.instance, 0, 0, d.own)
	}
}

// heard notes that a node waits no more for the release of a request.
func (d *departure) heard(from int, key gatherKey, request uint64) {
	if want, waits := d.waits[from]; waits && d.key == key && want == request {
		delete(d.waits, from)
		d.leave()
	}
}

// repeat sends a node that may lack its release another one.
func (d *departure) repeat(id int) {
	if request, ok := d.waits[id]; ok {
		d.out.release(id, d.key.instance, 0, 0, request)
	}
}

// text says whom the scheduler waits for, "" if for nobody.
func (d *departure) text() string {
	if !d.open() {
		return ""
	}
	var names []string
	for _, id := range sortedIDs(d.waits) {
		names = append(names, d.table.peer(id))
	}
	return fmt.Sprintf("the %s barrier over %s, the last one, is over; not known to have heard of it: %s", kindName(d.key.instance), groupName(d.key.group), list(names))
}

func (d *departure) tick(now time.Duration) {
	if late := now - d.again; d.open() && late > releaseRepeat { // this process stood still, and has not read what came
		d.until += late
	}
	switch {
	case !d.open():
	case now >= d.until:
		d.out.emit(Warning{Text: fmt.Sprintf("%s: leaves after %s: %s", d.table.name(), d.limit(), d.text())})
		clear(d.waits)
		d.leave()
	case now >= d.again:
		if !d.told {
			d.told = true
			d.out.emit(Warning{Text: fmt.Sprintf("%s: stays for up to %s: %s", d.table.name(), d.limit(), d.text())})
		}
		d.again = now + releaseRepeat
		for _, id := range sortedIDs(d.waits) {
			d.repeat(id)
		}
	}
}

func (d *departure) next() time.Duration {
	if !d.open() {
		return math.MaxInt64
	}
	return min(d.again, d.until)
}
