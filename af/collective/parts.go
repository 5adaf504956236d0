package collective

// What a call asks of other ranks, what it gives them, and what it makes of both.

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// share is what of some memory is each rank's.
type share struct {
	mem  backend.Mem
	by   int         // the size of elements: mem is divided by them among the ranks; 0: all is everybody's
	list []af.Tensor // instead of mem: one for each rank
	of   int         // everybody, nobody, or the only rank that has any
}

// Values of share.of that are no rank.
const (
	everybody = -1
	nobody    = -2
)

// part is what is a rank's, of n, and whether anything is.
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

// plan is what a call does: which ranks it asks for what, and what others take. Of a reduction
// what it asks for comes into a room, of the length of out for each rank.
type plan struct {
	call      call
	ask, give share
	fold      folder
	result    result
	device    bool // tensors lie there
}

// wants is what a call asks of other ranks.
type wants struct {
	from []int         // node ids that are asked, ascending
	into []backend.Mem // where their parts are wanted
	came []bool        // which of them have come; guarded by base.mu
	msg  van.Message   // for requests
	key  [8]byte
	body []byte
}

// send sends the requests for parts of call k of rank self.
func (w *wants) send(b *base, k call, epoch uint64, seq uint32, ts int32) error {
	key := partKey(seq, b.self)
	binary.LittleEndian.PutUint64(w.key[:], key)
	w.body = k.appendAsk(w.body[:0], epoch)
	first := 0
	if b.node.Order(b.customer.AppID()) == "ring" { // a policy: not all ask the same one first
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

// take takes the part of the from'th rank that is asked.
func (w *wants) take(b *base, from int, msg *van.Message) error {
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

// gives is what a call gives other ranks.
type gives struct {
	parts []backend.Mem // by rank
	takes []taking      // by rank
}

// taking is a part that another rank takes.
type taking struct {
	o     *op
	rank  int
	state takeState // guarded by base.mu
	msg   van.Message
	key   [8]byte
}

type takeState uint8

const (
	notWanted takeState = iota // the rank does not need this one's part
	awaited
	sent
	over // taken, or the call has ended before
)

// folding is the reduction of a call, nothing for others. What is not said to be guarded does not change once the call is made.
type folding struct {
	by   folder
	room []uint64 // where parts come
	next *op      // the call that begins after the reduction, which has a reference to it; guarded by base.mu
	run  func()   // op.reduce
	ran  bool     // that has been started; guarded by base.mu
}

// result is where this rank's own part goes: own itself into out, if they are not the same, or its reduction.
type result struct{ out, own backend.Mem }

// toCopy tells whether own does not lie in out already.
func (r *result) toCopy() bool { return r.out.Addr() != r.own.Addr() && r.out.Len() > 0 }

func (r *result) retain()  { r.out.Retain(); r.own.Retain() }
func (r *result) release() { r.out.Release(); r.own.Release() }

// make makes out the reduction of own and of what others have put into room, in the order of n ranks.
func (f *folding) make(to *result, self, ranks int) {
	n, out := to.out.Len(), to.out
	room, own := backend.Slice(f.room), to.own
	part := func(r int) backend.Mem {
		if r == self {
			return own
		}
		return room.Sub(r*n, n)
	}
	switch {
	case n == 0:
		return
	case ranks == 1:
		copy(out.Host(), own.Host())
		return
	case self > 1 && out.Addr() == own.Addr(): // it is needed later, and is about to be written
		keep := room.Sub(self*n, n)
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
func (f *folding) fold(dst, a, b backend.Mem) {
	for at, n := 0, dst.Len(); at < n; at += pieceBytes {
		f.piece(dst, a, b, at, min(pieceBytes, n-at))
	}
}

// piece is not inlined: its prologue is the preemption point.
//
//go:noinline
func (f *folding) piece(dst, a, b backend.Mem, at, n int) {
	f.by(dst.Sub(at, n), a.Sub(at, n), b.Sub(at, n))
}
