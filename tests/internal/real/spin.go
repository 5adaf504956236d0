package real

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
)

// Starved makes a process one in which a goroutine that computes keeps all others from running.
// Spin needs it.
var Starved = []string{"GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1"}

// Starve lets the first process of a role, which is Starved, compute for so long, and checks that
// no node loses it: barriers and calls wait for it, and end well. There are two workers.
func (c *Cluster) Starve(role string, d, soon time.Duration) error {
	barrier := c.Get("worker", 1).Barrier(van.WorkerGroup, time.Minute)
	if err := c.Get(role, 0).Spin(d); err != nil {
		return err
	}
	if err := <-c.Get("worker", 0).Barrier(van.WorkerGroup, soon); err != nil {
		return fmt.Errorf("the barrier of worker 0: %w", err)
	}
	if err := <-barrier; err != nil {
		return fmt.Errorf("the barrier of worker 1: %w", err)
	}
	if err := c.Works(20, soon); err != nil {
		return err
	}
	return c.NobodyLost()
}

// NobodyLost checks that no call has failed, and that no process has taken another for lost.
func (c *Cluster) NobodyLost() (err error) {
	for _, p := range c.All() {
		if s := p.State(); s.Stats.Failed > 0 || s.Fenced != "" {
			err = errors.Join(err, fmt.Errorf("%s: %s: want no call that failed", p, s))
		}
		for line := range strings.Lines(p.Log()) {
			if strings.Contains(line, ": peer lost peer=") { // not the end of a connection that was made again
				err = errors.Join(err, fmt.Errorf("%s has lost a peer: %s", p, strings.TrimSpace(line)))
			}
		}
	}
	return err
}

// Spin makes a process compute for so long, and answers when it has ended. No other goroutine
// of it may run meanwhile: see Starved. Its threads that are not Go's go on.
func (p *Process) Spin(d time.Duration) error {
	dir, err := os.MkdirTemp("", "stepaf-spin")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "end")
	if err := os.WriteFile(file, make([]byte, os.Getpagesize()), 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	done := p.Begin(Command{Do: doSpin, File: file})
	began := time.Now()
	<-time.After(d)
	if _, err := f.WriteAt([]byte{1}, 0); err != nil {
		return err
	}
	select {
	case e, ok := <-done:
		switch {
		case !ok || e.Text != "":
			return fmt.Errorf("%s: spin: %s", p, cmp.Or(e.Text, "the process has ended"))
		case e.ID > int(d/2/tickTime):
			return fmt.Errorf("%s: its clock has gone on by %d in %s: other goroutines have run", p, e.ID, time.Since(began))
		}
		return nil
	case <-time.After(p.c.slowly(patience)):
		return fmt.Errorf("%s: it computes still", p)
	}
}

// spin computes until the first byte of a file is not 0, and calls nothing meanwhile: a
// goroutine of Go can only be stopped at a call if signals are not to stop it.
func spin(file string) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := syscall.Mmap(int(f.Fd()), 0, os.Getpagesize(), syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	computeUntil(unsafe.SliceData(b))
	return syscall.Munmap(b)
}

// spins is more than the longest test needs, so that a process that was forgotten ends.
const spins = 1 << 40

// computeUntil is excluded from the race detector, whose calls would let others run.
//
//go:norace
//go:noinline
func computeUntil(end *byte) {
	for i := 0; i < spins && *end == 0; i++ {
	}
}
