package window

// Flags in host memory, for waits on the host. A put with a signal writes the number of signals not only to a flag on
// the receiver's device but also to a page of its host memory that the processes of all ranks share. Reading the page
// is one load; reading a flag of the device is a copy of ten microseconds. Both contain the same number, and either
// may be written first. Only waits on the host use the page. Streams wait for the flags of the device, so decisions
// about streams use those.
//
// If a page cannot be shared, for example because a process may not open another process's files, waits read the
// device.

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
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	hostHead = 64 // the token
	hostWord = 4
)

// hostWords holds the flags in host memory of a window. It is constant once Open has returned.
type hostWords struct {
	signals int
	fd      int           // file of this rank's page, until all ranks have mapped it; -1: none
	own     *memfd.Page   // nil: none
	far     []backend.Mem // by rank: its page, as this rank's device addresses it; empty if it cannot be mapped
}

// size returns the size of a page, for n ranks.
func (h *hostWords) size(n int) int {
	size := os.Getpagesize()
	return (hostHead + n*h.signals*hostWord + size - 1) / size * size
}

// at returns the offset of the flag for a signal of rank from, on its receiver.
func (h *hostWords) at(from, signal int) int { return hostHead + (from*h.signals+signal)*hostWord }

// offer creates this rank's page, which begins with the token, and returns its name for the other ranks.
func (h *hostWords) offer(n int, token gpusync.Token) (name []byte, err error) {
	if h.fd, h.own, err = memfd.NewPage(h.size(n)); err != nil {
		return nil, err
	}
	copy(h.own.Mem, token[:])
	return memfd.Name(h.fd), nil
}

// reach maps a rank's page and registers it with the device.
func (h *hostWords) reach(d backend.StreamDevice, rank int, name []byte, token gpusync.Token) error {
	p, err := memfd.MapNamed(name, h.size(len(h.far)), true)
	if err != nil {
		return err
	}
	if gpusync.Token(p.Mem[:gpusync.TokenLen]) != token {
		return fmt.Errorf("%w: the page is not the rank's", van.ErrMalformed)
	}
	h.far[rank], err = d.RegisterHost(backend.Bytes(p.Mem).WithOwner(p))
	return err
}

// met closes the file, after all other ranks have mapped it.
func (h *hostWords) met() {
	if h.fd >= 0 {
		_ = unix.Close(h.fd)
		h.fd = -1
	}
}

// write returns the write of number n into the flag for a signal of rank self on another rank; has is false if the
// rank's page is not mapped.
func (h *hostWords) write(rank, self, signal int, n uint64) (w backend.FlagWrite, has bool) {
	if h.far[rank].Len() == 0 {
		return w, false
	}
	return backend.FlagWrite{Word: h.far[rank].Sub(h.at(self, signal), hostWord), V: uint32(n)}, true
}

// came reports whether signal n of rank from has arrived according to the page. The signal may have arrived even if
// came returns false.
func (h *hostWords) came(from, signal int, n uint64) bool {
	if h.own == nil {
		return false
	}
	word := (*atomic.Uint32)(unsafe.Pointer(&h.own.Mem[h.at(from, signal)]))
	came := int32(word.Load()-uint32(n)) >= 0
	memfd.Read()
	return came
}

// busyTime is how long a new wait polls without sleeping.
const busyTime = time.Millisecond

// spin polls the page for a signal, without sleeping, for as long as waits may spin. It does not receive messages
// meanwhile: polling a transport takes longer than the flag may be late.
func (l *streamIn) spin(ctx context.Context, signal int) {
	app := l.p.w.app
	most, begun := app.Config().BusyPoll.Spin(), clock.Now()
	switch {
	case l.m.host.own == nil, most == 0:
		return
	case most < 0:
		most = busyTime // at a time, since the device must be polled, too
	}
	for i := 0; ; i++ {
		switch {
		case l.m.host.came(l.p.rank, signal, l.taken[signal].Load()+1):
			return
		case i%looksEach != 0:
			continue
		case clock.Since(begun) >= most, ctx.Err() != nil, l.p.end() != nil, app.Alive() != nil:
			return
		}
		runtime.Gosched()
	}
}

// looksEach is the number of polls of a flag between two checks of errors and limits.
const looksEach = 512
