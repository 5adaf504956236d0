package streams

// Preparation of an exchange: workers send offers, servers accept them.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// newExchange checks the arguments of a Prepare.
func newExchange(e *Ends, peers []int, push, pull []af.KeyTensor, opts []Option) (*Exchange, error) {
	x := &Exchange{ends: e, first: e.node.Role() == van.Worker, done: make(chan struct{}), timing: timing{answer: make(chan bool, 1)}}
	if x.first {
		x.timing.limit = e.node.Limit(0)
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
	x.spin, x.crowded = e.node.Config().BusyPoll.Spin(), runtime.GOMAXPROCS(0) <= fewThreads
	if x.spin > 0 {
		x.spin += time.Duration(bytesOf(push, pull) / bytesEach)
	}
	x.ending = gpusync.NewEnding(len(x.peers))
	for _, p := range x.peers {
		for _, t := range slices.Concat(p.in, p.out) {
			t.Val.Mem().Retain()
		}
	}
	return x, nil
}

// bytesEach is the number of bytes of an exchange that extend the polling of a wait by a nanosecond: copies are
// rarely slower than this rate.
const bytesEach = 100

// bytesOf returns the size of the tensors in bytes.
func bytesOf(lists ...[]af.KeyTensor) (n int) {
	for _, t := range slices.Concat(lists...) {
		n += t.Val.Len()
	}
	return n
}

// fewThreads is the number of threads for goroutines up to which polling goroutines may occupy all threads.
const fewThreads = 3

// connect creates this end, and waits until all peers have created theirs.
func (x *Exchange) connect(ctx context.Context) error {
	own, err := x.make()
	if err != nil {
		return err
	}
	if x.first {
		return x.offer(ctx, own)
	}
	return x.accept(ctx, own)
}

// cancel ends an exchange whose preparation has failed.
func (x *Exchange) cancel(err error) {
	x.fail(err)
	_ = x.Close()
	if x.first { // offers that were sent while the exchange ended must not arrive after the notice of its end
		x.tell(x.names, err)
	}
}

// divide checks the arguments and assigns each peer its tensors.
func (x *Exchange) divide(ranks []int, push, pull []af.KeyTensor) error {
	node := x.ends.node
	t := node.Topology()
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
	case each[0] > maxTensors || each[1] > maxTensors:
		return fmt.Errorf("%w: %d push and %d pull tensors for each peer, want at most %d", van.ErrInvalid, each[0], each[1], maxTensors)
	}
	for k, list := range [][]af.KeyTensor{push, pull} {
		for i := range list {
			if m := list[i].Val.Mem(); m.OnHost() && m.Len() > 0 {
				return fmt.Errorf("%w: %s tensor %d (key %d), %s: want memory of the node's device", van.ErrInvalid, [...]string{"push", "pull"}[k], i, list[i].Key, list[i].Val.String())
			} else if err := backend.CheckDevice(node.Backend(), m); err != nil {
				return fmt.Errorf("%w: %s tensor %d (key %d): %w", van.ErrInvalid, [...]string{"push", "pull"}[k], i, list[i].Key, err)
			}
		}
	}
	if err := x.apart(push, pull, n); err != nil {
		return err
	}
	for i, r := range ranks {
		if r < 0 || r >= len(ids) || i > 0 && r <= ranks[i-1] {
			return fmt.Errorf("%w: peers %v, want different ranks of 0 to %d, ascending", van.ErrInvalid, ranks, len(ids)-1)
		}
		if !node.Native(ids[r]) {
			return fmt.Errorf("%w: %s is of another implementation, which has no exchanges in streams", van.ErrInvalid, node.PeerName(ids[r]))
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

// apart refuses tensors to be filled that share memory: the later copy would stay. On a
// worker of several servers it refuses those that share memory with a push tensor, too,
// which one server may have yet to copy when another has answered.
func (x *Exchange) apart(push, pull []af.KeyTensor, peers int) error {
	in, kind := pull, "pull"
	if !x.first {
		in, kind = push, "push"
	}
	for i := range in {
		m := in[i].Val.Mem()
		for j := range i {
			if in[j].Val.Mem().Overlaps(m) {
				return fmt.Errorf("%w: %s tensor %d (key %d) shares memory with %s tensor %d (key %d), want memory of its own", van.ErrInvalid, kind, i, in[i].Key, kind, j, in[j].Key)
			}
		}
		for j := 0; x.first && peers > 1 && j < len(push); j++ {
			if m.Overlaps(push[j].Val.Mem()) {
				return fmt.Errorf("%w: pull tensor %d (key %d) shares memory with push tensor %d (key %d), want memory of its own with %d servers", van.ErrInvalid, i, in[i].Key, j, push[j].Key, peers)
			}
		}
	}
	return nil
}

// make allocates flags, and describes the tensors that peers are to copy: one note for each peer.
func (x *Exchange) make() (own []*note, err error) {
	m := &x.ends.memory
	first := note{host: x.host != nil}
	x.mem = exchangeMemory{m: m, peers: make([]peerMemory, len(x.peers))}
	if x.host != nil {
		first.flags, err = m.makeHost(x.ends.node.Backend(), x.host, len(x.peers))
	} else {
		limited := x.timing.limit > 0
		if first.flags, err = x.mem.make(x.ends.node.Backend(), x.first, limited); err == nil && limited {
			x.timing.begun = gpusync.OnHost(x.mem.begun)
		}
	}
	if err != nil {
		return nil, err
	}
	for i, p := range x.peers {
		n := first
		n.in = parts(p.in)
		if x.host == nil {
			n.flags.at = uint32(slotHead + i*slotStride)
		}
		if x.first && i > 0 {
			n.out = own[0].out
		} else if n.out, err = x.mem.share(p.out); err != nil {
			return nil, err
		}
		own = append(own, &n)
	}
	return own, nil
}

// offer is the worker's part of the preparation: it sends its tensors and flags to the servers, and waits for the
// answers of all. A server that is not connected is waited for.
func (x *Exchange) offer(ctx context.Context, own []*note) error {
	e := x.ends
	id := e.last.Add(1)
	e.mu.Lock()
	if e.over != nil {
		defer e.mu.Unlock()
		return e.over
	}
	x.names, x.connecting = []name{{e.node.ID(), id}}, true
	e.all[x.names[0]] = x
	e.mu.Unlock()
	tell := func() error {
		for i, p := range x.peers {
			e.mu.Lock()
			offered := p.offered
			p.offered = true // reset if the peer is lost later
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
		x.connecting = slices.ContainsFunc(x.peers, func(p *peer) bool { return p.said == nil })
		return !x.connecting, nil
	}
	if err := x.await(ctx, tell, answered, func() string { return "has not prepared its end" }); err != nil {
		return err
	}
	for i, p := range x.peers {
		if err := x.fits(p, p.said.out, p.in); err != nil {
			return err
		}
		if err := x.reach(i, p); err != nil {
			return err
		}
	}
	return nil
}

// accepted handles a server's answer. ends.mu is held.
func (x *Exchange) accepted(from int, n *note) error {
	i := x.with(from)
	if i < 0 || x.peers[i].said != nil {
		return fmt.Errorf("%w: an unexpected or second answer to exchange %d", van.ErrMalformed, n.id)
	}
	x.peers[i].said = n
	x.ends.wake()
	return nil
}

// accept is the server's part of the preparation: it waits for the offers of all workers, and answers.
func (x *Exchange) accept(ctx context.Context, own []*note) error {
	e := x.ends
	e.mu.Lock()
	e.waiting = append(e.waiting, x)
	e.mu.Unlock()
	err := x.await(ctx, func() error { return nil }, x.match, x.unmatched)
	e.mu.Lock()
	e.unwait(x)
	e.mu.Unlock()
	if err != nil {
		return err
	}
	for i, p := range x.peers {
		if err := x.reach(i, p); err != nil {
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

// match takes the offers that match x, when all workers have sent theirs. ends.mu is held.
func (x *Exchange) match() (bool, error) {
	e := x.ends
	found := make([]name, 0, len(x.peers))
	for _, p := range x.peers {
		same, turn := e.sameOffers(p), before(e, x, p)
		if turn >= len(same) {
			continue
		}
		first := &same[turn]
		n := e.offers[*first]
		if err := cmp.Or(e.alike(x, p, n), x.fits(p, n.out, p.in), x.fits(p, n.in, p.out)); err != nil {
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
	e.unwait(x)
	return true, nil
}

// sameOffers returns the names of a worker's offers with the keys of p, in call order: equal keys may be offered and
// awaited more than once. ends.mu is held.
func (e *Ends) sameOffers(p *peer) (same []name) {
	for k, n := range e.offers {
		if k.worker == p.id && sameKeys(n.out, p.in) && sameKeys(n.in, p.out) {
			same = append(same, k)
		}
	}
	slices.SortFunc(same, func(a, b name) int { return cmp.Compare(int64(a.id-b.id), 0) })
	return same
}

// before returns how many offers with p's keys belong to earlier calls of Prepare. ends.mu is held.
func before(e *Ends, x *Exchange, p *peer) (n int) {
	for _, y := range e.waiting {
		if y == x {
			break
		}
		if i := y.with(p.id); i >= 0 && equalKeys(y.peers[i].in, p.in) && equalKeys(y.peers[i].out, p.out) {
			n++
		}
	}
	return n
}

func equalKeys(a, b []af.KeyTensor) bool {
	return slices.EqualFunc(a, b, func(a, b af.KeyTensor) bool { return a.Key == b.Key })
}

func sameKeys(p []part, l []af.KeyTensor) bool {
	return slices.EqualFunc(p, l, func(p part, t af.KeyTensor) bool { return p.key == t.Key })
}

// fits returns an error if keys or lengths of a peer's tensors differ from those of l.
func (x *Exchange) fits(p *peer, theirs []part, l []af.KeyTensor) error {
	if !sameKeys(theirs, l) {
		return fmt.Errorf("%w: %s has tensors with keys %v, want %v", van.ErrMalformed, x.ends.node.PeerName(p.id), keysOf(theirs), keysOf(parts(l)))
	}
	for i := range l {
		if theirs[i].len != l[i].Val.Len() {
			return fmt.Errorf("%w: the tensor with key %d has %d bytes at %s, and %d here", van.ErrInvalid, l[i].Key, theirs[i].len, x.ends.node.PeerName(p.id), l[i].Val.Len())
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

// unmatched describes the offers of workers that do not match. ends.mu is held.
func (x *Exchange) unmatched() string {
	var others []string
	for k, n := range x.ends.offers {
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

// await waits until done returns true; done is called with ends.mu held. It calls step before each call of done, at
// the start and after each call of wake. missing describes, for the error, the pending steps of the
// silent peers.
func (x *Exchange) await(ctx context.Context, step func() error, done func() (bool, error), missing func() string) error {
	e, begun := x.ends, clock.Now()
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
				if p.said == nil && len(e.sameOffers(p)) == 0 {
					who = append(who, e.node.PeerName(p.id))
				}
			}
			return &van.Error{Op: "wait for the other ends", Peer: strings.Join(who, ", "), Detail: missing(),
				Elapsed: clock.Since(begun), Err: van.TimedOut(context.Cause(ctx))}
		}
	}
}

// reach maps the memory that peer i has exported.
func (x *Exchange) reach(i int, p *peer) error {
	var err error
	if x.host != nil {
		err = x.host.reach(i, &p.said.flags)
	} else {
		err = x.mem.reach(i, &p.said.flags)
	}
	if err == nil {
		err = x.mem.mapOut(i, p.said.out, p.in)
	}
	if err != nil {
		return &van.Error{Op: "map memory", Peer: x.ends.node.PeerName(p.id), Err: err, Hint: "stream exchanges need GPUs of one host with access to each other (stepaf doctor)"}
	}
	return nil
}
