// Package failback moves the data of a peer to its preferred path, a link, which could not be made at first.
//
// van/local and van/tcp wrap another van. If the link to a peer cannot be made, the data of that peer goes over the van inside, and the
// link is tried again. Data on the link must not overtake earlier data on the van inside. The change to the link is therefore made as
// follows:
//
//  1. The sender makes a link. The handshake announces that marks are sent over the van inside. The receiver reads no message of that
//     link yet.
//  2. The sender blocks Sends to the peer over the van inside (the lock sends). It sends two marks there, one in the order of
//     requests and one in the order of answers. Then it installs the link.
//  3. The receiver delivers the messages before the marks, receives the marks, and begins to read the link.
//
// If the van inside loses the peer meanwhile, the marks may be lost. The link then ends as a broken link does, and so does a link
// whose marks do not arrive within MarkTime.
package failback

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// Pauses before a link is tried again. They double.
const (
	FirstPause = time.Second
	lastPause  = time.Minute
)

// MarkTime is the longest time that a link waits for its marks. It covers the time of the receiver's application for the messages before them.
const MarkTime = time.Minute

// Retry makes links that could not be made at first.
type Retry struct {
	Log      *slog.Logger
	Path     string        // where the data goes with a link: "through shared memory"
	Inside   func() string // the usual path of the van inside
	Pause    time.Duration // FirstPause, except in tests
	Hopeless func(error) bool
}

// First logs that the first attempt to make the link to peer id has failed with err. It reports whether a later one may succeed.
func (r *Retry) First(id int, err error, args ...any) bool {
	args = append([]any{"peer", van.NodeName(id), "err", err}, args...)
	if r.Hopeless(err) {
		r.Log.Warn("data goes over "+r.Inside()+", not "+r.Path+", for as long as both processes run", args...)
		return false
	}
	r.Log.Warn("data goes over "+r.Inside()+", not "+r.Path, append(args, "next try in", r.Pause)...)
	return true
}

// Run calls try with the id of a peer until it has made the link and moved the data there. It reports whether it has: otherwise no later
// try can succeed, the peer is not known any more, or ctx has ended.
func (r *Retry) Run(ctx context.Context, peer func() (id int, known bool), try func(id int) error) bool {
	var failed logx.Sparse
	for pause := r.Pause; ; pause = min(2*pause, lastPause) {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return false
		}
		id, known := peer()
		if !known {
			return false
		}
		err := try(id)
		if err == nil {
			r.Log.Info("data goes "+r.Path+" from now on, no longer over "+r.Inside(), "peer", van.NodeName(id))
			return true
		}
		if _, known = peer(); !known || ctx.Err() != nil {
			return false
		}
		if r.Hopeless(err) {
			r.Log.Warn("data goes over "+r.Inside()+" for as long as both processes run", "peer", van.NodeName(id), "err", err)
			return false
		}
		if k, speak := failed.Next(); speak {
			r.Log.Info("data still goes over "+r.Inside()+", not "+r.Path, "peer", van.NodeName(id), "err", err, "next try in", min(2*pause, lastPause), "tries", k)
		}
	}
}

// Change moves the data to peer id from inner to the link that mark names. install installs the link. A Send over inner to that peer holds
// sends for reading, and tests first whether the link is installed.
func Change(sends *sync.RWMutex, inner van.Van, id int, mark Mark, install func() error) error {
	sends.Lock()
	defer sends.Unlock()
	for _, request := range []bool{true, false} {
		if err := inner.Send(mark.message(id, request)); err != nil {
			return fmt.Errorf("mark over %s: %w", inner.Type(), err)
		}
	}
	return install()
}

// Mark names a link. Both ends know it from the handshake.
type Mark struct {
	Kind   string  // of the links of one van: a van inside another one may have links, too
	Number [8]byte // a random number
}

const markText = "stepaf/1 "

func (x Mark) message(id int, request bool) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push = id, request, true
	m.Body = append([]byte(markText+x.Kind+" "), x.Number[:]...)
	return m
}

// ReadMark returns the mark in m, a message of the van inside, if m has one of that kind.
func ReadMark(kind string, m *van.Message) (x Mark, ok bool) {
	if rest, ok := bytes.CutPrefix(m.Body, []byte(markText)); ok && !m.IsControl() {
		if rest, ok = bytes.CutPrefix(rest, []byte(kind)); ok && len(rest) == 1+len(x.Number) && rest[0] == ' ' {
			return Mark{kind, [8]byte(rest[1:])}, true
		}
	}
	return x, false
}

// Marks are the marks that the receiver's end of a link waits for. The zero value waits for none.
type Marks struct {
	of      Mark
	missing atomic.Uint32
}

// Await makes the link that mark names wait for its marks. If one is missing after MarkTime, it calls expired.
func (w *Marks) Await(mark Mark, expired func()) {
	w.of = mark
	w.missing.Store(1 | 2)
	time.AfterFunc(MarkTime, func() {
		if w.Missing() {
			expired()
		}
	})
}

// Missing reports whether a mark has not arrived.
func (w *Marks) Missing() bool { return w.missing.Load() != 0 }

// Arrived records that m, which has that mark, has arrived. It reports whether m was the last one that this link waited for.
func (w *Marks) Arrived(mark Mark, m *van.Message) bool {
	if !w.Missing() || w.of != mark {
		return false
	}
	bit := uint32(1)
	if m.Request {
		bit = 2
	}
	return w.missing.And(^bit) == bit
}
