package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// latency is one measurement of push_pull round trips.
type latency struct {
	push, pull    int
	iters, warmup int
	rounds        int  // blocks of push_pulls and of the floor, alternating
	stream        bool // on a GPU: tensors are made in a named stream
	both          bool // on a GPU: timed rounds are prepared GPU exchanges
	touch         bool // every byte is read and written between rounds
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

// seal combines the stamps at both ends of a request.
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

// serve answers every batch with a buffer that has the stamps of the batch's seal.
func (l *latency) serve(node *postoffice.Node) error {
	s, err := af.NewServer(node, af.ServerOptions{})
	if err != nil {
		return err
	}
	// Two buffers alternate, since one may still be being sent.
	var bufs [2][]byte
	for i := range bufs {
		if bufs[i], err = alloc(node.Backend(), l.pull); err != nil {
			return err
		}
		fill(bufs[i])
	}
	filled := slices.Clone(bufs[0])
	turn := 0
	answer := make([]af.KeyTensor, 1)
	return s.Handle(func(b af.Batch) {
		var seq uint64
		var pushed []byte
		if p := b.Pushes(); len(p) > 0 && p[0].Val.Len() > 0 {
			pushed = p[0].Val.Bytes()
			seq = seal(pushed)
		}
		if l.touch {
			b.Retain()
			defer b.Release()
		}
		var out []af.KeyTensor
		if pulls := b.Pulls(); len(pulls) > 0 {
			turn ^= 1
			stamp(bufs[turn], seq)
			t, err := af.FromBytes(bufs[turn], af.Uint8, int64(l.pull))
			if err != nil {
				node.Log().Error("answer", "err", err)
				return
			}
			answer[0] = af.KeyTensor{Key: pulls[0].Key, Val: t}
			out = answer
		}
		if err := b.Respond(out, af.ByKey); err != nil {
			node.Log().Error("respond", "err", err)
		}
		if l.touch { // not the buffer that is being sent
			sum(pushed)
			copy(bufs[turn^1], filled)
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

func alloc(b backend.Backend, n int) ([]byte, error) {
	m, err := b.Alloc(n)
	if err != nil {
		return nil, err
	}
	return m.Host(), nil
}

// measure makes the round trips with tensors in host memory.
func (l *latency) measure(ctx context.Context, node *postoffice.Node, floor, bare baseline) (*result, error) {
	w, err := af.NewWorker(node, af.WorkerOptions{})
	if err != nil {
		return nil, err
	}
	defer w.Close()
	push, err := alloc(node.Backend(), l.push)
	if err != nil {
		return nil, err
	}
	pull, err := alloc(node.Backend(), l.pull)
	if err != nil {
		return nil, err
	}
	want := make([]byte, l.pull)
	fill(want)
	fill(push)
	filled := slices.Clone(push)
	pushes, pulls, err := l.tensors(backend.Bytes(push), backend.Bytes(pull), timedKey)
	if err != nil {
		return nil, err
	}
	each, seq := [][]af.KeyTensor{pulls}, uint64(0)
	once := func() (int64, error) {
		seq++
		if l.touch {
			copy(push, filled)
		}
		stamp(push, seq)
		start := time.Now()
		h, err := w.PushPull(pushes, each)
		if err == nil {
			err = h.Wait(ctx)
		}
		d := int64(time.Since(start))
		if err != nil {
			return 0, err
		}
		answer := uint64(0)
		if l.push > 0 {
			answer = seal(push)
		}
		stamp(want, answer)
		if !bytes.Equal(pull, want) {
			return 0, fmt.Errorf("round %d: the answer is not the one to this request", seq)
		}
		clear(pull)
		return d, nil
	}
	return l.blocks(floor, bare, once, func() error { return nil })
}

// timedKey is the key of a push tensor; the key of a pull tensor is the next number.
const timedKey = 1

// tensors returns the tensors of a push_pull. Memory without bytes gives none.
func (l *latency) tensors(push, pull backend.Mem, key uint64) (pushes, pulls []af.KeyTensor, err error) {
	one := func(m backend.Mem, key uint64) []af.KeyTensor {
		if m.Len() == 0 || err != nil {
			return nil
		}
		t, e := af.NewTensor(m, af.Uint8, int64(m.Len()))
		err = e
		return []af.KeyTensor{{Key: key, Val: t}}
	}
	pushes, pulls = one(push, key), one(pull, key+1)
	if err == nil && len(pushes)+len(pulls) == 0 {
		err = fmt.Errorf("%w: --push and --pull are both 0, want at least one byte", van.ErrInvalid)
	}
	return pushes, pulls, err
}

// blocks warms up, and measures in turns with the baselines. once makes a round trip and returns its nanoseconds. check
// is called between the blocks and is not timed.
func (l *latency) blocks(floor, bare baseline, once func() (int64, error), check func() error) (*result, error) {
	if err := check(); err != nil {
		return nil, err
	}
	for range l.warmup {
		if _, err := once(); err != nil {
			return nil, err
		}
	}
	for _, b := range []baseline{floor, bare} {
		if _, err := b.measure(l.warmup); err != nil {
			return nil, err
		}
	}
	r := &result{Checked: true}
	for _, n := range blocks(l.iters, l.rounds)[1:] { // the first block was the warm-up
		if err := check(); err != nil {
			return nil, err
		}
		ns, err := floor.measure(n)
		if err != nil {
			return nil, err
		}
		r.Floor = append(r.Floor, ns...)
		if ns, err = bare.measure(n); err != nil {
			return nil, err
		}
		r.Bare = append(r.Bare, ns...)
		before := cpuTime()
		for range n {
			d, err := once()
			if err != nil {
				return nil, err
			}
			r.Ours = append(r.Ours, d)
		}
		r.CPU += (cpuTime() - before).Seconds()
	}
	return r, check()
}
