package collective

// The plan of a call: the parts that it requests, the parts that it sends, and its reduction.

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// share divides memory among the ranks.
type share struct {
	mem  backend.Mem
	by   int         // element size: mem is divided by elements among the ranks; 0: every rank has all of mem
	list []af.Tensor // instead of mem: one tensor for each rank
	of   int         // everybody, nobody, or the only rank with a part
}

// Values of share.of that are not ranks.
const (
	everybody = -1
	nobody    = -2
)

// part returns the part of rank r of n ranks, and whether it has one.
func (s *share) part(r, n int) (m backend.Mem, any bool) {
	switch {
	case s.of != everybody && s.of != r:
		return m, false
	case s.list != nil:
		return s.list[r].Mem(), true
	case s.by == 0:
		return s.mem, true
	}
	count := s.mem.Len() / s.by
	from, to := r*count/n*s.by, (r+1)*count/n*s.by
	return s.mem.Sub(from, to-from), true
}

// plan describes a call: its requests and the parts that it sends. A reduction receives into scratch memory, with
// the length of out for each rank.
type plan struct {
	call      call
	ask, give share
	fold      folder
	result    result
	device    bool // the tensors are on the device
}

// receivePlan lists the parts that a call requests from other ranks.
type receivePlan struct {
	from []int         // node ids of the requested ranks, ascending
	into []backend.Mem // destination of their parts
	came []bool        // parts that have arrived; guarded by base.mu
	msg  van.Message   // for requests
	key  [8]byte
	body []byte
}

// send sends the requests for parts of call k of rank self.
func (w *receivePlan) send(b *base, k call, epoch uint64, seq uint32, ts int32) error {
	key := partKey(seq, b.self)
	binary.LittleEndian.PutUint64(w.key[:], key)
	w.body = k.appendAsk(w.body[:0], epoch)
	first := 0
	if b.node.Order(b.customer.AppID()) == "ring" { // a policy: ranks begin with different peers
		first, _ = slices.BinarySearch(w.from, b.ids[b.self])
	}
	for i := range w.from {
		i = (i + first) % len(w.from)
		id := w.from[i]
		m, into := &w.msg, w.into[i]
		m.Reset()
		m.Receiver, m.Request, m.Timestamp, m.Head = id, true, ts, van.Single
		m.AppID, m.CustomerID = int32(b.customer.AppID()), int32(b.customer.ID())
		m.Key, m.Addr, m.ValLen = key, into.Addr(), int32(into.Len())
		m.Body = append(m.Body, w.body...)
		datamsg.SetData(m, backend.Bytes(w.key[:]), backend.Mem{}, backend.Mem{}, van.TypeOther)
		m.Into = into
		if err := b.node.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// take stores the part of the rank with index from in w.from.
func (w *receivePlan) take(b *base, from int, msg *van.Message) error {
	into := w.into[from]
	if msg.Frames < 2 || msg.Vals.Len() != into.Len() {
		return fmt.Errorf("%w: a part of %d bytes in %d frames, want %d in 2", van.ErrMalformed, msg.Vals.Len(), msg.Frames, into.Len())
	}
	if !msg.Placed && into.Len() > 0 {
		if err := b.node.Backend().Copy(into, msg.Vals); err != nil {
			return err
		}
	}
	b.mu.Lock()
	w.came[from] = true
	b.mu.Unlock()
	return nil
}

func retain(l []backend.Mem) {
	for i := range l {
		l[i].Retain()
	}
}

func release(l []backend.Mem) {
	for i := range l {
		l[i].Release()
	}
}

// sendPlan lists the parts that a call sends to other ranks.
type sendPlan struct {
	parts []backend.Mem // by rank
	to    []sendPart    // by rank
}

// sendPart is a part for one rank.
type sendPart struct {
	o     *op
	state sendState // guarded by base.mu
	msg   van.Message
	key   [8]byte
}

type sendState uint8

const (
	notWanted sendState = iota // the rank gets no part of this rank
	awaited
	sent
	over // received, or the call has ended before
)

// reduction is the state of a reducing call; it is empty for other calls. Fields do not change once the call is made,
// unless they are guarded.
type reduction struct {
	by      folder
	scratch []uint64 // where parts arrive
	next    *op      // the call that begins after the reduction, and references it; guarded by base.mu
	run     func()   // op.reduce
	ran     bool     // run has been started; guarded by base.mu
}

// result is the destination of this rank's own part: own is copied to out, unless they are the same, or reduced into
// it.
type result struct{ out, own backend.Mem }

// toCopy reports whether own must be copied to out.
func (r *result) toCopy() bool { return r.out.Addr() != r.own.Addr() && r.out.Len() > 0 }

func (r *result) retain()  { r.out.Retain(); r.own.Retain() }
func (r *result) release() { r.out.Release(); r.own.Release() }

// make reduces own and the parts in scratch into out, in rank order.
func (f *reduction) make(to *result, self, ranks int) {
	n, out := to.out.Len(), to.out
	scratch, own := backend.Slice(f.scratch), to.own
	part := func(r int) backend.Mem {
		if r == self {
			return own
		}
		return scratch.Sub(r*n, n)
	}
	switch {
	case n == 0:
		return
	case ranks == 1:
		copy(out.Host(), own.Host())
		return
	case self > 1 && out.Addr() == own.Addr(): // own is needed later, but is about to be overwritten
		keep := scratch.Sub(self*n, n)
		copy(keep.Host(), own.Host())
		own = keep
	}
	f.fold(out, part(0), part(1))
	for r := 2; r < ranks; r++ {
		f.fold(out, out, part(r))
	}
}

// pieceBytes is the number of bytes that are reduced between two preemption points. The loops of reduce.go have no preemption
// point, and in the Python module Go's runtime does not preempt by signals. Without pieces the garbage collector, and with it all
// goroutines, would wait until the whole tensor is reduced.
const pieceBytes = 1 << 20

// fold reduces a and b into dst, in pieces.
func (f *reduction) fold(dst, a, b backend.Mem) {
	for at, n := 0, dst.Len(); at < n; at += pieceBytes {
		f.piece(dst, a, b, at, min(pieceBytes, n-at))
	}
}

// piece is not inlined: its prologue is the preemption point.
//
//go:noinline
func (f *reduction) piece(dst, a, b backend.Mem, at, n int) {
	f.by(dst.Sub(at, n), a.Sub(at, n), b.Sub(at, n))
}
