package conn

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the work requests of one connection.

// SendQueue posts work requests to the queue pairs of one connection, and holds their memory until completion. T is the user's note on each
// message. It has no lock: its user serializes the calls.
type SendQueue[T any] struct {
	Device     verbs.Device
	QueuePairs []verbs.QP
	serial     uint32 // of the connection, in the IDs of work requests
	Inline     int    // inline data in bytes that all queue pairs accept
	available  []int  // free work requests of each queue pair

	perRecord int    // most work requests of one record on one queue pair
	Longest   uint32 // longest write in bytes

	stage     *Block
	stageEach int // bytes of stage for each record
	recs      []Record[T]
	free      []uint32
	unposted  []verbs.SendWR
	spare     []*Block // for NewLarge
	Broken    bool

	failedRecords int // records of which a work request has failed
}

// Record is a message in flight.
type Record[T any] struct {
	Note    T
	Regions []*Region // of values; released when the record ends
	Large   *Block    // memory for a message that is too long for the stage
	used    []int     // number of work requests on each queue pair
	pending int       // expected completions
	failed  bool      // one of its work requests has failed
}

// keptRegions is the capacity of Regions that a free record keeps.
const keptRegions = 32

// MaxWRs is the number of work requests that one message other than a batch may need on one queue pair: one for each frame, another one
// because maxData bytes can be longer than maxWrite, and one for the meta.
const MaxWRs = van.MaxFrames + 2

// maxWrite is the longest write that all devices can do: ConnectX's max_msg_sz.
const maxWrite = 1 << 30

// NewSendQueue makes a queue of n records, each with staging memory of the given size.
func NewSendQueue[T any](dev verbs.Device, qps []verbs.QP, serial uint32, depth, n, each int) (*SendQueue[T], error) {
	stage, err := NewBlock(dev, n*each, 0)
	if err != nil {
		return nil, fmt.Errorf("staging memory of %d bytes: %w", n*each, err)
	}
	p := &SendQueue[T]{Device: dev, QueuePairs: qps, serial: serial, Inline: 1 << 30, perRecord: min(depth, MaxWRs), Longest: maxWrite, stage: stage, stageEach: each, recs: make([]Record[T], n)}
	for _, q := range qps {
		p.Inline = min(p.Inline, q.MaxInline())
		p.available = append(p.available, depth)
	}
	for i := n - 1; i >= 0; i-- {
		p.free = append(p.free, uint32(i))
		p.recs[i].used = make([]int, len(qps))
	}
	return p, nil
}

// CanBegin reports whether a record is free, and each queue pair has room for n work requests, at least for those of a message that is
// not a batch.
func (p *SendQueue[T]) CanBegin(n int) bool {
	if p.Broken || len(p.free) == 0 {
		return false
	}
	for _, k := range p.available {
		if k < max(n, p.perRecord) {
			return false
		}
	}
	return true
}

// Begin takes a record if CanBegin(0) is true. For a batch, the caller has called CanBegin.
func (p *SendQueue[T]) Begin() (id uint32, r *Record[T], stage []byte, ok bool) {
	if !p.CanBegin(0) {
		return 0, nil, nil, false
	}
	id = p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	return id, &p.recs[id], p.stage.Mem.Host()[int(id)*p.stageEach : (int(id)+1)*p.stageEach], true
}

// The blocks that a queue keeps for NewLarge: their number, and their largest length.
const (
	maxSpare   = 4
	spareBytes = 1 << 20
)

// NewLarge returns memory of at least n bytes for Record.Large.
func (p *SendQueue[T]) NewLarge(n int) (*Block, error) {
	for i, b := range p.spare {
		if b.Mem.Len() >= n {
			p.spare = slices.Delete(p.spare, i, i+1)
			return b, nil
		}
	}
	return NewBlock(p.Device, 1<<bits.Len(uint(n-1)), 0)
}

// Add appends a work request on queue pair q, and sets its QP and ID.
func (p *SendQueue[T]) Add(id uint32, q int, wr *verbs.SendWR) {
	r := &p.recs[id]
	r.used[q]++
	p.available[q]--
	wr.QP = p.QueuePairs[q].Handle()
	wr.ID = uint64(p.serial)<<32 | uint64(q)<<24 | uint64(id)
	if wr.Flags&verbs.Signaled != 0 {
		r.pending++
	}
	p.unposted = append(p.unposted, *wr)
}

// RecordOf returns the queue pair and the record of a work request's ID.
func RecordOf(id uint64) (q int, record uint32) { return int(id >> 24 & 0xff), uint32(id) & 0xffffff }

// Staged completes wr, and returns it, with bytes in the stage. They are sent inline if they are short enough.
func (p *SendQueue[T]) Staged(wr *verbs.SendWR, b []byte) *verbs.SendWR {
	wr.LocalAddr, wr.Len = backend.Bytes(b).Addr(), uint32(len(b))
	if len(b) <= p.Inline {
		wr.Flags |= verbs.Inline
	} else {
		wr.Flags, wr.LKey = wr.Flags&^verbs.Inline, p.stage.MR.LKey()
	}
	return wr
}

// StagedByReference completes wr with bytes in the stage that the device reads when it sends them. They may change until then.
func (p *SendQueue[T]) StagedByReference(wr *verbs.SendWR, b []byte) {
	wr.LocalAddr, wr.Len, wr.LKey = backend.Bytes(b).Addr(), uint32(len(b)), p.stage.MR.LKey()
}

// AddValue appends a write, as several work requests if it is longer than Longest.
func (p *SendQueue[T]) AddValue(id uint32, wr *verbs.SendWR) {
	for ; wr.Len > p.Longest; wr.Len -= p.Longest {
		x := *wr
		x.Len = p.Longest
		p.Add(id, 0, &x)
		wr.LocalAddr += uint64(p.Longest)
		wr.RemoteAddr += uint64(p.Longest)
	}
	p.Add(id, 0, wr)
}

// Post posts the added work requests. If that fails, the connection is broken.
func (p *SendQueue[T]) Post() error {
	if len(p.unposted) == 0 {
		return nil
	}
	n, err := p.Device.Post(p.unposted)
	if n < len(p.unposted) && err == nil {
		err = fmt.Errorf("%d of %d work requests were posted", n, len(p.unposted))
	}
	p.unposted = p.unposted[:0]
	if err != nil {
		p.Broken = true
		return fmt.Errorf("post: %w", err)
	}
	return nil
}

// Probe writes zero bytes to the peer: only a write finds out that a peer has vanished.
func (p *SendQueue[T]) Probe() error {
	id, _, _, ok := p.Begin()
	if !ok {
		return nil
	}
	p.Add(id, 0, &verbs.SendWR{Op: verbs.OpWrite, Flags: verbs.Signaled | verbs.Inline})
	return p.Post()
}

// Finished is the note of a finished record, and its large block. The caller calls End without its lock.
type Finished[T any] struct {
	Note  T
	large *Block
}

// End frees the block.
func (f *Finished[T]) End() {
	if f.large != nil {
		_ = f.large.Close()
	}
}

// Complete handles a completion of record id. ok is false if the id is invalid, or if further completions are expected.
func (p *SendQueue[T]) Complete(id uint32) (f Finished[T], ok bool) {
	r := p.Record(id)
	if r == nil || r.pending == 0 {
		return f, false
	}
	if r.pending--; r.pending > 0 {
		return f, false
	}
	return p.Finish(id), true
}

// Finish ends record id, which has nothing in flight.
func (p *SendQueue[T]) Finish(id uint32) Finished[T] {
	r := &p.recs[id]
	f := Finished[T]{r.Note, r.Large}
	if f.large != nil && len(p.spare) < maxSpare && f.large.Mem.Len() <= spareBytes {
		p.spare, f.large = append(p.spare, f.large), nil
	}
	for _, x := range r.Regions {
		x.Release()
	}
	clear(r.Regions)
	if cap(r.Regions) > keptRegions {
		r.Regions = nil
	}
	for q, n := range r.used {
		p.available[q] += n
		r.used[q] = 0
	}
	if r.failed {
		p.failedRecords--
	}
	*r = Record[T]{used: r.used, Regions: r.Regions[:0]}
	p.free = append(p.free, id)
	return f
}

// Record returns the record with this ID, or nil.
func (p *SendQueue[T]) Record(id uint32) *Record[T] {
	if id >= uint32(len(p.recs)) {
		return nil
	}
	return &p.recs[id]
}

// Each calls f with the note of each record.
func (p *SendQueue[T]) Each(f func(note *T)) {
	for i := range p.recs {
		f(&p.recs[i].Note)
	}
}

// MarkFailed records that a work request of record id has failed. The record ends with the queue pairs.
func (p *SendQueue[T]) MarkFailed(id uint32) {
	if r := p.Record(id); r != nil && !r.failed {
		r.failed = true
		p.failedRecords++
	}
}

// Outstanding returns the number of records whose completions are still expected.
func (p *SendQueue[T]) Outstanding() int {
	unposted := map[uint32]bool{}
	for i := range p.unposted {
		_, id := RecordOf(p.unposted[i].ID)
		unposted[id] = true
	}
	return len(p.recs) - len(p.free) - p.failedRecords - len(unposted)
}

// Unposted returns the number of work requests that were added and not posted.
func (p *SendQueue[T]) Unposted() int { return len(p.unposted) }

// Idle reports whether all work requests were posted and have completed.
func (p *SendQueue[T]) Idle() bool { return len(p.free) == len(p.recs) && len(p.unposted) == 0 }

// FinishAll ends all records of a connection whose queue pairs are destroyed.
func (p *SendQueue[T]) FinishAll() (all []Finished[T]) {
	p.Broken = true
	free := make([]bool, len(p.recs))
	for _, id := range p.free {
		free[id] = true
	}
	for i := range free {
		if !free[i] {
			all = append(all, p.Finish(uint32(i)))
		}
	}
	return all
}

// Close frees the queue's memory, after the queue pairs are destroyed and all records have ended.
func (p *SendQueue[T]) Close() error {
	err := p.stage.Close()
	for _, b := range p.spare {
		err = errors.Join(err, b.Close())
	}
	p.spare = nil
	return err
}
