package local

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// imports receives a peer's notices about the allocations of its device. The goroutine that watches the
// link reads them. The receiver reads them if it needs an allocation that has not been announced yet.
type imports struct {
	d    *device
	conn *net.UnixConn

	mu     sync.Mutex
	mapped map[uint64]imported // allocations that the receiver has not taken yet
	known  map[uint64]bool     // all announced allocations that were not withdrawn
	unused []uint64
	failed error // if set, no more notices are read
}

// imported is a mapped allocation, or the error of mapping it.
type imported struct {
	mem backend.Mem
	err error
}

func newImports(d *device, conn *net.UnixConn) *imports {
	return &imports{d: d, conn: conn, mapped: map[uint64]imported{}, known: map[uint64]bool{}}
}

// watch reads notices until the connection ends or the peer violates the protocol.
func (x *imports) watch() error {
	raw, err := x.conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	ended := false
	err = raw.Read(func(fd uintptr) bool {
		ended, failed = x.read(int(fd))
		return ended || failed != nil
	})
	return errors.Join(failed, err)
}

// read handles all notices that have arrived.
func (x *imports) read(fd int) (ended bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	var b [noticeLen + 1]byte
	var oob [64]byte
	for x.failed == nil {
		n, k, flags, _, err := unix.Recvmsg(fd, b[:], oob[:], unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return false, nil
		case err != nil || n == 0 && k == 0:
			return true, nil
		}
		files, err := filesIn(oob[:k])
		if err == nil {
			err = x.take(b[:n], files, flags)
		}
		closeAll(files)
		x.failed = err
	}
	return true, x.failed
}

// take handles a notice. The caller holds x.mu.
func (x *imports) take(b []byte, files []int, flags int) error {
	bad := func(value any, want string) error {
		return &van.FieldError{Field: "notice of device memory", Value: value, Want: want}
	}
	if err := lacksFiles(flags, len(files), 1); err != nil {
		return err
	}
	if len(b) != noticeLen || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return bad(fmt.Sprintf("%d bytes, flags %#x", len(b), flags), fmt.Sprintf("%d bytes, with one file at most, for which there is room", noticeLen))
	}
	id, size := binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
	switch magic := string(b[:4]); {
	case magic == unusedMagic && len(files) == 0:
		if !x.known[id] {
			return bad(id, "an allocation that was offered")
		}
		delete(x.known, id)
		if a, ok := x.mapped[id]; ok { // it was never used
			delete(x.mapped, id)
			if a.err == nil {
				return x.d.unmap(a.mem)
			}
			return nil
		}
		x.unused = append(x.unused, id)
		return nil
	case magic != segmentMagic || len(files) != 1:
		return bad(fmt.Sprintf("%q with %d files", magic, len(files)), fmt.Sprintf("%q with 1, or %q with none", segmentMagic, unusedMagic))
	case size == 0 || size > 1<<50:
		return bad(size, "a length of 1 to 2^50")
	case x.known[id]:
		return bad(id, "an allocation that was not offered before")
	case len(x.known) >= maxOffers:
		return bad(len(x.known)+1, fmt.Sprintf("at most %d allocations", maxOffers))
	}
	var a imported
	a.mem, a.err = x.d.sharer.ImportSegment(files[0], int(size))
	x.known[id], x.mapped[id] = true, a
	return nil
}

// get returns the allocation with that id. The caller unmaps it.
func (x *imports) get(id uint64) (backend.Mem, error) {
	if raw, err := x.conn.SyscallConn(); err == nil {
		// The peer has sent the notice before the record that names the allocation. watch handles errors.
		_ = raw.Control(func(fd uintptr) { _, _ = x.read(int(fd)) })
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	a, ok := x.mapped[id]
	if !ok {
		return a.mem, &van.FieldError{Field: "record.segment", Value: id, Want: "an allocation that was offered, and not withdrawn"}
	}
	if a.err == nil {
		delete(x.mapped, id)
	}
	return a.mem, a.err
}

// withdrawn returns the allocations that the receiver must unmap, and clears the list.
func (x *imports) withdrawn() []uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	ids := x.unused
	x.unused = nil
	return ids
}

// putBack puts an id that is still in use back on that list.
func (x *imports) putBack(id uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.unused = append(x.unused, id)
}

// close unmaps the allocations that the receiver has not taken.
func (x *imports) close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var errs []error
	for id, a := range x.mapped {
		delete(x.mapped, id)
		if a.err == nil {
			errs = append(errs, x.d.unmap(a.mem))
		}
	}
	x.failed = cmp.Or(x.failed, net.ErrClosed)
	return errors.Join(errs...)
}
