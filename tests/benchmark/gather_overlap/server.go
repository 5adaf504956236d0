package main

// The server: receive buffers of the pushes, AllGather or handing on, and the answers.

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// handedOn is the application id of pieces that servers hand on, and a bit of their keys. The other bits
// are the key of the piece, and its worker.
const (
	handedOn    = 0x6A0000
	handedOnBit = 1 << 62
)

func handedOnKey(k uint64, worker int) uint64 { return handedOnBit | uint64(worker)<<40 | k }

// result is the expected tensors and the buffers of a server for one size.
type result struct {
	gathered   []byte // [servers][workers][part]
	pushed     []byte // [workers][tensor]
	all, own   af.Tensor
	each       [][]eachGather // by worker and piece
	ofSiblings [][]byte       // of gathered
	checks     [ways][]check
}

// eachGather are the arguments of the AllGatherV of one piece.
type eachGather struct {
	out []af.Tensor
	in  af.Tensor
}

// check is one piece of a result.
type check struct {
	worker, server, piece int
	got, want             []byte
}

// forward is a piece that is handed on.
type forward struct {
	key [8]byte
	mem backend.Mem
}

type server struct {
	n                    *prog.Node
	app                  cluster.App
	comm                 *collective.Comm
	comms                []*collective.Comm // by worker
	customer             *cluster.Customer
	self, servers, works int
	siblings             []int // node ids
	results              []result
	forwards             map[uint64]*forward   // by handedOnKey
	places               map[place]backend.Mem // where siblings' pieces are wanted
	events               chan event
	ops                  []collective.Op // of the call in progress
	messages             sync.Pool
	lent                 sync.WaitGroup // messages of the call in progress whose memory siblings have not taken

	mu      sync.Mutex
	came    int        // pieces of the call in progress
	waiting []af.Batch // for its end
}

// event is a notification to the program that would compute.
type event struct {
	key    uint64
	worker int
	whole  bool // all of the call has come here
}

// place is a key of a sibling's.
type place struct {
	sender int
	key    uint64
}

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	t := n.Topology()
	list, err := parseSizes(t.NumServers)
	if err != nil {
		return nil, err
	}
	x := &server{n: n, app: (*cluster.Node)(n.Node).App(), self: t.GroupRank, servers: t.NumServers, works: t.NumWorkers, events: make(chan event, t.NumWorkers**pieces),
		forwards: map[uint64]*forward{}, places: map[place]backend.Mem{}}
	x.messages.New = func() any { return new(van.Message) }
	var ranks []int
	for r := range x.servers {
		ranks = append(ranks, r)
		if r != x.self {
			x.siblings = append(x.siblings, van.ServerID(r))
		}
	}
	for i, size := range list {
		if err := x.layOut(s, i, size); err != nil {
			return nil, err
		}
	}
	if x.customer, err = x.app.AddCustomer(handedOn, handedOn, x.receive); err != nil {
		return nil, err
	}
	if x.comm, err = collective.New(context.Background(), n.Node, collective.Options{Ranks: ranks}); err != nil { // which connects them
		return nil, err
	}
	for w := range x.works {
		c, err := collective.New(context.Background(), n.Node, collective.Options{ID: 1 + w, Ranks: ranks})
		if err != nil {
			return nil, err
		}
		x.comms = append(x.comms, c)
	}
	go x.answer()
	return x.handle, nil
}

// layOut says where everything of one size is wanted.
func (x *server) layOut(s *af.Server, i, size int) error {
	r := result{gathered: make([]byte, x.works*size), pushed: make([]byte, x.works*size)}
	parts := cut(r.gathered, x.servers)
	r.all, r.own = tensor(r.gathered), tensor(parts[x.self])
	var workers []int
	var keys [ways][]uint64
	for w := range x.works {
		want := contents(w, size)
		for p, got := range cut(cut(r.pushed, x.works)[w], *pieces) {
			r.checks[pushToAll] = append(r.checks[pushToAll], check{w, x.self, p, got, cut(want, *pieces)[p]})
		}
		for rank, part := range parts {
			for p, got := range cut(cut(part, x.works)[w], *pieces) {
				r.checks[gather] = append(r.checks[gather], check{w, rank, p, got, cut(cut(want, x.servers)[rank], *pieces)[p]})
			}
		}
		r.each = append(r.each, make([]eachGather, *pieces))
		for p := range *pieces {
			e := &r.each[w][p]
			for _, part := range parts {
				e.out = append(e.out, tensor(cut(cut(part, x.works)[w], *pieces)[p]))
			}
			e.in = e.out[x.self]
			workers = append(workers, w)
			for way := range ways {
				keys[way] = append(keys[way], key(i, way, p))
			}
		}
	}
	r.checks[gatherEach], r.checks[handOn] = r.checks[gather], r.checks[gather]
	for way, mem := range [ways][]byte{gather: parts[x.self], gatherEach: parts[x.self], handOn: parts[x.self], pushToAll: r.pushed} {
		if err := s.RegisterRecvTensor(tensor(mem), workers, keys[way]); err != nil {
			return err
		}
	}
	reg, direct := van.As[van.BufferRegistrar]((*cluster.Node)(x.n.Node).Van())
	for rank, part := range parts {
		if rank != x.self {
			r.ofSiblings = append(r.ofSiblings, part)
		}
		for k, piece := range cut(part, x.works**pieces) {
			id, at := handedOnKey(keys[handOn][k], workers[k]), backend.Bytes(piece)
			if rank == x.self {
				f := &forward{mem: at}
				binary.LittleEndian.PutUint64(f.key[:], id)
				x.forwards[id] = f
				continue
			}
			x.places[place{van.ServerID(rank), id}] = at
			if direct {
				if err := reg.RegisterRecvBuffer(van.ServerID(rank), id, at); err != nil {
					return err
				}
			}
		}
	}
	x.results = append(x.results, r)
	return nil
}

// handle takes a piece of a worker's.
func (x *server) handle(b af.Batch) error {
	k, worker := b.Pushes()[0].Key, b.Worker()
	_, way, _ := parseKey(k)
	if way == handOn {
		if err := x.pass(handedOnKey(k, worker)); err != nil {
			return err
		}
	}
	if len(b.Pulls()) == 0 {
		if err := b.Respond(nil); err != nil {
			return err
		}
		x.count(k, worker, nil)
		return nil
	}
	x.count(k, worker, &b)
	return nil
}

// Sent implements van.Completion: a sibling has a piece.
func (x *server) Sent() { x.lent.Done() }

// pass hands a piece on.
func (x *server) pass(id uint64) error {
	f := x.forwards[id]
	m := x.messages.Get().(*van.Message)
	defer x.messages.Put(m)
	for _, to := range x.siblings {
		m.Reset()
		m.Receiver, m.Request, m.Push, m.Head, m.Timestamp = to, true, true, van.Single, x.customer.Skip(1)
		m.AppID, m.CustomerID, m.Key, m.ValLen = handedOn, handedOn, id, int32(f.mem.Len())
		datamsg.SetData(m, backend.Bytes(f.key[:]), f.mem, backend.Mem{}, van.TypeOther)
		m.Done = x
		x.lent.Add(1)
		if err := x.app.Send(m); err != nil {
			x.lent.Done()
			return err
		}
	}
	return nil
}

// receive takes a piece that a sibling has handed on.
func (x *server) receive(msg *van.Message) {
	at := x.places[place{msg.Sender, msg.Key}]
	if !msg.Placed {
		if msg.Vals.Len() != at.Len() {
			x.n.Fail(fmt.Errorf("%s hands on %d bytes under key %#x, want %d", van.NodeName(msg.Sender), msg.Vals.Len(), msg.Key, at.Len()))
			return
		}
		if err := x.n.Backend().Copy(at, msg.Vals); err != nil {
			x.n.Fail(err)
			return
		}
	}
	x.count(msg.Key&(1<<40-1), 0, nil)
}

// count notes that a piece has come, and which batch waits for the rest.
func (x *server) count(k uint64, worker int, b *af.Batch) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if b != nil {
		x.waiting = append(x.waiting, *b)
	}
	x.came++
	want := x.works * *pieces
	_, way, _ := parseKey(k)
	if way == handOn {
		want *= x.servers
	}
	if x.came == want || way == gatherEach {
		x.events <- event{k, worker, x.came == want}
	}
}

// answer ends the calls, one after the other: it is the program that would compute.
func (x *server) answer() {
	for number := uint64(0); ; {
		e := <-x.events
		i, way, piece := parseKey(e.key)
		r := &x.results[i]
		var err error
		if way == gatherEach {
			var op collective.Op
			g := &r.each[e.worker][piece]
			op, err = x.comms[e.worker].AllGatherV(g.out, g.in)
			x.ops = append(x.ops, op)
		}
		if !e.whole && err == nil {
			continue
		}
		x.mu.Lock()
		batches := x.waiting
		x.came, x.waiting = 0, nil
		x.mu.Unlock()
		var ns int64
		if err == nil {
			ns, err = x.finish(r, way, number)
		}
		if err != nil {
			x.n.Fail(fmt.Errorf("call %d, %d bytes, %s: %w", number, len(r.pushed)/x.works, wayNames[way], err))
			x.n.Close() // no worker waits for an answer
			return
		}
		t := tensor(binary.LittleEndian.AppendUint64(nil, uint64(ns)))
		for _, b := range batches {
			if err := b.Respond([]af.KeyTensor{{Key: b.Pulls()[0].Key, Val: t}}); err != nil {
				x.n.Fail(err)
			}
		}
		number++
	}
}

// finish calls AllGather in that way, and returns when all parts were there, in nanoseconds from the call's beginning.
func (x *server) finish(r *result, way int, number uint64) (ns int64, err error) {
	if way == gather {
		op, err := x.comm.AllGather(r.all, r.own)
		if err != nil {
			return 0, err
		}
		x.ops = append(x.ops, op)
	}
	for _, op := range x.ops {
		if err := op.Wait(context.Background()); err != nil {
			return 0, err
		}
	}
	x.ops = x.ops[:0]
	end := clock.Now()
	x.lent.Wait() // the next push of a worker goes to the memory that is handed on; AllGather has waited for the same
	start, last := end, false
	for _, c := range r.checks[way] {
		start = min(start, binary.LittleEndian.Uint64(c.got))
		n := binary.LittleEndian.Uint64(c.got[len(c.got)-8:])
		last = n&isLast != 0
		if n &^= isLast; n != number {
			return 0, fmt.Errorf("piece %d of worker %d for server %d is of call %d", c.piece, c.worker, c.server, n)
		}
		if last && !bytes.Equal(c.got[8:len(c.got)-8], c.want[8:len(c.want)-8]) {
			return 0, fmt.Errorf("piece %d of worker %d for server %d has wrong bytes", c.piece, c.worker, c.server)
		}
	}
	if last { // the data of this call must not pass for the next one's
		for _, part := range r.ofSiblings {
			clear(part)
		}
		clear(r.pushed)
	}
	return int64(end - start), nil
}
