//go:build race

package local

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The race detector does not see the shared indices: they lie outside of Go's
// memory, twice when both ends of a link are in one process, as in tests. So each
// index has a double in Go's memory, which both ends of its link share and which is
// written before it and read after it: what was done before an index was written
// comes before what is done after it was read, as it does, and nothing else does.

// order is what stands for the indices of one segment.
type order = *doubles

type doubles struct {
	file  fileID
	refs  int // under orders.mu
	words [headerLen / 4]atomic.Uint32
}

// fileID names the file of a segment in this process.
type fileID struct{ dev, ino uint64 }

var orders = struct {
	mu sync.Mutex
	of map[fileID]order
}{of: map[fileID]order{}}

// newOrder returns the order of the segment in fd, to be given back with drop.
func newOrder(fd int) (order, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	id := fileID{st.Dev, st.Ino}
	orders.mu.Lock()
	defer orders.mu.Unlock()
	o := orders.of[id]
	if o == nil {
		o = &doubles{file: id}
		orders.of[id] = o
	}
	o.refs++
	return o, nil
}

func (o *doubles) drop() {
	orders.mu.Lock()
	defer orders.mu.Unlock()
	if o.refs--; o.refs == 0 {
		delete(orders.of, o.file)
	}
}

func (o *doubles) at(off int) double { return double{&o.words[off/4]} }

// double is that of one index.
type double struct{ of *atomic.Uint32 }

func (d double) read()    { d.of.Load() }
func (d double) write()   { d.of.Store(1) }
func (d double) replace() { d.of.Add(1) }

// written tells the race detector what the kernel has written for this process.
func written(b []byte) {
	if len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(&b[0]), len(b))
	}
}
