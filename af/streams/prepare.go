package streams

// How the two ends of an exchange meet: workers offer, servers accept.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// peer is another end.
type peer struct {
	id      int
	said    *note       // its offer or its answer; nil before that
	over    bool        // its end is over, or it is lost; guarded by e.mu
	offered bool        // the worker's offer has gone to the process that is there now
	word    backend.Mem // of this end, where it signals
	far     backend.Mem // its word, where this end signals
	out, in []af.KeyTensor
	from    []backend.Mem // what the tensors of in are copied from, of the same lengths
}

// copied is memory that cannot be shared, and where it is copied for the peers.
type copied struct {
	src backend.Mem
	to  *backend.Buffer
}

// Prepare makes this node's end of an exchange, and waits until all peers have made theirs, for as
// long as ctx lasts, or postoffice.DefaultTimeout if it has no deadline. peers are group ranks of servers or workers, ascending; nil
// means all. All tensors lie on the node's device; what they are for depends on the role:
//
//   - On a worker each push tensor goes to every server, and server s, counted among peers, fills the pull
//     tensors pull[s*Q : (s+1)*Q], as with af.Worker.PushPull.
//   - On a server worker w fills push[w*P : (w+1)*P], and pull[w*Q : (w+1)*Q] is what it gets.
//
// The ends meet by their keys: those of a worker's pushes, and of its pulls of one server, are those of the
// server's for that worker, in the same order. Ends with the same keys meet in the order of their calls. Lengths that differ are an error on both sides.
// Tensors are held until Close, and those of exchanges that were captured for good.
//
// A round of a worker may take until the limit of its rounds, see Limit.
func (e *Ends) Prepare(ctx context.Context, peers []int, push, pull []af.KeyTensor, opts ...Option) (*Exchange, error) {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, postoffice.DefaultTimeout, van.ErrTimeout)
		defer cancel()
	}
	x, err := e.prepare(ctx, peers, push, pull, opts)
	if err != nil {
		return nil, &van.Error{Op: "prepare exchange in streams", Node: e.node.Name(), Err: err}
	}
	return x, nil
}

func (e *Ends) prepare(ctx context.Context, peers []int, push, pull []af.KeyTensor, opts []Option) (*Exchange, error) {
	x := &Exchange{e: e, first: e.node.Role() == van.Worker, done: make(chan struct{}), timing: timing{answer: make(chan bool, 1)}}
	if x.first {
		x.limit = postoffice.DefaultTimeout
	}
	for _, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("%w: an option is nil", van.ErrInvalid)
		}
		o.apply(x)
	}
	x.sendNext = x.first
	if err := x.divide(peers, push, pull); err != nil {
		return nil, err
	}
	own, err := x.make()
	if err == nil {
		for _, p := range x.peers {
			hold(p.in)
			hold(p.out)
		}
		if x.first {
			err = x.offer(ctx, own)
		} else {
			err = x.accept(ctx, own)
		}
		if err == nil {
			err = x.begin()
		}
		if err != nil {
			x.fail(err)
			_ = x.Close()
			if x.first { // it may have ended while offers were being sent, which must not stay behind the end
				x.tell(x.names, err)
			}
		}
	}
	if err != nil {
		x.putBack() // also of what was not made
		return nil, err
	}
	return x, nil
}

// begin lets an exchange be used, unless it is over.
func (x *Exchange) begin() error {
	e := x.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if f := x.failed.Load(); f != nil {
		return *f
	}
	if e.over != nil {
		return e.over
	}
	x.ready = true
	if !e.watching {
		e.watching = true
		e.failing.Go(e.watch)
	}
	return nil
}

func hold(l []af.KeyTensor) {
	for i := range l {
		m := l[i].Val.Mem()
		m.Retain()
	}
}

// divide checks the arguments and gives each peer its part.
func (x *Exchange) divide(ranks []int, push, pull []af.KeyTensor) error {
	e, t := x.e, x.e.node.Topology()
	ids := t.ServerInstances()
	if !x.first {
		ids = make([]int, t.NumWorkers)
		for r := range ids {
			ids[r] = t.WorkerInstance(r)
		}
	}
	if ranks == nil {
		for r := range ids {
			ranks = append(ranks, r)
		}
	}
	n := len(ranks)
	each := [2]int{len(push), len(pull) / max(n, 1)}
	if !x.first {
		each[0] = len(push) / max(n, 1)
	}
	switch {
	case n == 0:
		return fmt.Errorf("%w: no peers, want at least one", van.ErrInvalid)
	case len(pull)%n != 0 || !x.first && len(push)%n != 0:
		return fmt.Errorf("%w: %d push and %d pull tensors for %d peers, want the same number for each", van.ErrInvalid, len(push), len(pull), n)
	case each[0]+each[1] == 0:
		return fmt.Errorf("%w: no push and no pull tensors, want at least one", van.ErrInvalid)
	case each[0] > MaxTensors || each[1] > MaxTensors:
		return fmt.Errorf("%w: %d push and %d pull tensors for each peer, want at most %d", van.ErrInvalid, each[0], each[1], MaxTensors)
	}
	for k, list := range [][]af.KeyTensor{push, pull} {
		for i := range list {
			if m := list[i].Val.Mem(); m.OnHost() && m.Len() > 0 {
				return fmt.Errorf("%w: %s tensor %d (key %d), %s: want memory of the node's device", van.ErrInvalid, [...]string{"push", "pull"}[k], i, list[i].Key, list[i].Val.String())
			} else if err := backend.CheckDevice(e.node.Backend(), m); err != nil {
				return fmt.Errorf("%w: %s tensor %d (key %d): %w", van.ErrInvalid, [...]string{"push", "pull"}[k], i, list[i].Key, err)
			}
		}
	}
	for i, r := range ranks {
		if r < 0 || r >= len(ids) || i > 0 && r <= ranks[i-1] {
			return fmt.Errorf("%w: peers %v, want different ranks of 0 to %d, ascending", van.ErrInvalid, ranks, len(ids)-1)
		}
		if !e.node.Native(ids[r]) {
			return fmt.Errorf("%w: %s is of another implementation, which has no exchanges in streams", van.ErrInvalid, e.node.PeerName(ids[r]))
		}
		p := &peer{id: ids[r]}
		q := pull[i*each[1] : (i+1)*each[1]]
		if p.out, p.in = push, q; !x.first {
			p.out, p.in = q, push[i*each[0]:(i+1)*each[0]]
		}
		p.out, p.in = slices.Clone(p.out), slices.Clone(p.in)
		x.peers = append(x.peers, p)
	}
	return nil
}

// make takes words and names the tensors that peers are to copy: by peer if they differ.
func (x *Exchange) make() (own []*note, err error) {
	e := x.e
	e.making.Lock()
	defer e.making.Unlock()
	if err := e.open(); err != nil {
		return nil, err
	}
	if x.slot, err = e.slot(len(x.peers)); err != nil {
		return nil, err
	}
	host, err := e.hostWords()
	if err != nil {
		return nil, err
	}
	words := (*[2]atomic.Uint32)(host.Ptr())
	words[0].Store(0)
	words[1].Store(0)
	x.voidMem, x.voided = host.Sub(4, 4), &words[1]
	if x.first && x.limit > 0 {
		x.begunMem, x.begun = host.Sub(0, 4), &words[0]
	}
	var flags slot
	image := make([]byte, x.slot.Len())
	le.PutUint64(image, random.Uint64())
	le.PutUint64(image[8:], random.Uint64())
	copy(flags.token[:], image)
	le.PutUint32(image[validAt:], 1)
	for i, p := range x.peers {
		at := slotHead + i*wordStride
		p.word = x.slot.Sub(at, 8)
		if x.first { // as if an answer were here: QueueSend clears it
			le.PutUint32(image[at:], arrived)
		}
	}
	if err := e.dev.Copy(x.slot, backend.Bytes(image)); err != nil {
		return nil, err
	}
	if flags.export, err = e.dev.Export(x.slot); err != nil {
		return nil, err
	}
	for i, p := range x.peers {
		n := &note{flags: flags, in: parts(p.in)}
		n.flags.at = uint32(slotHead + i*wordStride)
		if x.first && i > 0 {
			n.out = own[0].out
		} else if n.out, err = x.share(p.out); err != nil {
			return nil, err
		}
		own = append(own, n)
	}
	return own, nil
}

func parts(l []af.KeyTensor) []part {
	p := make([]part, len(l))
	for i := range l {
		p[i] = part{key: l[i].Key, len: l[i].Val.Len()}
	}
	return p
}

// share names tensors for peers.
func (x *Exchange) share(l []af.KeyTensor) ([]part, error) {
	p := parts(l)
	for i := range p {
		if p[i].len == 0 {
			continue
		}
		m := l[i].Val.Mem()
		e, err := x.e.dev.Export(m)
		if errors.Is(err, backend.ErrNotExportable) {
			b, err := x.e.buffers.Get(m.Len())
			if err != nil {
				return nil, err
			}
			x.copied = append(x.copied, copied{m, b})
			if e, err = x.e.dev.Export(b.Mem()); err != nil {
				return nil, err
			}
		} else if err != nil {
			return nil, err
		}
		p[i].export = e
	}
	return p, nil
}

// putBack ends the use of buffers, of an exchange that is over and was not captured.
func (x *Exchange) putBack() {
	for _, c := range x.copied {
		c.to.Put()
	}
	x.copied = nil
}

// offer is the worker's part: it says what it has, and waits for all servers. One that is away is waited for.
func (x *Exchange) offer(ctx context.Context, own []*note) error {
	e := x.e
	id := e.last.Add(1)
	e.mu.Lock()
	if e.over != nil {
		defer e.mu.Unlock()
		return e.over
	}
	x.names, x.meeting = []name{{e.node.ID(), id}}, true
	e.all[x.names[0]] = x
	e.mu.Unlock()
	tell := func() error {
		for i, p := range x.peers {
			e.mu.Lock()
			offered := p.offered
			p.offered = true // unless it is lost from now on
			e.mu.Unlock()
			if offered {
				continue
			}
			own[i].verb, own[i].id = verbOffer, id
			if err := e.send(p.id, own[i]); err != nil {
				e.mu.Lock()
				p.offered = false
				e.mu.Unlock()
				if !errors.Is(err, van.ErrPeerLost) {
					return err
				}
			}
		}
		return nil
	}
	answered := func() (bool, error) {
		x.meeting = slices.ContainsFunc(x.peers, func(p *peer) bool { return p.said == nil })
		return !x.meeting, nil
	}
	if err := e.await(ctx, x, tell, answered, func() string { return "has not prepared its end" }); err != nil {
		return err
	}
	for _, p := range x.peers {
		if err := x.fits(p, p.said.out, p.in); err != nil {
			return err
		}
		if err := x.reach(p); err != nil {
			return err
		}
	}
	return nil
}

// accepted takes a server's answer. e.mu is held.
func (x *Exchange) accepted(from int, n *note) error {
	i := x.with(from)
	if i < 0 || x.peers[i].said != nil {
		return fmt.Errorf("%w: an answer to exchange %d that it was not asked for, or a second one", van.ErrMalformed, n.id)
	}
	x.peers[i].said = n
	x.e.wake()
	return nil
}

// accept is the server's part: it waits for all workers, and answers.
func (x *Exchange) accept(ctx context.Context, own []*note) error {
	e := x.e
	e.mu.Lock()
	e.waiting = append(e.waiting, x)
	e.mu.Unlock()
	offered := func() (bool, error) { return x.match() }
	defer e.unwait(x)
	if err := e.await(ctx, x, func() error { return nil }, offered, x.unmatched); err != nil {
		return err
	}
	for _, p := range x.peers {
		if err := x.reach(p); err != nil {
			return err
		}
	}
	for i, p := range x.peers {
		own[i].verb, own[i].id, own[i].in = verbAccept, p.said.id, nil
		if err := e.send(p.id, own[i]); err != nil {
			return err
		}
	}
	return nil
}

// match takes the offers that x is for, when all workers have made theirs. e.mu is held.
func (x *Exchange) match() (bool, error) {
	e := x.e
	found := make([]name, 0, len(x.peers))
	for _, p := range x.peers {
		var same []name // the same keys may be offered, and waited for, more than once
		for k, n := range e.offers {
			if k.worker == p.id && p.same(n) {
				same = append(same, k)
			}
		}
		slices.SortFunc(same, func(a, b name) int { return cmp.Compare(int64(a.id-b.id), 0) })
		turn := x.before(p)
		if turn >= len(same) {
			continue
		}
		first := &same[turn]
		n := e.offers[*first]
		if err := cmp.Or(x.fits(p, n.out, p.in), x.fits(p, n.in, p.out)); err != nil {
			delete(e.offers, *first)
			e.failing.Go(func() { _ = e.send(p.id, &note{verb: verbOver, id: n.id, text: err.Error()}) })
			return false, err
		}
		found = append(found, *first)
	}
	if len(found) < len(x.peers) {
		return false, nil
	}
	for i, k := range found {
		x.peers[i].said = e.offers[k]
		delete(e.offers, k)
		e.all[k] = x
	}
	x.names = found
	e.unwaitLocked(x)
	return true, nil
}

// same tells whether a worker's offer is meant for p.
func (p *peer) same(n *note) bool { return sameKeys(n.out, p.in) && sameKeys(n.in, p.out) }

// before is how many offers of p's keys are for exchanges that were to be prepared earlier. e.mu is held.
func (x *Exchange) before(p *peer) (n int) {
	for _, y := range x.e.waiting {
		if y == x {
			break
		}
		if i := y.with(p.id); i >= 0 && equalKeys(y.peers[i].in, p.in) && equalKeys(y.peers[i].out, p.out) {
			n++
		}
	}
	return n
}

// unwait takes x out of those that wait for offers; later ones with its keys move up.
func (e *Ends) unwait(x *Exchange) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unwaitLocked(x)
}

func (e *Ends) unwaitLocked(x *Exchange) {
	if i := slices.Index(e.waiting, x); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
		e.wake()
	}
}

func equalKeys(a, b []af.KeyTensor) bool {
	return slices.EqualFunc(a, b, func(a, b af.KeyTensor) bool { return a.Key == b.Key })
}

func sameKeys(p []part, l []af.KeyTensor) bool {
	return slices.EqualFunc(p, l, func(p part, t af.KeyTensor) bool { return p.key == t.Key })
}

// fits refuses tensors of a peer whose keys or lengths are not those of l.
func (x *Exchange) fits(p *peer, theirs []part, l []af.KeyTensor) error {
	if !sameKeys(theirs, l) {
		return fmt.Errorf("%w: %s has tensors with keys %v, want %v", van.ErrMalformed, x.e.node.PeerName(p.id), keysOf(theirs), keysOf(parts(l)))
	}
	for i := range l {
		if theirs[i].len != l[i].Val.Len() {
			return fmt.Errorf("%w: the tensor with key %d has %d bytes at %s, and %d here", van.ErrInvalid, l[i].Key, theirs[i].len, x.e.node.PeerName(p.id), l[i].Val.Len())
		}
	}
	return nil
}

func keysOf(p []part) []uint64 {
	k := make([]uint64, len(p))
	for i := range p {
		k[i] = p[i].key
	}
	return k
}

// unmatched says what workers have offered that does not match. e.mu is held.
func (x *Exchange) unmatched() string {
	var others []string
	for k, n := range x.e.offers {
		if x.with(k.worker) >= 0 {
			others = append(others, fmt.Sprintf("%s pushes keys %v and pulls %v", van.NodeName(k.worker), keysOf(n.out), keysOf(n.in)))
		}
	}
	slices.Sort(others)
	what := fmt.Sprintf("has not prepared an exchange that pushes keys %v and pulls %v", keysOf(parts(x.peers[0].in)), keysOf(parts(x.peers[0].out)))
	if len(others) > 0 {
		what += "; " + strings.Join(others, "; ")
	}
	return what
}

// await waits until done, for which e.mu is held; each time that something has changed it calls step before. missing says what the peers have not done that have said nothing.
func (e *Ends) await(ctx context.Context, x *Exchange, step func() error, done func() (bool, error), missing func() string) error {
	begun := clock.Now()
	for {
		e.mu.Lock()
		changed := e.changed
		e.mu.Unlock()
		if err := step(); err != nil {
			return err
		}
		e.mu.Lock()
		ok, err := done()
		if f := x.failed.Load(); f != nil {
			err = cmp.Or(err, *f)
		}
		if err == nil {
			err = e.over
		}
		e.mu.Unlock()
		if ok || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-e.node.Ended():
			return cmp.Or(e.node.Alive(), van.ErrClosed)
		case <-ctx.Done():
			e.mu.Lock()
			defer e.mu.Unlock()
			var who []string
			for _, p := range x.peers {
				if p.said == nil && !slices.ContainsFunc(x.offersOf(p), p.same) {
					who = append(who, e.node.PeerName(p.id))
				}
			}
			return &van.Error{Op: "wait for the other ends", Peer: strings.Join(who, ", "), Detail: missing(), Elapsed: elapsed(begun), Err: ended(ctx)}
		}
	}
}

// offersOf are the offers of a worker. e.mu is held.
func (x *Exchange) offersOf(p *peer) (l []*note) {
	for k, n := range x.e.offers {
		if k.worker == p.id {
			l = append(l, n)
		}
	}
	return l
}

// ended is why a context has, as van.ErrTimeout if its time is over.
func ended(ctx context.Context) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, van.ErrTimeout) {
		return fmt.Errorf("%w: %w", van.ErrTimeout, err)
	}
	return err
}

// reach maps what a peer has named.
func (x *Exchange) reach(p *peer) error {
	bad := func(err error) error {
		return &van.Error{Op: "map device memory", Peer: x.e.node.PeerName(p.id), Err: err, Hint: "exchanges in streams are for GPUs of one host that reach each other (stepaf doctor)"}
	}
	flags := &p.said.flags
	m, err := van.MapExport(x.e.dev, flags.export, int(flags.at)+wordStride)
	if err != nil {
		return bad(err)
	}
	var token [tokenLen]byte
	if err := x.e.dev.Copy(backend.Bytes(token[:]), m.Sub(0, tokenLen)); err != nil {
		return bad(err)
	}
	if !bytes.Equal(token[:], flags.token[:]) {
		return bad(fmt.Errorf("%w: the memory mapped is not the peer's; it may be on another host", van.ErrMalformed))
	}
	p.far = m.Sub(int(flags.at), 4)
	p.from = make([]backend.Mem, len(p.in))
	for i := range p.in {
		if t := &p.said.out[i]; t.len > 0 {
			if p.from[i], err = van.MapExport(x.e.dev, t.export, t.len); err != nil {
				return bad(err)
			}
		}
	}
	return nil
}
