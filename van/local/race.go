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

// The race detector does not see the shared indices: they lie outside of Go's memory, and are mapped twice if both
// ends of a link are in one process, as in tests. Each index therefore has a shadowWord in Go's memory, shared by
// both ends of the link, which is written before the index is written and read after it is read. It gives the race
// detector the real order: work before the write of an index happens before work after the read, and no other
// order is implied.

// shadow is what stands for the indices of one segment.
type shadow = *shadowWords

type shadowWords struct {
	file  fileID
	refs  int // under shadows.mu
	words [headerLen / 4]atomic.Uint32
}

// fileID names the file of a segment in this process.
type fileID struct{ dev, ino uint64 }

var shadows = struct {
	mu sync.Mutex
	of map[fileID]shadow
}{of: map[fileID]shadow{}}

// newShadow returns the shadow of the segment in fd, to be released with drop.
func newShadow(fd int) (shadow, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	id := fileID{st.Dev, st.Ino}
	shadows.mu.Lock()
	defer shadows.mu.Unlock()
	o := shadows.of[id]
	if o == nil {
		o = &shadowWords{file: id}
		shadows.of[id] = o
	}
	o.refs++
	return o, nil
}

func (o *shadowWords) drop() {
	shadows.mu.Lock()
	defer shadows.mu.Unlock()
	if o.refs--; o.refs == 0 {
		delete(shadows.of, o.file)
	}
}

func (o *shadowWords) at(off int) shadowWord { return shadowWord{&o.words[off/4]} }

// shadowWord is that of one index.
type shadowWord struct{ of *atomic.Uint32 }

func (d shadowWord) read()    { d.of.Load() }
func (d shadowWord) write()   { d.of.Store(1) }
func (d shadowWord) replace() { d.of.Add(1) }

// written tells the race detector what the kernel has written for this process.
func written(b []byte) {
	if len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(&b[0]), len(b))
	}
}
