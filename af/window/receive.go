package window

// What a window hears: messages of other ranks, which ranks have closed their ends, and that the communicator has failed.

import (
	"fmt"
	"math"
	"slices"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// receive handles a message. It runs on a goroutine of the transport.
func (w *Window) receive(msg *van.Message) {
	b := &w.base
	if err := w.handle(msg); err != nil {
		b.refused.Add(1)
		if n, show := b.app.Rarely("window: " + logx.Kind(err)); show {
			b.app.Log().Warn("refused a message to a window", "window", b.String(), "from", b.app.PeerName(msg.Sender), "err", err, "so far", n)
		}
	}
}

// handle handles a message, or says why it makes no sense.
func (w *Window) handle(msg *van.Message) error {
	b := &w.base
	rank, member := slices.BinarySearch(b.layer.NodeIDs(), msg.Sender)
	n, err := parse(msg.Body)
	switch {
	case err != nil:
		return err
	case !member || rank == b.self:
		return fmt.Errorf("%w: %s is not another rank of %s", van.ErrMalformed, van.NodeName(msg.Sender), b)
	case n.window != b.tenant.Number || n.epoch != b.tenant.Epoch:
		return errStale
	}
	p := w.peers[rank]
	switch {
	case n.verb == verbTaken:
		return p.out.learn(&n)
	case n.verb == verbOver && w.dev != nil:
		w.dev.parting.over(rank)
		b.fail(fmt.Errorf("%w: the window is over at %s", van.ErrClosed, b.layer.Name(rank)))
		return nil
	case n.verb == verbOver, n.verb == verbPut && w.dev != nil:
		return fmt.Errorf("%w: verb %d, which is not for windows of this kind", van.ErrMalformed, n.verb)
	}
	left, err := p.in.receive(msg, n)
	if left {
		w.leave(rank, errRankClosed)
	}
	return err
}

// changed is told by the communicator.
func (w *Window) changed(rank int, err error) {
	if rank < 0 {
		w.base.fail(err)
		if w.base.closed.Load() {
			go w.end() // the communicator is in the middle of its failure
		}
		return
	}
	w.leave(rank, err)
}

// isOver is what follows when the window has become unusable.
func (w *Window) isOver(err error) {
	for _, p := range w.peers {
		p.sleepers.wakeAll()
	}
	if w.dev != nil && err != errClosed && w.dev.parting.isReady() { // otherwise Close, or Open, looks after it
		go w.dev.end()
	}
}

// leave notes that a rank has closed its end.
func (w *Window) leave(rank int, err error) {
	if p := w.peers[rank]; p.gone.CompareAndSwap(nil, &err) {
		p.sleepers.wakeAll()
		if w.dev != nil {
			w.dev.parting.over(rank)
			go w.dev.left(rank, err)
		}
	}
	if w.base.closed.Load() && w.base.over.Load() != nil && w.alone() {
		go w.end() // this may be a delivery to the customer
	}
}

// alone tells whether all other ranks have closed their ends.
func (w *Window) alone() bool {
	for r, p := range w.peers {
		if r != w.base.self && p.gone.Load() == nil {
			return false
		}
	}
	return true
}

// quiesce waits for who is sending to a rank, or taking what comes from it: the window is over.
func (w *Window) quiesce(p *peer) {
	if p.quiesce() {
		w.leave(p.rank, errRankClosed)
	}
}

// end takes the window off its node, when it is over. A later one with its application id goes on
// behind its timestamps.
func (w *Window) end() {
	w.ended.Do(func() {
		used := uint64(0)
		for _, p := range w.peers {
			w.quiesce(p)
			p.in.mu.Lock()
			used = max(used, p.out.next.Load(), p.in.tells)
			p.in.mu.Unlock()
		}
		w.base.tenant.Leave()
		if w.customer != nil {
			w.customer.Skip(int32(2 * used & math.MaxInt32))
			w.customer.Close()
		}
	})
}
