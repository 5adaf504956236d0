package window

// Words in host memory, for waits on the host. A put with a signal writes how many there have been not only into the
// receiver's device but also into a page of its host, which the processes of all ranks share: a look there is one load, where one at
// a word of the device is a copy, of ten microseconds. Both words say the same, and either may say it first. Only waits on the host
// believe the page: streams wait for the device's words, so what is decided about them goes by these.
//
// Where a page cannot be shared, as with a process that may not look at another one's files, waits look at the device.

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	hostHead = 64 // the token, and nothing else
	hostWord = 4
)

// hostWords is what a window has of them. It does not change once Open has returned.
type hostWords struct {
	signals int
	fd      int           // of this rank's page, until all have mapped it; -1: none
	own     *memfd.Page   // nil: none
	far     []backend.Mem // by rank: its page, as this rank's device knows it; empty where it cannot be reached
}

// size is that of a page, for n ranks.
func (h *hostWords) size(n int) int {
	size := os.Getpagesize()
	return (hostHead + n*h.signals*hostWord + size - 1) / size * size
}

// at is where the word of a signal of rank from is, at its receiver.
func (h *hostWords) at(from, signal int) int { return hostHead + (from*h.signals+signal)*hostWord }

// offer makes this rank's page, with the token at its beginning, and returns what others are told.
func (h *hostWords) offer(n int, token []byte) (name []byte, err error) {
	if h.fd, err = memfd.New(h.size(n)); err == nil {
		h.own, err = memfd.Map(h.fd, h.size(n))
	}
	if err != nil {
		return nil, err
	}
	copy(h.own.Mem, token)
	return memfd.Name(h.fd), nil
}

// reach maps a rank's page and has the device pin it.
func (h *hostWords) reach(d backend.StreamDevice, rank int, name, token []byte) error {
	p, err := memfd.MapNamed(name, h.size(len(h.far)), true)
	if err != nil {
		return err
	}
	if string(p.Mem[:tokenLen]) != string(token) {
		return fmt.Errorf("%w: the page is not the rank's", van.ErrMalformed)
	}
	h.far[rank], err = d.RegisterHost(backend.Bytes(p.Mem).WithOwner(p))
	return err
}

// met closes the file, which all others that can have mapped.
func (h *hostWords) met() {
	if h.fd >= 0 {
		_ = unix.Close(h.fd)
		h.fd = -1
	}
}

// write is the write into the word of a signal of rank self at a rank that says that it is the n'th. There is none where the rank's page
// cannot be reached.
func (h *hostWords) write(rank, self, signal int, n uint64) (w backend.FlagWrite, has bool) {
	if h.far[rank].Len() == 0 {
		return w, false
	}
	return backend.FlagWrite{Word: h.far[rank].Sub(h.at(self, signal), hostWord), V: uint32(n)}, true
}

// came tells whether the word of a signal of rank from says that the n'th has come. It may have come when it says no.
func (h *hostWords) came(from, signal int, n uint64) bool {
	if h.own == nil {
		return false
	}
	word := (*atomic.Uint32)(unsafe.Pointer(&h.own.Mem[h.at(from, signal)]))
	came := int32(word.Load()-uint32(n)) >= 0
	memfd.Read()
	return came
}

// busyTime is how long a wait that began a moment ago looks without sleeping.
const busyTime = time.Millisecond

// spin waits on the host, without sleeping and for as long as waits are to do that, for a signal to come. It receives nothing meanwhile: each
// look at a transport takes longer than the word may be late.
func (l *streamIn) spin(ctx context.Context, signal int) {
	app := l.p.w.app
	most, begun := app.Config().BusyPoll.Spin(), clock.Now()
	switch {
	case l.m.host.own == nil, most == 0:
		return
	case most < 0:
		most = busyTime // at a time: then the device is looked at, too
	}
	for i := 0; ; i++ {
		switch {
		case l.m.host.came(l.p.rank, signal, l.taken[signal].Load()+1):
			return
		case i%looksEach != 0:
			continue
		case elapsed(begun) >= most, ctx.Err() != nil, l.p.end() != nil, app.Alive() != nil:
			return
		}
		runtime.Gosched()
	}
}

// looksEach is how many looks at a word there are between two at all else.
const looksEach = 512
