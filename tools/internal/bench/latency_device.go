package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// GPU tensors have two kinds of round trips. Timed round trips do not change the contents; the server answers from two
// buffers in turn. Checked round trips use keys of their own: the worker pushes new contents, the server writes an
// answer that depends on every byte of them into the next buffer, and the worker compares every byte of the answer. So
// the worker knows the correct contents of each timed answer.

const checkedKey = timedKey + 2

// deviceStream returns the stream that an end names for its tensors.
func (l *latency) deviceStream(b backend.Backend) (af.Stream, error) {
	if !l.stream {
		return af.Complete, nil
	}
	a, ok := b.(backend.AsyncCopier)
	if !ok {
		return 0, fmt.Errorf("bench: --stream: backend %s has no streams", b.Name())
	}
	s, err := a.NewStream()
	return af.Stream(s), err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digest returns the digest of the count'th checked request, with contents b.
func digest(count uint64, b []byte) uint64 {
	return count<<32 | uint64(crc32.Checksum(b, castagnoli))
}

// deviceServer answers from device memory.
type deviceServer struct {
	l       *latency
	back    backend.Backend
	stream  af.Stream
	bufs    [2]backend.Mem
	answers [2][]af.KeyTensor
	turn    atomic.Int32
	count   uint64 // of checked requests
	request []byte // of a checked request, on the host
	image   []byte // of an answer
}

// serveDevice answers every batch with tensors on the node's device.
func (l *latency) serveDevice(node *postoffice.Node) error {
	s, err := af.NewServer(node, af.ServerOptions{})
	if err != nil {
		return err
	}
	d := &deviceServer{l: l, back: node.Backend(), request: make([]byte, l.push), image: make([]byte, l.pull)}
	fill(d.image)
	if d.stream, err = l.deviceStream(d.back); err != nil {
		return err
	}
	for i := range d.bufs {
		if d.bufs[i], err = d.back.Alloc(l.pull); err != nil {
			return err
		}
		if l.pull == 0 {
			continue
		}
		t, err := af.NewTensor(d.bufs[i], af.Uint8, int64(l.pull))
		if err != nil {
			return err
		}
		d.answers[i] = []af.KeyTensor{{Val: t}}
	}
	if l.both {
		if err := d.both(node); err != nil {
			return err
		}
	}
	return s.Handle(func(b af.Batch) {
		if err := d.answer(b); err != nil {
			node.Log().Error("answer", "err", err)
		}
	})
}

// both prepares an exchange for each of the two buffers, and answers their rounds until they end.
func (d *deviceServer) both(node *postoffice.Node) error {
	ends, err := streams.New(node)
	if err != nil {
		return err
	}
	push, err := d.back.Alloc(d.l.push)
	if err != nil {
		return err
	}
	for i := range d.bufs {
		pushes, pulls, err := d.l.tensors(push, d.bufs[i], bothKey(i))
		if err != nil {
			return err
		}
		go func() {
			x, err := ends.Prepare(context.Background(), nil, pushes, pulls, streams.ByHost{})
			for err == nil {
				if err = x.Receive(context.Background()); err == nil {
					d.turn.Store(int32(i))
					err = x.Send(d.stream)
				}
			}
			if !errors.Is(err, van.ErrClosed) && !errors.Is(err, van.ErrPeerLost) {
				node.Log().Error("exchange", "err", err)
			}
		}()
	}
	return nil
}

// bothKey is the key of the push tensor of a prepared GPU exchange.
func bothKey(i int) uint64 { return checkedKey + 2 + 2*uint64(i) }

func (d *deviceServer) answer(b af.Batch) error {
	turn := d.turn.Load() ^ 1
	d.turn.Store(turn)
	key := uint64(0)
	if p := b.Pulls(); len(p) > 0 {
		key = p[0].Key - 1
		d.answers[turn][0].Key = p[0].Key
	} else if p := b.Pushes(); len(p) > 0 {
		key = p[0].Key
	}
	if key == checkedKey {
		if err := d.prepare(b, d.bufs[turn]); err != nil {
			return err
		}
	}
	return b.Respond(d.answers[turn], af.ByKey, d.stream)
}

// prepare makes the answer to a checked request.
func (d *deviceServer) prepare(b af.Batch, to backend.Mem) error {
	d.count++
	if p := b.Pushes(); len(p) > 0 {
		if err := d.back.Copy(backend.Bytes(d.request), p[0].Val.Mem()); err != nil {
			return err
		}
	}
	if d.l.pull == 0 {
		return nil
	}
	stamp(d.image, digest(d.count, d.request))
	return d.back.Copy(to, backend.Bytes(d.image))
}

// deviceTrips is the worker's end.
type deviceTrips struct {
	ctx    context.Context
	w      *af.Worker
	back   backend.Backend
	stream af.Stream
	push   backend.Mem
	pull   backend.Mem

	exchanges                   [2]*streams.Exchange // of timed round trips, if latency.both
	timedPushes, timedPulls     []af.KeyTensor
	checkedPushes, checkedPulls []af.KeyTensor

	turn    int
	moved   bool   // there was a timed round trip after the latest checked one
	count   uint64 // of checked requests
	digests [2]uint64
	request []byte // on the host
	got     []byte
	want    []byte
}

// measureDevice makes the round trips with tensors on the node's device.
func (l *latency) measureDevice(ctx context.Context, node *postoffice.Node, floor, bare baseline) (*result, error) {
	w, err := af.NewWorker(node, af.WorkerOptions{})
	if err != nil {
		return nil, err
	}
	defer w.Close()
	t := &deviceTrips{ctx: ctx, w: w, back: node.Backend(), request: make([]byte, l.push), got: make([]byte, l.pull), want: make([]byte, l.pull)}
	fill(t.request)
	fill(t.want)
	if t.stream, err = l.deviceStream(t.back); err != nil {
		return nil, err
	}
	if t.push, err = t.back.Alloc(l.push); err != nil {
		return nil, err
	}
	if t.pull, err = t.back.Alloc(l.pull); err != nil {
		return nil, err
	}
	if t.timedPushes, t.timedPulls, err = l.tensors(t.push, t.pull, timedKey); err != nil {
		return nil, err
	}
	if t.checkedPushes, t.checkedPulls, err = l.tensors(t.push, t.pull, checkedKey); err != nil {
		return nil, err
	}
	if l.both {
		ends, err := streams.New(node)
		if err != nil {
			return nil, err
		}
		defer ends.Close()
		for i := range t.exchanges {
			pushes, pulls, err := l.tensors(t.push, t.pull, bothKey(i))
			if err != nil {
				return nil, err
			}
			if t.exchanges[i], err = ends.Prepare(ctx, nil, pushes, pulls, streams.ByHost{}); err != nil {
				return nil, err
			}
			defer t.exchanges[i].Close()
		}
	}
	return l.blocks(floor, bare, t.timed, t.check)
}

// timed does one round trip with the present contents.
func (t *deviceTrips) timed() (int64, error) {
	t.moved = true
	if t.exchanges[0] == nil {
		return t.trip(t.timedPushes, t.timedPulls)
	}
	t.turn ^= 1
	x, start := t.exchanges[t.turn], time.Now()
	err := x.Send(t.stream)
	if err == nil {
		err = x.Receive(t.ctx)
	}
	return int64(time.Since(start)), err
}

func (t *deviceTrips) trip(pushes, pulls []af.KeyTensor) (int64, error) {
	t.turn ^= 1
	start := time.Now()
	h, err := t.w.PushPull(pushes, [][]af.KeyTensor{pulls}, t.stream)
	if err == nil {
		err = h.Wait(t.ctx)
	}
	return int64(time.Since(start)), err
}

// check compares the latest answer, does a checked round trip for each of the server's buffers, and leaves the
// pull tensor cleared.
func (t *deviceTrips) check() error {
	if t.moved {
		t.moved = false
		if err := t.compare("a timed round trip"); err != nil {
			return err
		}
	}
	for range t.digests {
		t.count++
		stamp(t.request, t.count)
		if err := t.back.Copy(t.push, backend.Bytes(t.request)); err != nil {
			return err
		}
		if err := t.clear(); err != nil {
			return err
		}
		if _, err := t.trip(t.checkedPushes, t.checkedPulls); err != nil {
			return err
		}
		t.digests[t.turn] = digest(t.count, t.request)
		if err := t.compare(fmt.Sprintf("checked round trip %d", t.count)); err != nil {
			return err
		}
	}
	return t.clear()
}

func (t *deviceTrips) clear() error {
	clear(t.got)
	return t.back.Copy(t.pull, backend.Bytes(t.got))
}

// compare compares the pull tensor with its expected contents.
func (t *deviceTrips) compare(after string) error {
	if err := t.back.Copy(backend.Bytes(t.got), t.pull); err != nil {
		return err
	}
	stamp(t.want, t.digests[t.turn])
	if !bytes.Equal(t.got, t.want) {
		return fmt.Errorf("%s: the answer is not the one to this request", after)
	}
	return nil
}
