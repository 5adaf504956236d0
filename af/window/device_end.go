package window

// This file owns the end of a window on devices: who is told, and when streams that wait go on.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// partLimit is how long streams of a window that is over wait for a rank to say that it is over there, and exitLimit the
// same when the node has ended.
const (
	partLimit = postoffice.DefaultTimeout
	exitLimit = time.Second
)

// peerChanged is told that a node is lost, or there. It must not block.
func (v *onDevice) peerChanged(id int, up bool, _ error) {
	if r, is := slices.BinarySearch(v.w.layer.NodeIDs(), id); is && !up {
		v.over(r)
	}
}

// over notes that the window is over for a rank.
func (v *onDevice) over(rank int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.links[rank].over = true
	v.wake()
}

// wake makes parted look again. v.mu is held.
func (v *onDevice) wake() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// awaited tells whether a stream waits for a signal of a rank that has not come.
func (v *onDevice) awaited(rank int) bool {
	for signal := range v.w.signals {
		if n := v.links[rank].claimed(signal); n > 0 {
			if came, err := v.came(rank, signal, n); !came || err != nil {
				return true
			}
		}
	}
	return false
}

// anyAwaited is a rank for which a stream waits, or -1.
func (v *onDevice) anyAwaited() int {
	for r := range v.links {
		if v.awaited(r) {
			return r
		}
	}
	return -1
}

// left ends the window if a stream waits for what a rank that has closed its end has not signalled. What it has signalled has come.
func (v *onDevice) left(rank int, err error) {
	if v.w.over.Load() == nil && v.awaited(rank) {
		v.w.fail(fmt.Errorf("%w; a stream waits for %s", err, v.w.layer.Name(rank)))
	}
}

// end is called when the window is over: the others are told, and when it is for them, too, streams that
// wait go on.
func (v *onDevice) end() {
	v.ending.Do(func() {
		defer close(v.freed)
		if !v.offered { // no other rank has this window
			return
		}
		v.tell()
		if !v.isReady() { // nothing is in streams
			return
		}
		v.parted()
		if err := v.free(); err != nil {
			v.w.app.Log().Error("streams that wait for a window may not go on", "window", v.w.String(), "err", err)
		}
	})
}

// tell tells the other ranks that the window is over here.
func (v *onDevice) tell() {
	for _, p := range v.w.peers {
		if p.rank == v.w.self {
			continue
		}
		p.recv.Lock()
		n := note{verb: verbOver, signal: noSignal}
		m := p.message(&p.answer, &n, false, v.w.timestamp(p.tells)|1)
		p.tells++
		err := v.w.app.Send(m)
		p.recv.Unlock()
		if err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			v.w.app.Log().Info("could not tell a rank that a window is over", "window", v.w.String(), "rank", p.rank, "err", err)
		}
	}
}

// parted waits until the window is over for all other ranks, as far as can be known.
func (v *onDevice) parted() {
	patience := time.NewTimer(partLimit)
	defer patience.Stop()
	for {
		v.mu.Lock()
		changed := v.changed
		i := slices.IndexFunc(v.links, func(l *link) bool { return l.p.rank != v.w.self && !l.over && l.p.gone.Load() == nil })
		v.mu.Unlock()
		if i < 0 {
			return
		}
		select {
		case <-changed:
		case <-v.w.app.Ended():
			return
		case <-patience.C:
			v.w.app.Log().Warn("streams go on, but a rank has not said that the window is over there, too", "window", v.w.String(), "rank", i)
			return
		}
	}
}

// free makes streams that wait go on: those for a signal wait in the word of the last one that was claimed, or in the one before.
func (v *onDevice) free() error {
	for rank, l := range v.links {
		for signal := range v.w.signals {
			n := l.claimed(signal) // the window is over: what is claimed from here on has come
			if n == 0 {
				continue
			}
			last, _ := v.place(n)
			for word := range 2 {
				if word != last && n <= v.lap {
					continue
				}
				if err := v.d.WriteFlag(v.release, v.word(v.whole, rank, signal, word).Sub(4, 4), 1); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// giveUp ends what Open has begun. It has not returned the window.
func (v *onDevice) giveUp() {
	v.end()
	if v.unwatch != nil {
		v.unwatch()
		v.stopExit()
	}
	_ = v.giveBack()
}

// giveBack gives the streams back.
func (v *onDevice) giveBack() (err error) {
	v.reading.Lock()
	defer v.reading.Unlock()
	v.shut = true
	for _, s := range []uintptr{v.own, v.release} {
		if s != 0 {
			err = errors.Join(err, v.d.FreeStream(s))
		}
	}
	return err
}

// letGo is the first part of Close. If a stream waits here the window is over, and the stream goes on, before anything waits for
// that: also a put in it that waits for room, with a lock held. The error says that what was put may be nothing good.
func (v *onDevice) letGo() error {
	r := v.anyAwaited()
	if r < 0 {
		return nil
	}
	late := slices.ContainsFunc(v.links, func(l *link) bool { return !l.arrived(l.puts.Load()) })
	w := v.w
	err := fmt.Errorf("%w: this window, while a stream waited for a signal of %s", van.ErrClosed, w.layer.Name(r))
	w.fail(err)
	v.end()
	if late {
		return &van.Error{Op: "close window", Node: w.app.Name(), Detail: w.String() + ": what was put and had not arrived is not whole", Err: err}
	}
	return nil
}

// close ends this rank's part, of a window that is over. Streams that were let go get the limit once more to
// come to what they have put.
func (v *onDevice) close(ctx context.Context) (err error) {
	if !errors.Is(*v.w.over.Load(), errClosed) || v.anyAwaited() >= 0 {
		v.end()
		var cancel context.CancelFunc
		ctx, cancel = v.w.limited()
		defer cancel()
	}
	for r := range v.links {
		err = cmp.Or(err, v.flush(ctx, "close window", r))
	}
	v.unwatch()
	v.stopExit()
	return errors.Join(err, v.giveBack())
}
