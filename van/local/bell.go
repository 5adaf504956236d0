package local

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bell is a node's doorbell: its owner sleeps on it, its peers wake it.
type bell struct {
	mem []byte
}

// sleeper is one of those who may sleep on a node's bell.
type sleeper uint32

const (
	nobody sleeper = iota
	theLoop
	aPoll
)

// Layout of a bell's page.
const (
	offArmed = 0  // u32: the sleeper to wake
	offRings = 64 // u32 of each sleeper, on a line of its own: counts the rings; a futex
	bellLen  = 4096
)

// mapBell maps the bell in fd, which stays open.
func mapBell(fd int) (*bell, error) {
	mem, err := unix.Mmap(fd, 0, bellLen, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	return &bell{mem}, nil
}

func (b *bell) unmap() {
	_ = unix.Munmap(b.mem)
	b.mem = nil
}

func (b *bell) word(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b.mem[off])) }

func (b *bell) rings(s sleeper) *atomic.Uint32 { return b.word(offRings * int(s)) }

// count is what s reads before its last look, and gives to wait.
func (b *bell) count(s sleeper) uint32 { return b.rings(s).Load() }

// arm makes peers wake s. It looks once more before it goes to sleep.
func (b *bell) arm(s sleeper) { b.word(offArmed).Store(uint32(s)) }

// disarm tells peers that the owner looks by itself.
func (b *bell) disarm() {
	if w := b.word(offArmed); w.Load() != 0 {
		w.Store(0)
	}
}

// ring wakes who has armed the bell. What it is to see must have been written
// before.
func (b *bell) ring() {
	w := b.word(offArmed)
	if s := w.Load(); s != 0 && s <= uint32(aPoll) && w.CompareAndSwap(s, 0) {
		b.wake(sleeper(s))
	}
}

// wake wakes s in any case.
func (b *bell) wake(s sleeper) {
	w := b.rings(s)
	w.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWake, 1, 0, 0, 0)
}

// wakeAll wakes whoever sleeps.
func (b *bell) wakeAll() {
	b.wake(theLoop)
	b.wake(aPoll)
}

// Operations of futex(2), between processes.
const (
	futexWait = 0
	futexWake = 1
)

// wait sleeps until the bell has rung since count was read, or until limit passes:
// that heals what a peer that writes nonsense to the page could do.
func (b *bell) wait(s sleeper, count uint32, limit time.Duration) error {
	ts := unix.NsecToTimespec(limit.Nanoseconds())
	_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(b.rings(s))), futexWait, uintptr(count),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	if e != 0 && !errors.Is(e, unix.EAGAIN) && !errors.Is(e, unix.EINTR) && !errors.Is(e, unix.ETIMEDOUT) {
		return fmt.Errorf("futex: %w", e)
	}
	return nil
}
