package streams

// How the two ends of an exchange meet: workers offer, servers accept.

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
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// newExchange checks the arguments of a Prepare.
func newExchange(d *directory, peers []int, push, pull []af.KeyTensor, opts []Option) (*Exchange, error) {
	x := &Exchange{dir: d, first: d.node.Role() == van.Worker, done: make(chan struct{}), timing: timing{answer: make(chan bool, 1)}}
	if x.first {
		x.timing.limit = d.node.Limit(0)
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
	x.spin, x.crowded = d.node.Config().BusyPoll.Spin(), runtime.GOMAXPROCS(0) <= fewThreads
	if x.spin > 0 {
		x.spin += time.Duration(bytesOf(push, pull) / bytesEach)
	}
	for _, p := range x.peers {
		for _, t := range slices.Concat(p.in, p.out) {
			t.Val.Mem().Retain()
		}
	}
	return x, nil
}

// bytesEach is how many bytes of an exchange let a wait look a nanosecond longer before it sleeps: they are copied at no less, mostly.
const bytesEach = 100

// bytesOf is how many bytes tensors have.
func bytesOf(lists ...[]af.KeyTensor) (n int) {
	for _, t := range slices.Concat(lists...) {
		n += t.Val.Len()
	}
	return n
}

// fewThreads is a number of threads for goroutines that those who look without pause may take up.
const fewThreads = 3

// meet makes this end, and waits until all peers have made theirs.
func (x *Exchange) meet(ctx context.Context, m *memory) error {
	own, err := x.make(m)
	if err != nil {
		return err
	}
	if x.first {
		return x.offer(ctx, own)
	}
	return x.accept(ctx, own)
}

// giveUp ends an exchange that has not met its peers.
func (x *Exchange) giveUp(err error) {
	x.fail(err)
	_ = x.Close()
	if x.first { // it may have ended while offers were being sent, which must not stay behind the end
		x.tell(x.names, err)
	}
}

// divide checks the arguments and gives each peer its part.
func (x *Exchange) divide(ranks []int, push, pull []af.KeyTensor) error {
	node := x.dir.node
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
	case each[0] > MaxTensors || each[1] > MaxTensors:
		return fmt.Errorf("%w: %d push and %d pull tensors for each peer, want at most %d", van.ErrInvalid, each[0], each[1], MaxTensors)
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

// make takes words, or a line, from m and names the tensors that peers are to copy: by peer if they differ.
func (x *Exchange) make(m *memory) (own []*note, err error) {
	first := note{host: x.host != nil}
	x.words = words{m: m, lines: make([]reached, len(x.peers))}
	if x.host != nil {
		first.line, err = m.makeHost(x.dir.node.Backend(), x.host, len(x.peers))
	} else {
		limited := x.timing.limit > 0
		if first.flags, err = x.words.make(x.dir.node.Backend(), x.first, limited); err == nil && limited {
			x.timing.begun = half(x.words.begun)
		}
	}
	if err != nil {
		return nil, err
	}
	for i, p := range x.peers {
		n := first
		n.in = parts(p.in)
		n.flags.at = uint32(slotHead + i*wordStride)
		if x.first && i > 0 {
			n.out = own[0].out
		} else if n.out, err = x.words.share(p.out); err != nil {
			return nil, err
		}
		own = append(own, &n)
	}
	return own, nil
}

// offer is the worker's part: it says what it has, and waits for all servers. One that is away is waited for.
func (x *Exchange) offer(ctx context.Context, own []*note) error {
	d := x.dir
	id := d.last.Add(1)
	d.mu.Lock()
	if d.over != nil {
		defer d.mu.Unlock()
		return d.over
	}
	x.names, x.meeting = []name{{d.node.ID(), id}}, true
	d.all[x.names[0]] = x
	d.mu.Unlock()
	tell := func() error {
		for i, p := range x.peers {
			d.mu.Lock()
			offered := p.offered
			p.offered = true // unless it is lost from now on
			d.mu.Unlock()
			if offered {
				continue
			}
			own[i].verb, own[i].id = verbOffer, id
			if err := d.send(p.id, own[i]); err != nil {
				d.mu.Lock()
				p.offered = false
				d.mu.Unlock()
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

// accepted takes a server's answer. dir.mu is held.
func (x *Exchange) accepted(from int, n *note) error {
	i := x.with(from)
	if i < 0 || x.peers[i].said != nil {
		return fmt.Errorf("%w: an answer to exchange %d that it was not asked for, or a second one", van.ErrMalformed, n.id)
	}
	x.peers[i].said = n
	x.dir.wake()
	return nil
}

// accept is the server's part: it waits for all workers, and answers.
func (x *Exchange) accept(ctx context.Context, own []*note) error {
	d := x.dir
	d.mu.Lock()
	d.waiting = append(d.waiting, x)
	d.mu.Unlock()
	err := x.await(ctx, func() error { return nil }, x.match, x.unmatched)
	d.mu.Lock()
	d.unwait(x)
	d.mu.Unlock()
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
		if err := d.send(p.id, own[i]); err != nil {
			return err
		}
	}
	return nil
}

// match takes the offers that x is for, when all workers have made theirs. dir.mu is held.
func (x *Exchange) match() (bool, error) {
	d := x.dir
	found := make([]name, 0, len(x.peers))
	for _, p := range x.peers {
		var same []name // the same keys may be offered, and waited for, more than once
		for k, n := range d.offers {
			if k.worker == p.id && p.same(n) {
				same = append(same, k)
			}
		}
		slices.SortFunc(same, func(a, b name) int { return cmp.Compare(int64(a.id-b.id), 0) })
		turn := before(d, x, p)
		if turn >= len(same) {
			continue
		}
		first := &same[turn]
		n := d.offers[*first]
		if err := cmp.Or(d.alike(x, p, n), x.fits(p, n.out, p.in), x.fits(p, n.in, p.out)); err != nil {
			delete(d.offers, *first)
			d.failing.Go(func() { _ = d.send(p.id, &note{verb: verbOver, id: n.id, text: err.Error()}) })
			return false, err
		}
		found = append(found, *first)
	}
	if len(found) < len(x.peers) {
		return false, nil
	}
	for i, k := range found {
		x.peers[i].said = d.offers[k]
		delete(d.offers, k)
		d.all[k] = x
	}
	x.names = found
	d.unwait(x)
	return true, nil
}

// same tells whether a worker's offer is meant for p.
func (p *peer) same(n *note) bool { return sameKeys(n.out, p.in) && sameKeys(n.in, p.out) }

// before is how many offers of p's keys are for exchanges that were to be prepared earlier. dir.mu is held.
func before(d *directory, x *Exchange, p *peer) (n int) {
	for _, y := range d.waiting {
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

// fits refuses tensors of a peer whose keys or lengths are not those of l.
func (x *Exchange) fits(p *peer, theirs []part, l []af.KeyTensor) error {
	if !sameKeys(theirs, l) {
		return fmt.Errorf("%w: %s has tensors with keys %v, want %v", van.ErrMalformed, x.dir.node.PeerName(p.id), keysOf(theirs), keysOf(parts(l)))
	}
	for i := range l {
		if theirs[i].len != l[i].Val.Len() {
			return fmt.Errorf("%w: the tensor with key %d has %d bytes at %s, and %d here", van.ErrInvalid, l[i].Key, theirs[i].len, x.dir.node.PeerName(p.id), l[i].Val.Len())
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

// unmatched says what workers have offered that does not match. dir.mu is held.
func (x *Exchange) unmatched() string {
	var others []string
	for k, n := range x.dir.offers {
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

// await waits until done, for which dir.mu is held; each time that something has changed it calls step before. missing says what the peers have not done that have said nothing.
func (x *Exchange) await(ctx context.Context, step func() error, done func() (bool, error), missing func() string) error {
	d, begun := x.dir, clock.Now()
	for {
		d.mu.Lock()
		changed := d.changed
		d.mu.Unlock()
		if err := step(); err != nil {
			return err
		}
		d.mu.Lock()
		ok, err := done()
		if f := x.failed.Load(); f != nil {
			err = cmp.Or(err, *f)
		}
		if err == nil {
			err = d.over
		}
		d.mu.Unlock()
		if ok || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-d.node.Ended():
			return cmp.Or(d.node.Alive(), van.ErrClosed)
		case <-ctx.Done():
			d.mu.Lock()
			defer d.mu.Unlock()
			var who []string
			for _, p := range x.peers {
				if p.said == nil && !slices.ContainsFunc(d.offersOf(p), p.same) {
					who = append(who, d.node.PeerName(p.id))
				}
			}
			return &van.Error{Op: "wait for the other ends", Peer: strings.Join(who, ", "), Detail: missing(),
				Elapsed: time.Duration(clock.Now() - begun), Err: van.TimedOut(context.Cause(ctx))}
		}
	}
}

// reach maps what peer i has named.
func (x *Exchange) reach(i int, p *peer) error {
	var err error
	if x.host != nil {
		err = x.host.reach(i, &p.said.line)
	} else {
		err = x.words.reach(i, &p.said.flags)
	}
	if err == nil {
		err = x.words.mapOut(i, p.said.out, p.in)
	}
	if err != nil {
		return &van.Error{Op: "map memory", Peer: x.dir.node.PeerName(p.id), Err: err, Hint: "exchanges of both ends are for GPUs of one host that reach each other (stepaf doctor)"}
	}
	return nil
}
