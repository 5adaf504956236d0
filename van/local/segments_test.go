package local

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

const onePage = 4096

// mappedPair is devicePair with memory on the worker's device that is mapped from
// allocations of these lengths.
func mappedPair(t *testing.T, sizes ...int) (worker, server *node, wdev, sdev *simgpu.Device, mem backend.Mem) {
	worker, server, wdev, sdev = devicePair(t)
	t.Cleanup(wdev.FreeMapped)
	return worker, server, wdev, sdev, wdev.Map(t, sizes...)
}

// valueIn is a message for node 8 with a value that lies in mem.
func valueIn(mem backend.Mem, ts int, b []byte) *van.Message {
	m := data(8, ts, nil)
	copy(simgpu.Raw(mem), b)
	m.Vals = mem.Sub(0, len(b))
	return m
}

// files is how many descriptors of a device's allocations this process has open.
func files(t testing.TB) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.HasPrefix(to, "/memfd:device") {
			n++
		}
	}
	return n
}

// afterAWhile does what the loop of x does now and then, as if so much time had passed.
func (x *node) afterAWhile(d time.Duration) {
	x.rx.feed.Lock()
	defer x.rx.feed.Unlock()
	x.receiver.tidied = 0
	x.receiver.tidy(clock.Now() + uint64(d))
}

// TestSegments: values that lie in several allocations go from device to device, at any
// place in them; each allocation travels once, and its descriptor is closed.
func TestSegments(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, 3*onePage, onePage, 16*onePage)
	for i := range 200 {
		from, n := i*211%(2*onePage), 1+i*997%(17*onePage)
		b := pattern(i, n)
		worker.must(valueIn(mem.Sub(from, mem.Len()-from), i, b))
		wantValue(t, server.next(), i, sdev.Device(), b)
		eventually(t, "it is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	}
	if got := sdev.SegmentImports(); !slices.Equal(got, []int{onePage, 3 * onePage, 16 * onePage}) {
		t.Errorf("mapped: %v", got)
	}
	if n := files(t); n != 3 {
		t.Errorf("%d descriptors are open, want the three that the device itself has", n)
	}
}

// TestSegmentsUnderWay: many at once, some behind others in the queue, between values of
// other kinds.
func TestSegmentsUnderWay(t *testing.T) {
	worker, server, wdev, sdev, mem := mappedPair(t, onePage, onePage)
	open := block(sdev, server.feedOf())
	const rounds = 2 * maxCopies
	for i := range rounds {
		switch i % 3 {
		case 0:
			worker.must(valueIn(mem, i, bytes.Repeat([]byte{7}, 2*onePage)))
		case 1:
			worker.must(value(wdev, 8, i, pattern(i, 100)))
		default:
			worker.must(data(8, i, pattern(i, 100)))
		}
	}
	open()
	for i := range rounds {
		switch i % 3 {
		case 0:
			wantValue(t, server.next(), i, sdev.Device(), bytes.Repeat([]byte{7}, 2*onePage))
		case 1:
			wantValue(t, server.next(), i, sdev.Device(), pattern(i, 100))
		default:
			wantValue(t, server.next(), i, backend.Host, pattern(i, 100))
		}
	}
}

// TestSegmentsMappedAnew: memory that was unmapped and mapped anew at the same address is distinguished from the
// former memory, which is unmapped when none of it is pinned any more.
func TestSegmentsMappedAnew(t *testing.T) {
	worker, server, wdev, sdev, mem := mappedPair(t, onePage, 2*onePage)
	for i := range 6 {
		b := pattern(i, 3*onePage)
		worker.must(valueIn(mem, i, b))
		wantValue(t, server.next(), i, sdev.Device(), b)
		wdev.Remap(t, uintptr(mem.Addr())+onePage, 2*onePage)
	}
	if got := sdev.SegmentImports(); len(got) != 7 {
		t.Errorf("mapped: %v", got)
	}
	eventually(t, "all is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	worker.afterAWhile(0)
	eventually(t, "only the page that stayed is mapped", func() bool {
		server.afterAWhile(0)
		return slices.Equal(sdev.SegmentImports(), []int{onePage})
	})
}

// TestSegmentsUnused: unused memory is unmapped after a while, but not while it is pinned.
func TestSegmentsUnused(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, onePage, onePage)
	open := block(sdev, server.feedOf())
	worker.must(valueIn(mem, 1, pattern(1, 2*onePage)))
	eventually(t, "the copy is queued", func() bool { return server.copies.running.Load() == 1 })
	worker.afterAWhile(2 * mapTime)
	server.afterAWhile(0)
	if got := sdev.SegmentImports(); len(got) != 2 {
		t.Errorf("mapped while it is copied: %v", got)
	}
	open()
	wantValue(t, server.next(), 1, sdev.Device(), pattern(1, 2*onePage))
	eventually(t, "it is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	worker.afterAWhile(2 * mapTime)
	eventually(t, "nothing is mapped after a while", func() bool {
		server.afterAWhile(0)
		return len(sdev.SegmentImports()) == 0
	})
	worker.must(valueIn(mem, 2, pattern(2, 2*onePage)))
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 2*onePage))
}

// TestSegmentsRoom: the oldest allocation is withdrawn for a new one; if all are pinned, none is.
func TestSegmentsRoom(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, onePage, onePage)
	l := worker.peers.link(8)
	worker.must(valueIn(mem.Sub(0, onePage), 1, pattern(1, 10)))
	server.next().Release()
	eventually(t, "it is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	open := block(sdev, server.feedOf())
	worker.must(valueIn(mem.Sub(onePage, onePage), 2, pattern(2, 10)))
	eventually(t, "the copy is queued", func() bool { return server.copies.running.Load() == 1 })
	l.mu.Lock()
	first, second := l.offers.withdrawOldest(l.inUseSince()), l.offers.withdrawOldest(l.inUseSince())
	l.mu.Unlock()
	if !first || second {
		t.Errorf("withdrawn: the one that is not pinned %t, the one that is %t", first, second)
	}
	open()
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 10))
	worker.must(valueIn(mem, 3, pattern(3, 2*onePage)))
	wantValue(t, server.next(), 3, sdev.Device(), pattern(3, 2*onePage))
}

// TestSegmentsLost: a peer that goes while its memory is being copied, or has only been
// offered, leaves nothing mapped and no file open.
func TestSegmentsLost(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, onePage, onePage, onePage)
	open := block(sdev, server.feedOf())
	for i := range 5 {
		worker.must(valueIn(mem, i, pattern(i, 2*onePage)))
	}
	eventually(t, "the copies are queued", func() bool { return server.copies.running.Load() == 5 })
	l := worker.peers.link(8)
	l.mu.Lock()
	var x backend.Shared
	err := errors.Join(worker.own.device.sharer.Share(&x, mem.Sub(2*onePage, 10)), l.offers.tell(&x, l.inUseSince))
	l.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the offer is taken", func() bool { return len(sdev.SegmentImports()) == 3 })
	time.AfterFunc(10*time.Millisecond, open)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = worker.Close(ctx)
	eventually(t, "nothing is mapped", func() bool {
		return server.copies.running.Load() == 0 && sdev.Imports() == 0 && len(sdev.SegmentImports()) == 0
	})
}

// TestSegmentsRefused: where the peer's device does not map such memory the link begins anew
// without, and Send says so, for van/stage. A link that is made later may have it again.
func TestSegmentsRefused(t *testing.T) {
	worker, server, wdev, sdev, mem := mappedPair(t, onePage)
	sdev.RefuseSegments(errors.New("out of reach"))
	worker.must(valueIn(mem, 1, pattern(1, 10)))
	if e := server.event(9, false); !strings.Contains(e.cause.Error(), "out of reach") {
		t.Errorf("lost because of %v", e.cause)
	}
	worker.event(8, true)
	if err := worker.Send(valueIn(mem, 2, pattern(2, 10))); !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("sent: %v", err)
	}
	worker.must(value(wdev, 8, 3, pattern(3, 100)))
	wantValue(t, server.next(), 3, sdev.Device(), pattern(3, 100))

	sdev.RefuseSegments(nil)
	again := func() {
		t.Helper()
		worker.Disconnect(8)
		worker.connect(server)
	}
	again()
	if err := worker.Send(valueIn(mem, 4, pattern(4, 10))); !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("sent over a link made just then: %v", err)
	}
	if left := server.own.device.noSegments.Load() - clock.Now(); left > uint64(segmentsPause) || left < uint64(segmentsPause)/2 {
		t.Errorf("%s until links may have such memory again, want nearly %s", time.Duration(left), segmentsPause)
	}
	server.own.device.noSegments.Store(clock.Now())
	again()
	worker.must(valueIn(mem, 5, pattern(5, 10)))
	wantValue(t, server.next(), 5, sdev.Device(), pattern(5, 10))
}

// TestSegmentsNotAgreed: a peer whose backend does not map such memory is not offered any.
func TestSegmentsNotAgreed(t *testing.T) {
	wdev, sdev := simgpu.New(1), simgpu.New(2)
	defer wdev.FreeMapped()
	plain := struct {
		backend.Backend
		backend.Exporter
		backend.AsyncCopier
	}{sdev, sdev, sdev}
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, on(wdev)), newNode(t, n, 8, on(plain))
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	if !worker.TakesDevice(8) {
		t.Fatal("the devices do not reach each other")
	}
	mem := wdev.Map(t, onePage)
	if err := worker.Send(valueIn(mem, 1, pattern(1, 10))); !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("sent: %v", err)
	}
	worker.must(value(wdev, 8, 2, pattern(2, 100)))
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 100))
}

// TestHostileSegments: lists and notices that make no sense end the link, and nothing else.
func TestHostileSegments(t *testing.T) {
	le := binary.LittleEndian
	part := func(b []byte, i int) []byte { return b[exportAt(b)+van.ExportLen+i*segmentPartLen:] }
	for name, change := range map[string]func(b []byte){
		"no parts":             func(b []byte) { le.PutUint64(b[exportAt(b)+88:], 0) },
		"too many parts":       func(b []byte) { le.PutUint64(b[exportAt(b)+88:], maxSegments+1) },
		"more than the record": func(b []byte) { le.PutUint64(b[exportAt(b)+88:], maxSegments) },
		"fewer":                func(b []byte) { le.PutUint64(b[exportAt(b)+88:], 1) },
		"not offered":          func(b []byte) { le.PutUint64(part(b, 1), 1<<40) },
		"outside":              func(b []byte) { le.PutUint64(part(b, 1)[8:], onePage) },
		"far outside":          func(b []byte) { le.PutUint64(part(b, 0)[8:], 1<<63) },
		"empty":                func(b []byte) { le.PutUint64(part(b, 0)[16:], 0) },
		"too long":             func(b []byte) { le.PutUint64(part(b, 0)[16:], 1<<62) },
		"longer than the value": func(b []byte) {
			le.PutUint32(b[16+partHead*partVals+8:], onePage/2)
		},
		"shorter than the value": func(b []byte) {
			le.PutUint32(b[16+partHead*partVals+8:], 3*onePage)
		},
	} {
		t.Run(name, func(t *testing.T) {
			worker, server, _, sdev, mem := mappedPair(t, onePage, onePage)
			l := worker.peers.link(8)
			m := valueIn(mem, 1, pattern(1, 2*onePage))
			var x backend.Shared
			if err := worker.own.device.sharer.Share(&x, m.Vals); err != nil {
				t.Fatal(err)
			}
			l.mu.Lock()
			if err := l.offers.tell(&x, l.inUseSince); err != nil {
				t.Fatal(err)
			}
			l.writeRecord(t, m, &x, change)
			l.mu.Unlock()
			stillThere(t, worker, server, sdev, mem)
		})
	}

	notice := func(magic string, id, size uint64) []byte {
		b := append([]byte(magic), 0, 0, 0, 0)
		return le.AppendUint64(le.AppendUint64(b, id), size)
	}
	for name, c := range map[string]struct {
		b     []byte
		files int
		twice bool
	}{
		"short":                  {b: []byte("SAFM")},
		"long":                   {b: append(notice(segmentMagic, 1, onePage), 0), files: 1},
		"another magic":          {b: notice("SAFX", 1, onePage), files: 1},
		"no file":                {b: notice(segmentMagic, 1, onePage)},
		"two files":              {b: notice(segmentMagic, 1, onePage), files: 2},
		"many files":             {b: notice(segmentMagic, 1, onePage), files: 40},
		"no length":              {b: notice(segmentMagic, 1, 0), files: 1},
		"huge":                   {b: notice(segmentMagic, 1, 1<<60), files: 1},
		"offered twice":          {b: notice(segmentMagic, 1, onePage), files: 1, twice: true},
		"withdrawn, not offered": {b: notice(unusedMagic, 1, onePage)},
		"withdrawn with a file":  {b: notice(unusedMagic, 1, onePage), files: 1},
	} {
		t.Run(name, func(t *testing.T) {
			worker, server, wdev, sdev, mem := mappedPair(t, onePage, onePage)
			open := files(t)
			l := worker.peers.link(8)
			var x backend.Shared
			if err := wdev.Share(&x, mem.Sub(0, 1)); err != nil {
				t.Fatal(err)
			}
			fd, err := wdev.SegmentFile(x.Segments[0])
			if err != nil {
				t.Fatal(err)
			}
			send := func() {
				var rights []byte
				if c.files > 0 {
					rights = unix.UnixRights(slices.Repeat([]int{fd}, c.files)...)
				}
				if _, _, err := l.conn.WriteMsgUnix(c.b, rights, nil); err != nil {
					t.Fatal(err)
				}
			}
			send()
			if c.twice {
				send()
			}
			_ = unix.Close(fd)
			stillThere(t, worker, server, sdev, mem)
			eventually(t, "all files are closed", func() bool { return files(t) <= open })
		})
	}
}

// stillThere wants the link to be lost and made again, and to work then.
func stillThere(t *testing.T, worker, server *node, sdev *simgpu.Device, mem backend.Mem) {
	t.Helper()
	if e := server.event(9, false); !errors.Is(e.cause, van.ErrMalformed) {
		t.Errorf("lost because of %v", e.cause)
	}
	worker.event(8, true)
	worker.must(valueIn(mem, 2, pattern(2, 2*onePage)))
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 2*onePage))
	eventually(t, "what came over the lost link is unmapped", func() bool { return len(sdev.SegmentImports()) == 2 })
}

// TestManyOffers: a peer that offers more than it may loses its link.
func TestManyOffers(t *testing.T) {
	d := simgpu.New(1)
	x := newImports(&device{Backend: d, sharer: d}, nil)
	fd, err := unix.MemfdCreate("offered", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, onePage)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for i := range maxOffers {
		x.known[uint64(i)] = true
	}
	b := append([]byte(segmentMagic), make([]byte, 20)...)
	binary.LittleEndian.PutUint64(b[8:], maxOffers)
	binary.LittleEndian.PutUint64(b[16:], onePage)
	if err := x.take(b, []int{fd}, 0); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("one too many: %v", err)
	}
	if err := x.take(b, nil, unix.MSG_CTRUNC); errors.Is(err, van.ErrMalformed) || !errors.Is(err, unix.EMFILE) {
		t.Errorf("one whose file cannot be had: %v", err)
	}
	if n := len(d.SegmentImports()); n != 0 {
		t.Errorf("%d are mapped", n)
	}
}

// TestSegmentsOfferedAgain: memory that the peer has withdrawn and exported anew, together with new memory, stays
// mapped while it is copied.
func TestSegmentsOfferedAgain(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, onePage, onePage)
	worker.must(valueIn(mem.Sub(0, onePage), 1, pattern(1, onePage)))
	wantValue(t, server.next(), 1, sdev.Device(), pattern(1, onePage))
	eventually(t, "it is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	worker.afterAWhile(2 * mapTime)
	x := server.feedOf().imports
	eventually(t, "it is withdrawn", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.unused) == 1
	})
	open := block(sdev, server.feedOf())
	worker.must(valueIn(mem, 2, pattern(2, 2*onePage)))
	eventually(t, "the copy is queued", func() bool { return server.copies.running.Load() == 1 })
	if got := sdev.SegmentImports(); len(got) != 3 {
		t.Fatalf("mapped: %v, want what is copied, and what was offered anew", got)
	}
	open()
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 2*onePage))
	eventually(t, "the first mapping goes", func() bool {
		server.afterAWhile(0)
		return len(sdev.SegmentImports()) == 2
	})
	worker.must(valueIn(mem, 3, pattern(3, 2*onePage)))
	wantValue(t, server.next(), 3, sdev.Device(), pattern(3, 2*onePage))
}

// TestSegmentsRecalled: allocations that a message names which was taken back, and is still
// in the ring, are not withdrawn: the receiver would find that they were never offered.
func TestSegmentsRecalled(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, onePage, onePage)
	server.rx.feed.Lock() // nothing is received
	worker.must(valueIn(mem, 1, pattern(1, 2*onePage)))
	worker.Cancel(van.Requests{First: 1, Count: 1})
	worker.afterAWhile(2 * mapTime)
	server.rx.feed.Unlock()
	eventually(t, "it is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	if n := server.Stats().Malformed; n != 0 {
		t.Fatalf("the link was lost: %d malformed messages", n)
	}
	worker.must(valueIn(mem, 2, pattern(2, 2*onePage)))
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 2*onePage))
	eventually(t, "all is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	worker.afterAWhile(2 * mapTime)
	eventually(t, "then they are withdrawn", func() bool {
		server.afterAWhile(0)
		return len(sdev.SegmentImports()) == 0
	})
}

// TestSegmentsQueued: allocations that only a queued message names are not withdrawn.
func TestSegmentsQueued(t *testing.T) {
	worker, server, wdev, sdev, mem := mappedPair(t, onePage, onePage)
	server.rx.feed.Lock() // nothing is received
	for i := range slotCount {
		worker.must(value(wdev, 8, i, pattern(i, 100)))
	}
	worker.must(valueIn(mem, slotCount, pattern(1, 2*onePage)))
	l := worker.peers.link(8)
	l.mu.Lock()
	queued := len(l.queue.list)
	l.mu.Unlock()
	if queued != 1 {
		t.Errorf("%d messages are queued, want the last one", queued)
	}
	worker.afterAWhile(2 * mapTime)
	server.rx.feed.Unlock()
	for i := range slotCount {
		wantValue(t, server.next(), i, sdev.Device(), pattern(i, 100))
	}
	wantValue(t, server.next(), slotCount, sdev.Device(), pattern(1, 2*onePage))
}

// TestSegmentsUsedMeanwhile: memory that is used after the time of the cleanup is in use.
func TestSegmentsUsedMeanwhile(t *testing.T) {
	worker, server, _, _, mem := mappedPair(t, onePage, onePage)
	before := clock.Now()
	worker.must(valueIn(mem, 1, pattern(1, 2*onePage)))
	server.next().Release()
	eventually(t, "it is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
	l := worker.peers.link(8)
	l.tidy(before)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.offers.byID) != 2 {
		t.Errorf("%d allocations are offered, want 2", len(l.offers.byID))
	}
}

// TestSegmentsCopyDoesNotEnd: if a copy does not end in time, its source is unmapped with the van. Unmapping must
// not wait for copies, and a copy from unmapped memory breaks the device.
func TestSegmentsCopyDoesNotEnd(t *testing.T) {
	worker, server, _, sdev, mem := mappedPair(t, onePage, onePage)
	server.rx.feed.Lock()
	server.rx.dropTime = 50 * time.Millisecond
	server.rx.feed.Unlock()
	open := block(sdev, server.feedOf())
	into := sdev.Mem(make([]byte, onePage))
	if err := server.RegisterRecvBuffer(9, 1, into); err != nil {
		t.Fatal(err)
	}
	worker.must(valueIn(mem.Sub(0, onePage), 1, pattern(1, onePage)))
	eventually(t, "the copy is queued", func() bool { return server.copies.running.Load() == 1 })
	l := worker.peers.link(8)
	l.mu.Lock()
	l.write(pattern(3, 4096)) // ends the link
	l.mu.Unlock()
	server.event(9, false)
	worker.event(8, true)
	if got := sdev.SegmentImports(); len(got) != 1 {
		t.Errorf("mapped: %v, want what is still copied", got)
	}
	if !t.Failed() {
		open()
	}
}

// TestSegmentsTidyWhileSending: the receiver does not wait for a sender.
func TestSegmentsTidyWhileSending(t *testing.T) {
	worker, _, _, _, _ := mappedPair(t, onePage)
	l := worker.peers.link(8)
	l.mu.Lock() // as Send does while it waits for room
	done := make(chan struct{})
	go func() {
		worker.afterAWhile(0)
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
		t.Error("tidying waits for a sender")
	}
	l.mu.Unlock()
	<-done
}

// TestOldestOfferGoes: if the peer knows as many allocations as it maps, the allocation that was named longest ago
// is withdrawn, but none that a message still names and the peer may read; if all are such, one more is refused.
func TestOldestOfferGoes(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	f := os.NewFile(uintptr(fds[0]), "offers")
	c, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := simgpu.New(1)
	o := offers{conn: c.(*net.UnixConn), sharer: d, byID: map[uint64]*offer{}}
	for i := range uint64(maxOffers) {
		o.byID[i] = &offer{segment: backend.Segment{ID: i, Size: onePage}, seq: 100 + i*7%maxOffers}
	}
	told := func() (magic string, id uint64) {
		b := make([]byte, 64)
		n, _, err := unix.Recvfrom(fds[1], b, unix.MSG_DONTWAIT)
		if err != nil || n != noticeLen {
			return "", 0
		}
		return strings.TrimRight(string(b[:8]), "\x00"), binary.LittleEndian.Uint64(b[8:])
	}
	for seq := range uint64(20) {
		if !o.withdrawOldest(110) {
			if seq != 10 {
				t.Errorf("%d were withdrawn, want the 10 that no message names", seq)
			}
			break
		}
		magic, id := told()
		if want := 100 + seq; magic != unusedMagic || 100+id*7%maxOffers != want || o.byID[id] != nil || len(o.byID) != maxOffers-1-int(seq) {
			t.Fatalf("%q of %d, named by message %d; want that of message %d", magic, id, 100+id*7%maxOffers, want)
		}
	}
	for i := range uint64(10) {
		o.byID[maxOffers+i] = &offer{seq: 200}
	}
	x := &backend.Shared{Segments: []backend.Segment{{ID: 9999, Size: onePage}}}
	if err := o.tell(x, func() uint64 { return 50 }); !errors.Is(err, backend.ErrNotExportable) || !strings.Contains(err.Error(), "uses them all") || len(o.byID) != maxOffers {
		t.Errorf("one too many: %v; %d are known", err, len(o.byID))
	}
	if magic, _ := told(); magic != "" {
		t.Errorf("the peer was told %q", magic)
	}
}
