package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// latency has the sizes of round trips with tensors in host memory. With touch, both ends read and write every byte between round trips.
// With shared, the worker's tensors are those of af.AllocShared, and the server answers in the worker's memory.
type latency struct {
	push, pull    int
	touch, shared bool
}

// page is the distance of the stamps in a tensor. The server's answer depends on the request in every page, without a
// pass over all bytes in the timed part.
const page = 4096

// stampAt returns the stamp of seq at an offset.
func stampAt(seq uint64, off int) uint64 { return seq ^ uint64(off)*0x9e3779b97f4a7c15 }

// stamp writes seq into every page of b.
func stamp(b []byte, seq uint64) { stampEvery(b, seq, page) }

// stampEvery writes seq into b at each multiple of stride.
func stampEvery(b []byte, seq uint64, stride int) {
	for off := 0; off < len(b); off += stride {
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], stampAt(seq, off))
		copy(b[off:], w[:])
	}
}

// seal combines the stamps at both ends of a request. It is 0 for an empty one.
func seal(b []byte) uint64 {
	var first, last [8]byte
	copy(first[:], b)
	copy(last[:], b[len(b)-min(len(b), page):])
	return binary.LittleEndian.Uint64(first[:])*31 + binary.LittleEndian.Uint64(last[:])
}

// fill writes contents that are the same in all processes.
func fill(b []byte) {
	x := uint32(1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
}

// newLatencyServer answers every batch with a buffer that has the stamps of the batch's seal.
func newLatencyServer(l latency, node *postoffice.Node) (end, error) {
	s, err := af.NewServer(node, af.ServerOptions{})
	if err != nil {
		return nil, err
	}
	// Two answers alternate, since one may still be being sent.
	answers := make([]af.KeyTensor, 2)
	for i := range answers {
		if answers[i], err = newTensor(node.Backend(), timedKey+1, l.pull); err != nil {
			return nil, err
		}
		fill(answers[i].Val.Bytes())
	}
	filled := slices.Clone(answers[0].Val.Bytes())
	turn, answer := 0, make([]af.KeyTensor, 1)
	return nil, s.Handle(func(b af.Batch) {
		var pushed []byte
		if p := b.Pushes(); len(p) > 0 {
			pushed = p[0].Val.Bytes()
		}
		if l.touch {
			b.Retain()
			defer b.Release()
		}
		var out []af.KeyTensor
		if len(b.Pulls()) > 0 {
			turn ^= 1
			answer[0] = answers[turn]
			switch p := b.Pulls()[0]; {
			case p.Out.Len() > 0: // it has the bytes between the stamps already
				answer[0].Val = p.Out
			case l.shared && p.Len >= 32<<10:
				_ = b.Refuse(errors.New("the server does not map the worker's tensor: see the log of PS_VERBOSE=1"))
				return
			}
			stamp(answer[0].Val.Bytes(), seal(pushed))
			out = answer
		}
		if err := b.Respond(out, af.ByKey); err != nil {
			node.Log().Error("respond", "err", err)
		}
		if l.touch { // not the answer that is being sent
			sum(pushed)
			copy(answers[turn^1].Val.Bytes(), filled)
		}
	})
}

// sum reads every byte of b.
func sum(b []byte) (s byte) {
	for _, x := range b {
		s += x
	}
	return s
}

// newTensor allocates a tensor of n bytes in host memory.
func newTensor(b backend.Backend, key uint64, n int) (af.KeyTensor, error) {
	m, err := b.Alloc(n)
	if err != nil {
		return af.KeyTensor{}, err
	}
	t, err := af.FromBytes(m.Host(), af.Uint8, int64(n))
	return af.KeyTensor{Key: key, Val: t}, err
}

// newShared allocates a tensor of n bytes that a server can map.
func newShared(_ backend.Backend, key uint64, n int) (af.KeyTensor, error) {
	t, _, err := af.AllocShared(af.Uint8, int64(n)) // until the process ends
	return af.KeyTensor{Key: key, Val: t}, err
}

// latencyWorker makes the round trips.
type latencyWorker struct {
	latency
	w             *af.Worker
	push, pull    []byte
	filled, want  []byte // the first contents of push; the expected answer
	pushes, pulls []af.KeyTensor
	seq           uint64 // of round trips
}

func newLatencyWorker(l latency, node *postoffice.Node) (_ end, err error) {
	x := &latencyWorker{latency: l, want: make([]byte, l.pull)}
	make := newTensor
	if l.shared {
		make = newShared
	}
	push, err := make(node.Backend(), timedKey, l.push)
	if err != nil {
		return nil, err
	}
	pull, err := make(node.Backend(), timedKey+1, l.pull)
	if err != nil {
		return nil, err
	}
	x.push, x.pull = push.Val.Bytes(), pull.Val.Bytes()
	fill(x.want)
	fill(x.push)
	copy(x.pull, x.want)
	x.filled = slices.Clone(x.push)
	if l.push > 0 {
		x.pushes = []af.KeyTensor{push}
	}
	if l.pull > 0 {
		x.pulls = []af.KeyTensor{pull}
	}
	x.w, err = af.NewWorker(node, af.WorkerOptions{})
	return x, err
}

func (x *latencyWorker) close() { x.w.Close() }

// do makes n round trips, and checks every byte of each answer.
func (x *latencyWorker) do(ctx context.Context, _, _ string, _ time.Duration, n int) ([]int64, error) {
	ns := make([]int64, n)
	for i := range ns {
		x.seq++
		if x.touch {
			copy(x.push, x.filled)
		}
		stamp(x.push, x.seq)
		start := time.Now()
		h, err := x.w.PushPull(x.pushes, [][]af.KeyTensor{x.pulls})
		if err == nil {
			err = h.Wait(ctx)
		}
		ns[i] = int64(time.Since(start))
		if err != nil {
			return nil, err
		}
		stamp(x.want, seal(x.push))
		if !bytes.Equal(x.pull, x.want) {
			return nil, fmt.Errorf("round %d: the answer is not the one to this request", x.seq)
		}
		if !x.shared {
			clear(x.pull)
		}
	}
	return ns, nil
}

// timedKey is the key of a push tensor; the key of a pull tensor is the next number.
const timedKey = 1
