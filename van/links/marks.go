package links

import (
	"bytes"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// MarkTime is the longest time that a link waits for its marks, unless AwaitLonger is called. It includes the time that
// handlers of earlier messages take.
const MarkTime = time.Minute

// change moves the data to peer id from inner to the link that mark names. install installs the link. A Send over inner to that peer holds
// sends for reading, and tests first whether the link is installed.
func change(sends *sync.RWMutex, inner van.Van, id int, mark Mark, install func() error) error {
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
	limit   *time.Timer
	missing atomic.Uint32
}

// Await makes the link that mark names wait for its marks. If one is missing after MarkTime, it calls expired.
func (w *Marks) Await(mark Mark, expired func()) {
	w.of = mark
	w.limit = time.AfterFunc(MarkTime, func() {
		if w.Missing() {
			expired()
		}
	})
	w.missing.Store(1 | 2)
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
	last := w.missing.And(^bit) == bit
	if last {
		w.end()
	}
	return last
}

// end stops the timer, which refers to the van: the last mark has arrived, or the link has ended.
func (w *Marks) end() {
	if w.limit != nil {
		w.limit.Stop()
	}
}
