package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Memory that a device's driver has mapped from several allocations (backend.Sharer) is
// named by a list of parts of these. The sender tells of each allocation once, with its
// descriptor, over the link's socket, before the first record that names it:
//
//	0  char[4]  "SAFM", or "SAFU": it is not used any more
//	8  u64      allocation
//	16 u64      length
//
// The receiver maps it, and closes the descriptor. The sender says when it is to be unmapped:
// when it was unmapped there, or has not been used for mapTime, and nothing is lent any more
// that lies in it.
const (
	segmentMagic = "SAFM"
	unusedMagic  = "SAFU"
	noticeLen    = 24

	// segmentLen is the length of a part in a record: allocation, offset, length.
	segmentPartLen = 24

	// maxSegments bounds the parts of a value: 2 GiB in allocations of 2 MiB, the smallest
	// that there are.
	maxSegments = 1025

	// maxOffers bounds the allocations that a peer has mapped.
	maxOffers = 4096
)

// exportSize is the length in a record of what names a value: an export, with the number of
// parts that follow in place of its offset when its length is 0.
func exportSize(segments int) int { return exportLen + segments*segmentPartLen }

// putShared writes what names a value.
func putShared(b []byte, x *backend.Shared) {
	if len(x.Segments) == 0 {
		putExport(b, &x.Export)
		return
	}
	putExport(b, &backend.Export{Offset: len(x.Segments)})
	le := binary.LittleEndian
	for i, s := range x.Segments {
		p := b[exportLen+i*segmentPartLen:]
		le.PutUint64(p, s.ID)
		le.PutUint64(p[8:], uint64(s.Offset))
		le.PutUint64(p[16:], uint64(s.Len))
	}
}

// segmentsIn tells how many parts the value has whose name b begins with; 0 if it lies in
// one allocation.
func segmentsIn(b []byte) (int, error) {
	le := binary.LittleEndian
	if len(b) < exportLen || le.Uint64(b[80:]) != 0 {
		return 0, nil // parseExport says what is wrong
	}
	n := le.Uint64(b[88:])
	if n == 0 || n > maxSegments || exportSize(int(n)) > len(b) {
		return 0, &van.FieldError{Field: "record.segments", Value: n, Want: fmt.Sprintf("1 to %d, in a record with %d bytes left", maxSegments, len(b))}
	}
	return int(n), nil
}

// share describes a value. What it returns goes back with unshare.
func (d *device) share(m backend.Mem, segments bool) (*backend.Shared, error) {
	x, _ := d.shared.Get().(*backend.Shared)
	if x == nil {
		x = &backend.Shared{}
	}
	var err error
	switch {
	case d.sharer == nil || !segments:
		x.Segments = x.Segments[:0]
		x.Export, err = d.Export(m)
	default:
		if err = d.sharer.Share(x, m); err == nil && len(x.Segments) > maxSegments {
			err = fmt.Errorf("%w: %d bytes lie in %d allocations, want at most %d", backend.ErrNotExportable, m.Len(), len(x.Segments), maxSegments)
		}
	}
	if err != nil {
		d.unshare(x)
		return nil, err
	}
	return x, nil
}

func (d *device) unshare(x *backend.Shared) { d.shared.Put(x) }

// offer is an allocation of this node's device that the peer has been told of.
type offer struct {
	segment backend.Segment
	seq     uint64 // of the last message that names it
	used    uint64 // when that was
}

// tell makes sure that the peer knows all allocations of x, which the next message names.
// l.mu is held.
func (l *outLink) tell(x *backend.Shared) error {
	now := clock.Now()
	l.seq++
	for i := range x.Segments {
		s := &x.Segments[i]
		o := l.offers[s.ID]
		if o == nil {
			if len(l.offers) >= maxOffers && !l.withdrawOldest() {
				return fmt.Errorf("%w: the peer has %d allocations mapped, and uses them all", backend.ErrNotExportable, maxOffers)
			}
			if err := l.offer(s); err != nil {
				return fmt.Errorf("%w: the peer cannot be told of an allocation of %d bytes: %w", backend.ErrNotExportable, s.Size, err)
			}
			o = &offer{segment: *s}
			if l.offers == nil {
				l.offers = map[uint64]*offer{}
			}
			l.offers[s.ID] = o
		}
		o.seq, o.used = l.seq, now
	}
	return nil
}

// offer sends the descriptor of an allocation.
func (l *outLink) offer(s *backend.Segment) error {
	fd, err := l.v.device.sharer.SegmentFile(*s)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return l.notify(segmentMagic, s, unix.UnixRights(fd))
}

// notify sends a notice. It does not wait for room.
func (l *outLink) notify(magic string, s *backend.Segment, files []byte) error {
	var b [noticeLen]byte
	copy(b[:], magic)
	binary.LittleEndian.PutUint64(b[8:], s.ID)
	binary.LittleEndian.PutUint64(b[16:], uint64(s.Size))
	raw, err := l.conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.Sendmsg(int(fd), b[:], files, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	return errors.Join(err, failed)
}

// lentSince is the number of the first message that is lent, and may name an allocation.
// l.mu is held.
func (l *outLink) lentSince() uint64 {
	first := l.seq + 1
	for i := range l.slots {
		if s := &l.slots[i]; s.busy && s.seq > 0 {
			first = min(first, s.seq)
		}
	}
	for _, q := range l.queue {
		if q.loan.seq > 0 {
			first = min(first, q.loan.seq)
		}
	}
	return first
}

// withdraw tells the peer that it may unmap o. It tells whether the peer will know.
func (l *outLink) withdraw(o *offer) bool {
	if l.notify(unusedMagic, &o.segment, nil) != nil {
		return false
	}
	delete(l.offers, o.segment.ID)
	return true
}

// withdrawOldest makes room for another allocation.
func (l *outLink) withdrawOldest() bool {
	var oldest *offer
	since := l.lentSince()
	for _, o := range l.offers {
		if o.seq < since && (oldest == nil || o.seq < oldest.seq) {
			oldest = o
		}
	}
	return oldest != nil && l.withdraw(oldest)
}

// tidy withdraws what was unmapped, or was not used for a while. While somebody sends it
// does so another time: that may wait for the peer, and who receives must not.
func (l *outLink) tidy(now uint64) {
	if !l.mu.TryLock() {
		return
	}
	defer l.mu.Unlock()
	if l.gone || len(l.offers) == 0 {
		return
	}
	since := l.lentSince()
	for _, o := range l.offers {
		if o.seq < since && (now > o.used+uint64(mapTime) || !l.v.device.sharer.HasSegment(o.segment)) && !l.withdraw(o) {
			return // later: the peer reads slowly, or not at all
		}
	}
}

// inbox takes what a peer tells of its allocations. Whoever watches the link reads it, and
// who needs one that is not there yet.
type inbox struct {
	d    *device
	conn *net.UnixConn

	mu     sync.Mutex
	mapped map[uint64]arrival // that the receiver has not taken yet
	known  map[uint64]bool    // all that were offered, and not withdrawn
	unused []uint64
	failed error // nothing more is taken
}

// arrival is an allocation that is mapped, or why it is not.
type arrival struct {
	mem backend.Mem
	err error
}

func newInbox(d *device, conn *net.UnixConn) *inbox {
	return &inbox{d: d, conn: conn, mapped: map[uint64]arrival{}, known: map[uint64]bool{}}
}

// watch reads until the connection ends, or the peer does not keep to the protocol.
func (x *inbox) watch() error {
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

// read takes all that is there.
func (x *inbox) read(fd int) (ended bool, err error) {
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

// filesIn returns the files that came with a message.
func filesIn(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds, err
}

// take handles a notice. x.mu is held.
func (x *inbox) take(b []byte, files []int, flags int) error {
	bad := func(value any, want string) error {
		return &van.FieldError{Field: "notice of device memory", Value: value, Want: want}
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
	var a arrival
	a.mem, a.err = x.d.sharer.ImportSegment(files[0], int(size))
	x.known[id], x.mapped[id] = true, a
	return nil
}

// get returns the allocation id, which the caller unmaps.
func (x *inbox) get(id uint64) (backend.Mem, error) {
	if raw, err := x.conn.SyscallConn(); err == nil {
		// The peer has sent it before the record that names it. Errors are for watch.
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

// withdrawn returns what is to be unmapped.
func (x *inbox) withdrawn() []uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	ids := x.unused
	x.unused = nil
	return ids
}

// again puts back an id that is still in use.
func (x *inbox) again(id uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.unused = append(x.unused, id)
}

// close unmaps what was not taken.
func (x *inbox) close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var errs []error
	for id, a := range x.mapped {
		delete(x.mapped, id)
		if a.err == nil {
			errs = append(errs, x.d.unmap(a.mem))
		}
	}
	if x.failed == nil {
		x.failed = net.ErrClosed
	}
	return errors.Join(errs...)
}

// segmentsOf finds the parts of n bytes that b lists.
func (s *deviceSource) segmentsOf(p *parcel, b []byte, n int) error {
	le := binary.LittleEndian
	for left := n; len(b) > 0 || left > 0; b = b[segmentPartLen:] {
		if len(b) == 0 || left == 0 {
			return &van.FieldError{Field: "record.segments", Value: fmt.Sprintf("%d bytes more, %d parts more", left, len(b)/segmentPartLen), Want: fmt.Sprintf("parts with %d bytes in all", n)}
		}
		id, off, part := le.Uint64(b), le.Uint64(b[8:]), le.Uint64(b[16:])
		m, err := s.segment(id, p.sources)
		if err != nil {
			return err
		}
		if size := uint64(m.mem.Len()); part == 0 || part > uint64(left) || off > size || part > size-off {
			return &van.FieldError{Field: "record.segment", Value: fmt.Sprintf("%d bytes at %d of %d", part, off, size), Want: fmt.Sprintf("1 to %d bytes, inside the allocation", left)}
		}
		p.sources = append(p.sources, source{m, m.mem.Sub(int(off), int(part))})
		left -= int(part)
	}
	return nil
}

// segment returns the peer's allocation id. Those of needed stay mapped.
func (s *deviceSource) segment(id uint64, needed []source) (*mapped, error) {
	if m := s.segments[id]; m != nil {
		return m, nil
	}
	if s.inbox == nil {
		return nil, &van.FieldError{Field: "record.segments", Value: id, Want: "one allocation: it was not agreed that there may be several"}
	}
	mem, err := s.inbox.get(id)
	if err != nil {
		if !errors.Is(err, van.ErrMalformed) && !s.d.noSegments.Swap(true) {
			s.v.log.Warn("a peer's device memory of several allocations cannot be mapped; it comes through host memory from now on", "err", err)
		}
		return nil, err
	}
	s.dropWithdrawn(needed)
	m := &mapped{mem: mem}
	s.segments[id] = m
	return m, nil
}

// dropWithdrawn unmaps what the peer does not use any more, except needed: the peer may
// have offered it anew before the message that is being looked at.
func (s *deviceSource) dropWithdrawn(needed []source) {
	if s.inbox == nil {
		return
	}
	for _, id := range s.inbox.withdrawn() {
		switch m := s.segments[id]; {
		case m == nil:
		case m.busy > 0 || slices.ContainsFunc(needed, func(x source) bool { return x.of == m }): // later
			s.inbox.again(id)
		default:
			delete(s.segments, id)
			if err := s.d.unmap(m.mem); err != nil {
				s.v.log.Warn("a peer's device memory stays mapped", "err", err)
			}
		}
	}
}
