package core

// The descriptors that a program's event loop waits for.

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/cluster"
)

// descriptor is an eventfd that is readable while a call has something to return. Its owner guards it with a lock. It is never
// closed: its number is in the program's event loop, and would later be the number of another file.
type descriptor struct {
	fd   int
	set  bool    // it is readable, unless the program has read it
	word [8]byte // for the system calls
}

// openDescriptor opens a descriptor of node.
func openDescriptor(node cluster.App) (*descriptor, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("fileno: %s: the process cannot open a descriptor: %w", node.Name(), err)
	}
	return &descriptor{fd: fd}, nil
}

// show makes the descriptor readable or not. A descriptor that is readable already is written again: the program may have read it,
// and an edge-triggered epoll reports each write. show does nothing for nil.
func (d *descriptor) show(readable bool) {
	switch {
	case d == nil:
	case readable:
		d.word = [8]byte{1}
		_, _ = unix.Write(d.fd, d.word[:]) // fails only if the counter is full, which is readable
		d.set = true
	case d.set:
		_, _ = unix.Read(d.fd, d.word[:]) // fails only if the program has read it
		d.set = false
	}
}

// batchDescriptors are the descriptors of a server's program. queue.mu guards them.
type batchDescriptors struct {
	each, any *descriptor // of GetBatch and of GetAny; nil until the program asks for one
	timer     *time.Timer // runs wakeAll when a limit of overdue passes
}

// show makes the descriptors readable or not. If next is not 0, wakeAll runs when next has passed.
func (b *batchDescriptors) show(each, any bool, next time.Duration) {
	b.each.show(each)
	b.any.show(any)
	if next > 0 {
		b.timer.Reset(next)
	}
}
