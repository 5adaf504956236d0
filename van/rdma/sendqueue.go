package rdma

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// sendQueue posts work requests to the queue pairs of one connection, and keeps what they
// use until they have completed. Its user locks.
type sendQueue struct {
	dev           verbs.Device
	qps           []verbs.QP
	serial        uint32 // of the connection, in the IDs of work requests
	inline        int    // bytes that all queue pairs take inline
	depth         int
	perRecord     int    // work requests that one record may need on one queue pair
	longest       uint32 // the longest
	room          []int  // work requests that each queue pair takes
	stage         *block
	stageEach     int // bytes of stage for each record
	recs          []record
	free          []uint32
	unposted      []verbs.SendWR // not posted yet
	broken        bool
	seq           uint64
	failedRecords int        // records of which a work request has failed
	uncertain     []*inbound // whose slots have been given back, or not
}

// record is what is in flight under one ID.
type record struct {
	used    []int // work requests on each queue pair
	pending int   // completions to come
	done    van.Completion
	regions [van.MaxFrames]*region
	large   *block    // a meta that is too long for the stage
	n       int       // regions
	control *outgoing // a control message, until it has arrived
	seq     uint64    // of control messages
	data    bool      // it has data
	failed  bool      // a work request of it has failed
	// The slots that the message gives back, of connection back.
	creditsOf *inbound
	credits   [maxCredits]*receiveSlot
	returned  int
}

// maxWRs is the number of work requests that one message may need on one queue pair:
// one for each frame, one more as maxData bytes can be longer than maxWrite, and the
// meta.
const maxWRs = van.MaxFrames + 2

// maxWrite is the longest write that all devices take: ConnectX's max_msg_sz.
const maxWrite = 1 << 30

// newSendQueue makes a pipe of n records with each bytes of staging memory.
func newSendQueue(dev verbs.Device, qps []verbs.QP, serial uint32, depth, n, each int) (*sendQueue, error) {
	stage, err := newBlock(dev, n*each, 0)
	if err != nil {
		return nil, fmt.Errorf("staging memory of %d bytes: %w", n*each, err)
	}
	p := &sendQueue{dev: dev, qps: qps, serial: serial, inline: 1 << 30, depth: depth, perRecord: min(depth, maxWRs), longest: maxWrite, stage: stage, stageEach: each, recs: make([]record, n)}
	for _, q := range qps {
		p.inline = min(p.inline, q.MaxInline())
		p.room = append(p.room, depth)
	}
	for i := n - 1; i >= 0; i-- {
		p.free = append(p.free, uint32(i))
		p.recs[i].used = make([]int, len(qps))
	}
	return p, nil
}

// hasRoom tells whether begin would succeed.
func (p *sendQueue) hasRoom() bool {
	if p.broken || len(p.free) == 0 {
		return false
	}
	for _, n := range p.room {
		if n < p.perRecord {
			return false
		}
	}
	return true
}

// begin takes a record if there is room for its work requests.
func (p *sendQueue) begin() (id uint32, r *record, stage []byte, ok bool) {
	if !p.hasRoom() {
		return 0, nil, nil, false
	}
	id = p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	stage = p.stage.mem.Host()[int(id)*p.stageEach : (int(id)+1)*p.stageEach]
	return id, &p.recs[id], stage, true
}

// add appends a work request on queue pair q.
func (p *sendQueue) add(id uint32, q int, wr verbs.SendWR) {
	r := &p.recs[id]
	r.used[q]++
	p.room[q]--
	wr.QP = p.qps[q].Handle()
	wr.ID = uint64(p.serial)<<32 | uint64(q)<<24 | uint64(id)
	if wr.Flags&verbs.Signaled != 0 {
		r.pending++
	}
	p.unposted = append(p.unposted, wr)
}

// recordOf returns the queue pair and the record of a work request's ID.
func recordOf(id uint64) (q int, record uint32) { return int(id >> 24 & 0xff), uint32(id) & 0xffffff }

// staged completes wr with bytes of the stage: inline if they fit.
func (p *sendQueue) staged(wr verbs.SendWR, b []byte) verbs.SendWR {
	wr.LocalAddr, wr.Len = backend.Bytes(b).Addr(), uint32(len(b))
	if len(b) <= p.inline {
		wr.Flags |= verbs.Inline
	} else {
		wr.LKey = p.stage.mr.LKey()
	}
	return wr
}

// addValue appends a write that may be longer than one work request can be.
func (p *sendQueue) addValue(id uint32, wr verbs.SendWR) {
	for ; wr.Len > p.longest; wr.Len -= p.longest {
		x := wr
		x.Len = p.longest
		p.add(id, 0, x)
		wr.LocalAddr += uint64(p.longest)
		wr.RemoteAddr += uint64(p.longest)
	}
	p.add(id, 0, wr)
}

// post hands what was added to the device. When that fails, the connection is broken.
func (p *sendQueue) post() error {
	if len(p.unposted) == 0 {
		return nil
	}
	n, err := p.dev.Post(p.unposted)
	if n < len(p.unposted) && err == nil {
		err = fmt.Errorf("%d of %d work requests were posted", n, len(p.unposted))
	}
	p.unposted = p.unposted[:0]
	if err != nil {
		p.broken = true
		return fmt.Errorf("post: %w", err)
	}
	return nil
}

// finished is what has become free with a completion. The caller calls done without
// its lock.
type finished struct {
	done    van.Completion
	regions [van.MaxFrames]*region
	large   *block
	control *outgoing
	seq     uint64
}

func (f *finished) end() {
	for _, r := range f.regions {
		if r != nil {
			r.release()
		}
	}
	if f.large != nil {
		_ = f.large.close()
	}
	if f.done != nil {
		f.done.Sent()
	}
}

// complete takes a completion of record id. ok is false when it is nonsense or not
// the last.
func (p *sendQueue) complete(id uint32) (f finished, ok bool) {
	if id >= uint32(len(p.recs)) {
		return f, false
	}
	r := &p.recs[id]
	if r.pending == 0 {
		return f, false
	}
	if r.pending--; r.pending > 0 {
		return f, false
	}
	return p.finish(id), true
}

func (p *sendQueue) finish(id uint32) finished {
	r := &p.recs[id]
	f := finished{r.done, r.regions, r.large, r.control, r.seq}
	for q, n := range r.used {
		p.room[q] += n
		r.used[q] = 0
	}
	r.done, r.regions, r.large, r.n, r.pending, r.control, r.data = nil, [van.MaxFrames]*region{}, nil, 0, 0, nil, false
	r.forgetCredits()
	if r.failed {
		r.failed = false
		p.failedRecords--
	}
	p.free = append(p.free, id)
	return f
}

// markFailed notes that a work request of record id has failed. The record ends with the queue
// pairs.
func (p *sendQueue) markFailed(id uint32) {
	if id < uint32(len(p.recs)) && !p.recs[id].failed {
		p.recs[id].failed = true
		p.failedRecords++
	}
}

// forgetCredits forgets the slots that the message gives back.
func (r *record) forgetCredits() {
	clear(r.credits[:r.returned])
	r.creditsOf, r.returned = nil, 0
}

// restoreCredits owes the slots again that messages give back which the peer has not received.
func (p *sendQueue) restoreCredits() {
	for i := range p.recs {
		r := &p.recs[i]
		for _, l := range r.credits[:r.returned] {
			r.creditsOf.returnCredit(l)
		}
		r.forgetCredits()
	}
}

// markUncertain notes that the peer may have received a message or not, and with it what it gives
// back.
func (p *sendQueue) markUncertain(id uint32) {
	if id >= uint32(len(p.recs)) {
		return
	}
	if r := &p.recs[id]; r.returned > 0 {
		if !slices.Contains(p.uncertain, r.creditsOf) {
			p.uncertain = append(p.uncertain, r.creditsOf)
		}
		r.forgetCredits()
	}
}

// carriesData tells whether data is under way.
func (p *sendQueue) carriesData() bool {
	return slices.ContainsFunc(p.recs, func(r record) bool { return r.data })
}

// idle tells whether everything that was posted has completed.
func (p *sendQueue) idle() bool { return len(p.free) == len(p.recs) && len(p.unposted) == 0 }

// abandon ends all records of a connection whose queue pairs are gone.
func (p *sendQueue) abandon() (all []finished) {
	p.broken = true
	for i := range p.recs {
		if r := &p.recs[i]; r.pending > 0 || r.done != nil || r.n > 0 || r.large != nil {
			p.markUncertain(uint32(i))
			all = append(all, p.finish(uint32(i)))
		}
	}
	return all
}

// close frees the staging memory. The queue pairs are gone.
func (p *sendQueue) close() error { return p.stage.close() }
