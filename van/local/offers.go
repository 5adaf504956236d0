package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/backend"
)

// offer is an allocation of this node's device that was announced to the peer.
type offer struct {
	segment backend.Segment
	seq     uint64 // of the last message that names it
	used    uint64 // the time of that message
}

// offers are the allocations of this node's device that were announced to the peer of a link.
type offers struct {
	conn   *net.UnixConn
	sharer backend.Sharer
	byID   map[uint64]*offer
	seq    uint64 // of messages that name allocations
}

// tell announces those allocations of x that the peer does not know. The next message names x.
// since is the number of the first message that the peer may still read.
func (o *offers) tell(x *backend.Shared, since func() uint64) error {
	now := clock.Now()
	o.seq++
	for i := range x.Segments {
		s := &x.Segments[i]
		a := o.byID[s.ID]
		if a == nil {
			if len(o.byID) >= maxOffers && !o.withdrawOldest(since()) {
				return fmt.Errorf("%w: the peer has %d allocations mapped, and uses them all", backend.ErrNotExportable, maxOffers)
			}
			if err := o.send(s); err != nil {
				return fmt.Errorf("%w: the peer cannot be told of an allocation of %d bytes: %w", backend.ErrNotExportable, s.Size, err)
			}
			a = &offer{segment: *s}
			if o.byID == nil {
				o.byID = map[uint64]*offer{}
			}
			o.byID[s.ID] = a
		}
		a.seq, a.used = o.seq, now
	}
	return nil
}

// send sends the descriptor of an allocation.
func (o *offers) send(s *backend.Segment) error {
	fd, err := o.sharer.SegmentFile(*s)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return o.notify(segmentMagic, s, unix.UnixRights(fd))
}

// notify sends a notice without blocking.
func (o *offers) notify(magic string, s *backend.Segment, files []byte) error {
	var b [noticeLen]byte
	copy(b[:], magic)
	binary.LittleEndian.PutUint64(b[8:], s.ID)
	binary.LittleEndian.PutUint64(b[16:], uint64(s.Size))
	raw, err := o.conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.Sendmsg(int(fd), b[:], files, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	return errors.Join(err, failed)
}

// withdraw tells the peer that it may unmap a. It reports whether the notice was sent.
func (o *offers) withdraw(a *offer) bool {
	if o.notify(unusedMagic, &a.segment, nil) != nil {
		return false
	}
	delete(o.byID, a.segment.ID)
	return true
}

// withdrawOldest withdraws the least recently used allocation, to make room for another one.
func (o *offers) withdrawOldest(since uint64) bool {
	var oldest *offer
	for _, a := range o.byID {
		if a.seq < since && (oldest == nil || a.seq < oldest.seq) {
			oldest = a
		}
	}
	return oldest != nil && o.withdraw(oldest)
}

// tidy withdraws allocations that this node has unmapped or has not used for mapTime.
func (o *offers) tidy(now, since uint64) {
	for _, a := range o.byID {
		if a.seq < since && (now > a.used+uint64(mapTime) || !o.sharer.HasSegment(a.segment)) && !o.withdraw(a) {
			return // retry later: the peer reads slowly or not at all
		}
	}
}
