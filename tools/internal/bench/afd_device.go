package bench

// The processes of bench afd with tensors on GPUs. Round trips are as those of bench latency: timed ones do not change the
// contents, and servers answer them from two buffers in turn. Round trips before each block set the contents of the
// buffers: the answer depends on every byte of the push, and the worker compares every byte of the answer.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// afdAhead is the number of rounds that a server queues before it waits for its stream.
const afdAhead = 8

// Round trips by messages have the numbers 0 to 3: two that are timed, and then two that are checked; odd numbers use the second buffer.
const (
	tripKinds   = 4
	checkedTrip = 2 // the first that is checked
)

// exchangeKey returns the key of a prepared GPU exchange with a buffer. The keys of round trips by messages precede it.
func exchangeKey(form string, turn int) uint64 {
	if form == formHosts {
		turn += 2
	}
	return pushKey(tripKinds + turn)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digest returns the digest of the count'th checked push, with contents b.
func digest(count uint64, b []byte) uint64 {
	return count<<32 | uint64(crc32.Checksum(b, castagnoli))
}

// afdDevice has the fields that workers and servers have in common.
type afdDevice struct {
	*afdShape
	back   backend.Backend
	rank   int
	ends   *streams.Ends
	made   map[string][2]*streams.Exchange // by form
	stream af.Stream                       // of exchanges in streams
	events [afdAhead]backend.Event
	queued int
	host   [2][]byte // a push and an answer
	err    error     // the first error of alloc and tensors
}

func newAFDDevice(a *afdShape, node *postoffice.Node) (*afdDevice, error) {
	d := &afdDevice{afdShape: a, back: node.Backend(), rank: node.Rank(), made: map[string][2]*streams.Exchange{}}
	var err error
	d.stream, err = newStream(d.back)
	for i := range d.events {
		if err == nil {
			d.events[i], err = d.back.NewEvent()
		}
	}
	if err == nil {
		d.ends, err = streams.New(node)
	}
	d.host = [2][]byte{bytes.Clone(a.image[:a.push]), bytes.Clone(a.image[:a.pull])}
	return d, err
}

// alloc allocates n tensors of the device. It does nothing after an error.
func (d *afdDevice) alloc(n, size int) (all []backend.Mem) {
	for i := 0; i < n && d.err == nil; i++ {
		var m backend.Mem
		m, d.err = d.back.Alloc(size)
		all = append(all, m)
	}
	return all
}

// tensors returns tensors with the same key.
func (d *afdDevice) tensors(key uint64, all []backend.Mem) []af.KeyTensor {
	list := make([]af.KeyTensor, len(all))
	for i, m := range all {
		t, err := af.NewTensor(m, af.Uint8, int64(m.Len()))
		list[i], d.err = af.KeyTensor{Key: key, Val: t}, cmp.Or(d.err, err)
	}
	return list
}

// exchanges returns the two exchanges of a form. The first call of both ends prepares them.
func (d *afdDevice) exchanges(ctx context.Context, form string, push []backend.Mem, pull [2][]backend.Mem) (both [2]*streams.Exchange, err error) {
	if both, ok := d.made[form]; ok {
		return both, nil
	}
	var opts []streams.Option
	if form == formHosts {
		opts = append(opts, streams.ByHost{})
	}
	for turn := range both {
		key := exchangeKey(form, turn)
		in, out := d.tensors(key, push), d.tensors(key+1, pull[turn])
		if d.err != nil {
			return both, d.err
		}
		if both[turn], err = d.ends.Prepare(ctx, nil, in, out, opts...); err != nil {
			return both, err
		}
	}
	d.made[form] = both
	return both, nil
}

// throttle waits until at most afdAhead rounds are queued in the stream.
func (d *afdDevice) throttle(ctx context.Context) error {
	e := d.events[d.queued%afdAhead]
	d.queued++
	if d.queued > afdAhead {
		if err := e.Sync(ctx); err != nil {
			return err
		}
	}
	return e.Record(uintptr(d.stream))
}

// settle waits until the stream has done its work.
func (d *afdDevice) settle(ctx context.Context) error {
	e := d.events[d.queued%afdAhead]
	return errors.Join(e.Record(uintptr(d.stream)), e.Sync(ctx))
}

func (d *afdDevice) close() {
	for _, both := range d.made {
		for _, x := range both {
			_ = x.Close()
		}
	}
	d.ends.Close()
}

// afdDeviceWorker makes the round trips of a worker.
type afdDeviceWorker struct {
	*afdDevice
	w         *af.Worker
	push      []backend.Mem // one
	pull      []backend.Mem // by server
	pushes    [tripKinds][]af.KeyTensor
	pulls     [tripKinds][][]af.KeyTensor
	prepared  [2]*af.Prepared
	count     uint64    // of checked round trips
	digests   [2]uint64 // of the pushes that the servers' buffers answer
	got, want []byte
}

func newAFDDeviceWorker(a *afdShape, node *postoffice.Node) (_ *afdDeviceWorker, err error) {
	x := &afdDeviceWorker{got: make([]byte, a.pull), want: bytes.Clone(a.image[:a.pull])}
	if x.w, err = af.NewWorker(node, af.WorkerOptions{}); err != nil {
		return nil, err
	}
	if x.afdDevice, err = newAFDDevice(a, node); err == nil {
		x.push, x.pull = x.alloc(1, a.push), x.alloc(node.Topology().NumServers, a.pull)
		for i := range x.pushes {
			x.pushes[i] = x.tensors(pushKey(i), x.push)
			x.pulls[i] = slices.Collect(slices.Chunk(x.tensors(pullKey(i), x.pull), 1))
		}
		err = x.err
	}
	for i := range x.prepared {
		if err == nil {
			x.prepared[i], err = x.w.Prepare(x.pushes[i], x.pulls[i], af.Complete)
		}
	}
	if err != nil {
		x.w.Close()
		return nil, err
	}
	return x, nil
}

func (x *afdDeviceWorker) close() {
	x.afdDevice.close()
	for _, p := range x.prepared {
		p.Close()
	}
	x.w.Close()
}

// do makes n round trips, and returns the nanoseconds of each.
func (x *afdDeviceWorker) do(ctx context.Context, _, form string, _ time.Duration, n int) ([]int64, error) {
	var both [2]*streams.Exchange
	if form == formHosts || form == formStreams {
		var err error
		if both, err = x.exchanges(ctx, form, x.push, [2][]backend.Mem{x.pull, x.pull}); err != nil {
			return nil, err
		}
	}
	for turn := range x.digests {
		x.count++
		push := x.host[0]
		stamp(push, x.count)
		if err := errors.Join(x.back.Copy(x.push[0], backend.Bytes(push)), x.clear()); err != nil {
			return nil, err
		}
		if err := x.trip(ctx, form, checkedTrip+turn, both[turn]); err != nil {
			return nil, err
		}
		x.digests[turn] = digest(0, push)
		if err := x.compare(form, turn, "a checked round trip"); err != nil {
			return nil, err
		}
	}
	if err := x.clear(); err != nil {
		return nil, err
	}
	ns, err := timed(n, func(i int) error { return x.trip(ctx, form, i&1, both[i&1]) })
	if err != nil {
		return nil, err
	}
	return ns, x.compare(form, (n-1)&1, "the timed round trips")
}

// trip makes round trip i by messages, or one by exchange.
func (x *afdDeviceWorker) trip(ctx context.Context, form string, i int, exchange *streams.Exchange) error {
	switch {
	case form == formHosts:
		if err := exchange.Send(af.Complete); err != nil {
			return err
		}
		return exchange.Receive(ctx)
	case form == formStreams:
		if err := exchange.QueueSend(x.stream); err != nil {
			return err
		}
		if err := exchange.QueueReceive(x.stream); err != nil {
			return err
		}
		return errors.Join(x.settle(ctx), exchange.Check())
	}
	var call af.Call
	var err error
	if form == formPrepared && i < checkedTrip {
		call, err = x.prepared[i].Start()
	} else {
		call, err = x.w.PushPull(x.pushes[i], x.pulls[i], af.Complete)
	}
	if err != nil {
		return err
	}
	return call.Wait(ctx)
}

// clear clears the pull tensors.
func (x *afdDeviceWorker) clear() (err error) {
	clear(x.got)
	for _, m := range x.pull {
		err = errors.Join(err, x.back.Copy(m, backend.Bytes(x.got)))
	}
	return err
}

// compare compares the pull tensors with the contents of the servers' buffers.
func (x *afdDeviceWorker) compare(form string, turn int, after string) error {
	for server, m := range x.pull {
		if err := x.back.Copy(backend.Bytes(x.got), m); err != nil {
			return err
		}
		stamp(x.want, answerTo(x.digests[turn], server))
		if !bytes.Equal(x.got, x.want) {
			return fmt.Errorf("%s: after %s: the answer of server %d is not the one to this push", form, after, server)
		}
	}
	return nil
}

// afdDeviceServer answers the workers.
type afdDeviceServer struct {
	*afdDevice
	push    []backend.Mem             // of exchanges, by worker
	answers [2][]backend.Mem          // by worker
	out     [tripKinds][]af.KeyTensor // answers by messages, by worker
	making  sync.Mutex                // guards host
}

func newAFDDeviceServer(a *afdShape, node *postoffice.Node) (*afdDeviceServer, error) {
	s := &afdDeviceServer{}
	workers := node.Topology().NumWorkers
	var err error
	if s.afdDevice, err = newAFDDevice(a, node); err != nil {
		return nil, err
	}
	s.push = s.alloc(workers, a.push)
	for turn := range s.answers {
		s.answers[turn] = s.alloc(workers, a.pull)
	}
	for i := range s.out {
		s.out[i] = s.tensors(pullKey(i), s.answers[i%2])
	}
	if s.err != nil {
		return nil, s.err
	}
	server, err := af.NewServer(node, af.ServerOptions{})
	if err != nil {
		return nil, err
	}
	return s, server.Handle(func(b af.Batch) {
		if err := s.answer(b); err != nil {
			node.Log().Error("respond", "err", errors.Join(err, b.Refuse(err)))
		}
	})
}

// answer answers a batch.
func (s *afdDeviceServer) answer(b af.Batch) error {
	p := b.Pushes()
	if len(p) != 1 || len(b.Pulls()) != 1 || p[0].Val.Len() != s.afdShape.push || (p[0].Key-timedKey)/2 >= uint64(len(s.out)) {
		return fmt.Errorf("a batch of %d pushes and %d pulls, want one push of %d bytes and one pull", len(p), len(b.Pulls()), s.afdShape.push)
	}
	i, w := int(p[0].Key-timedKey)/2, b.Worker()
	if i >= checkedTrip {
		if err := s.make(p[0].Val.Mem(), s.answers[i%2][w]); err != nil {
			return err
		}
	}
	return b.Respond(s.out[i][w:w+1], af.Complete)
}

// make writes the answer to a push.
func (s *afdDeviceServer) make(push, to backend.Mem) error {
	s.making.Lock()
	defer s.making.Unlock()
	if err := s.back.Copy(backend.Bytes(s.host[0]), push); err != nil {
		return err
	}
	stamp(s.host[1], answerTo(digest(0, s.host[0]), s.rank))
	return s.back.Copy(to, backend.Bytes(s.host[1]))
}

// do answers n round trips of prepared GPU exchanges, and those before. It returns zeros.
func (s *afdDeviceServer) do(ctx context.Context, _, form string, _ time.Duration, n int) ([]int64, error) {
	ns := make([]int64, n)
	if form != formHosts && form != formStreams {
		return ns, nil
	}
	both, err := s.exchanges(ctx, form, s.push, s.answers)
	s.queued = 0
	for i := 0; i < n+2 && err == nil; i++ {
		err = s.round(ctx, form, both[i&1], s.answers[i&1], i < 2)
	}
	if form == formStreams && err == nil {
		err = errors.Join(s.settle(ctx), both[0].Check(), both[1].Check())
	}
	return ns, err
}

// round answers a round of an exchange.
func (s *afdDeviceServer) round(ctx context.Context, form string, x *streams.Exchange, answers []backend.Mem, checked bool) (err error) {
	if form == formHosts {
		err = x.Receive(ctx)
	} else if err = x.QueueReceive(s.stream); err == nil && checked {
		err = s.settle(ctx)
	}
	for w := 0; w < len(answers) && checked && err == nil; w++ {
		err = s.make(s.push[w], answers[w])
	}
	if err != nil {
		return err
	}
	if form == formHosts {
		return x.Send(af.Complete)
	}
	return errors.Join(x.QueueSend(s.stream), s.throttle(ctx))
}
