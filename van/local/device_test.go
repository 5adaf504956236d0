package local

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// devicePair makes worker 9 on gpu 1 and server 8 on gpu 2, linked both ways.
func devicePair(t testing.TB, set ...func(*Van)) (worker, server *node, wdev, sdev *simgpu.Device) {
	wdev, sdev = simgpu.New(1), simgpu.New(2)
	t.Cleanup(func() { // after the vans
		for _, d := range []*simgpu.Device{wdev, sdev} {
			_ = d.Close()
			d.Leaks(t)
		}
	})
	worker, server = linked(t, wdev, sdev, append(set, nil)[0])
	if !worker.TakesDevice(8) || !server.TakesDevice(9) {
		t.Fatal("the devices do not reach each other")
	}
	return worker, server, wdev, sdev
}

func on(b backend.Backend) func(*Van) { return func(v *Van) { v.backend = b } }

// value is a message for to with a value on d.
func value(d *simgpu.Device, to, ts int, b []byte) *van.Message {
	m := data(to, ts, nil)
	m.Vals = d.Mem(bytes.Clone(b))
	return m
}

// asAnswer makes m the answer to the request with its timestamp.
func asAnswer(m *van.Message) *van.Message {
	m.Request, m.Push = false, false
	return m
}

// pullInto is a request for a value that is wanted in into.
func pullInto(to, ts int, into backend.Mem) *van.Message {
	m := data(to, ts, nil)
	m.Push, m.Into = false, into
	return m
}

// feedOf is where x copies from its only peer's device.
func (x *node) feedOf() *peerDevice {
	x.rx.feed.Lock()
	defer x.rx.feed.Unlock()
	return x.peers.Ins()[0].dev
}

// block holds the stream of s until the function that it returns is called.
func block(d *simgpu.Device, s *peerDevice) (open func()) {
	gate := make(chan struct{})
	d.Queue(s.stream, func() { <-gate })
	return func() { close(gate) }
}

// wantValue checks a received message, and releases it.
func wantValue(t *testing.T, m *van.Message, ts int, dev backend.Device, b []byte) {
	t.Helper()
	defer m.Release()
	if int(m.Timestamp) != ts {
		t.Fatalf("message %d came when %d was due", m.Timestamp, ts)
	}
	if m.Vals.Device() != dev || !bytes.Equal(simgpu.Raw(m.Vals), b) {
		t.Errorf("message %d: %d bytes on %s, want %d on %s, or the values differ", ts, m.Vals.Len(), m.Vals.Device(), len(b), dev)
	}
}

// TestDeviceToDevice: values of any length arrive on the receiver's device, in order with values on the host.
func TestDeviceToDevice(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	rounds := 3 * maxCopies
	go func() {
		for i := range rounds {
			b := pattern(i, 1+i*997%70000)
			m := data(8, i, b)
			if i%3 > 0 {
				m = value(wdev, 8, i, b)
			}
			if err := worker.Send(m); err != nil {
				t.Error(err)
			}
		}
	}()
	for i := range rounds {
		dev := sdev.Device()
		if i%3 == 0 {
			dev = backend.Host
		}
		wantValue(t, server.next(), i, dev, pattern(i, 1+i*997%70000))
	}
	eventually(t, "all is acknowledged", func() bool { return worker.Stats().LentValues == 0 })
}

// TestDevicePlaces: a push goes to the buffer registered for it, an answer to where it
// is wanted, if that is on the device.
func TestDevicePlaces(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	registered := sdev.Mem(make([]byte, 5000))
	if err := server.RegisterRecvBuffer(9, 1, registered); err != nil {
		t.Fatal(err)
	}
	worker.must(value(wdev, 8, 0, pattern(1, 4000)))
	m := server.next()
	if !m.Placed || m.Vals.Ptr() != registered.Ptr() {
		t.Errorf("the push is not in the registered buffer")
	}
	wantValue(t, m, 0, sdev.Device(), pattern(1, 4000))
	worker.must(data(8, 1, pattern(2, 4000)))
	if m = server.next(); m.Placed {
		t.Error("a value on the host claims to be in a buffer on the device")
	}
	wantValue(t, m, 1, backend.Host, pattern(2, 4000))

	for i, c := range []struct {
		name   string
		into   backend.Mem
		answer *van.Message
		placed bool
		dev    backend.Device
	}{
		{"device to device", wdev.Mem(make([]byte, 3000)), value(sdev, 9, 10, pattern(3, 3000)), true, wdev.Device()},
		{"device to host", backend.Bytes(make([]byte, 40000)), value(sdev, 9, 11, pattern(3, 40000)), false, wdev.Device()},
		{"host to device", wdev.Mem(make([]byte, 40000)), data(9, 12, pattern(3, 40000)), false, backend.Host},
		{"another length", wdev.Mem(make([]byte, 3000)), value(sdev, 9, 13, pattern(3, 2000)), false, wdev.Device()},
	} {
		worker.must(pullInto(8, 10+i, c.into))
		server.next().Release()
		server.must(asAnswer(c.answer))
		m := worker.next()
		if m.Placed != c.placed || c.placed != (m.Vals.Ptr() == c.into.Ptr()) {
			t.Errorf("%s: placed=%t, want %t", c.name, m.Placed, c.placed)
		}
		wantValue(t, m, 10+i, c.dev, simgpu.Raw(c.answer.Vals))
	}
}

// TestDeviceRevoke: memory that was taken back is not written to any more, whether the
// copy has begun or not.
func TestDeviceRevoke(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	into := wdev.Mem(make([]byte, 3000))
	worker.must(pullInto(8, 1, into))
	server.next().Release()
	open := block(wdev, worker.feedOf())
	server.must(asAnswer(value(sdev, 9, 1, pattern(1, 3000))))
	eventually(t, "the copy is queued", func() bool { return worker.copies.running.Load() == 1 })
	done := make(chan struct{})
	go func() {
		worker.Invalidate(into)
		clear(simgpu.Raw(into)) // the race detector sees a copy that still runs
		close(done)
	}()
	server.must(data(9, 2, []byte("behind")))
	select {
	case <-done:
		t.Error("Invalidate has not waited for the copy")
	case <-time.After(20 * time.Millisecond):
	}
	open()
	<-done
	wantValue(t, worker.next(), 2, backend.Host, []byte("behind")) // and not the answer
	if !bytes.Equal(simgpu.Raw(into), make([]byte, 3000)) {
		t.Error("it was written to after that")
	}

	worker.must(pullInto(8, 3, into))
	server.next().Release()
	worker.Invalidate(into)
	server.must(asAnswer(value(sdev, 9, 3, pattern(2, 3000))))
	m := worker.next()
	if m.Placed {
		t.Error("an answer is where it was not wanted any more")
	}
	wantValue(t, m, 3, wdev.Device(), pattern(2, 3000))
}

// TestDeviceLost: a peer that goes while its memory is being copied.
func TestDeviceLost(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	open := block(sdev, server.feedOf())
	for i := range 5 {
		worker.must(value(wdev, 8, i, pattern(i, 5000)))
	}
	eventually(t, "the copies are queued", func() bool { return server.copies.running.Load() == 5 })
	time.AfterFunc(10*time.Millisecond, open)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = worker.Close(ctx) // takes back what has not been copied
	eventually(t, "nothing is mapped", func() bool { return server.copies.running.Load() == 0 && sdev.Imports() == 0 })
}

// TestDeviceBudget: values on the device that wait behind a handler count: when they use the budget up, their peer
// is not read any more.
func TestDeviceBudget(t *testing.T) {
	wdev, sdev := simgpu.New(1), simgpu.New(2)
	t.Cleanup(func() { _ = errors.Join(wdev.Close(), sdev.Close()) })
	n := inproc.NewNetwork()
	worker := newNode(t, n, 9, on(wdev))
	server := newNode(t, n, 8, func(v *Van) {
		v.backend = sdev
		v.rx.feed.Loop.Budget = engine.NewBudget(1<<20, 0)
	})
	worker.start()
	release := make(chan struct{})
	server.Start(func(m *van.Message) {
		if m.Timestamp == 0 {
			<-release
		}
		server.in <- m.Retain()
	})
	worker.connect(server)
	server.connect(worker)
	const sent = 16
	for i := range sent {
		worker.must(value(wdev, 8, i, pattern(i, 256<<10)))
	}
	eventually(t, "the peer is not read any more", func() bool { return server.Stats().PausedReads == 1 })
	close(release)
	for i := range sent {
		wantValue(t, server.next(), i, sdev.Device(), pattern(i, 256<<10))
	}
}

// TestDeviceOfALostPeer: messages that had arrived when the link broke are delivered when their copies have ended,
// and the loss of the peer is reported after them.
func TestDeviceOfALostPeer(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	open := block(sdev, server.feedOf())
	for i := range 3 {
		worker.must(value(wdev, 8, i, pattern(i, 5000)))
	}
	eventually(t, "the copies are queued", func() bool { return server.copies.running.Load() == 3 })
	var looks atomic.Int32
	server.rx.feed.Lock()
	server.receiver.polled = func() { looks.Add(1) }
	l := server.peers.Ins()[0]
	server.rx.feed.Unlock()
	server.peers.inLost(l)
	before := looks.Load()
	eventually(t, "the receiver has seen it", func() bool { return looks.Load() > before+1 })
	open()
	for i := range 3 {
		wantValue(t, server.next(), i, sdev.Device(), pattern(i, 5000))
	}
	server.event(9, false)
}

// TestDeviceFails: a device that fails ends the link, which says so.
func TestDeviceFails(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	broken := errors.New("uncorrectable ECC error")
	open := block(sdev, server.feedOf())
	worker.must(value(wdev, 8, 1, pattern(1, 5000)))
	eventually(t, "the copy is queued", func() bool { return server.copies.running.Load() == 1 })
	sdev.Fail(broken)
	if e := server.event(9, false); !errors.Is(e.cause, broken) {
		t.Errorf("lost because of %v", e.cause)
	}
	open()
	sdev.Fail(nil)
	worker.event(8, true)
	worker.must(data(8, 2, []byte("again")))
	wantValue(t, server.next(), 2, backend.Host, []byte("again"))
}

// TestDeviceRefused: a message that cannot be copied from device to device is refused before it is sent.
func TestDeviceRefused(t *testing.T) {
	worker, server, wdev, _ := devicePair(t)
	wdev.Private(true)
	if err := worker.Send(value(wdev, 8, 1, pattern(1, 100))); !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("private memory: %v", err)
	}
	wdev.Private(false)
	m := value(wdev, 8, 1, pattern(1, 100))
	m.Keys = backend.Bytes(make([]byte, streamFrom))
	if err := worker.Send(m); !errors.Is(err, backend.ErrNotExportable) {
		t.Errorf("large keys: %v", err)
	}
	m = data(8, 1, []byte("values"))
	m.Keys = wdev.Mem(make([]byte, 8))
	if err := worker.Send(m); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("keys on the device: %v", err)
	}
	worker.must(value(wdev, 8, 2, pattern(2, 100)))
	server.next().Release()
}

// TestDeviceNoMemory: where the device has no memory for a push, it stays on the host.
func TestDeviceNoMemory(t *testing.T) {
	worker, server, wdev, _ := devicePair(t)
	server.rx.feed.Lock()
	server.own.device.pool = backend.NewPool(0, nil, nil)
	server.rx.feed.Unlock()
	worker.must(value(wdev, 8, 1, pattern(1, 100_000)))
	wantValue(t, server.next(), 1, backend.Host, pattern(1, 100_000))
}

// TestDeviceMappings: new memory at the address of freed memory is distinguished from it, and unused mappings are
// closed.
func TestDeviceMappings(t *testing.T) {
	worker, server, wdev, sdev := devicePair(t)
	worker.must(value(wdev, 8, 1, pattern(1, 100)))
	server.next().Release()
	s := server.feedOf()
	server.rx.feed.Lock()
	if len(s.maps) != 1 || sdev.Imports() != 1 {
		t.Errorf("%d mappings, %d imports", len(s.maps), sdev.Imports())
	}
	for _, m := range s.maps {
		e, err := wdev.Export(wdev.Mem(make([]byte, 100)))
		if err != nil {
			t.Fatal(err)
		}
		e.Base = m.base + 50
		if _, err := s.mapOf(&e); err != nil {
			t.Fatal(err)
		}
		if _, err := s.mapOf(&backend.Export{Allocation: e.Allocation, Base: e.Base, Size: 99}); !errors.Is(err, van.ErrMalformed) {
			t.Errorf("an allocation that has shrunk: %v", err)
		}
	}
	if len(s.maps) != 1 || sdev.Imports() != 1 {
		t.Errorf("%d mappings, %d imports after the memory was freed", len(s.maps), sdev.Imports())
	}
	for _, m := range s.maps {
		s.tidy(m.used + uint64(mapTime) + 1)
	}
	if len(s.maps) != 0 || sdev.Imports() != 0 {
		t.Errorf("%d mappings, %d imports after a while", len(s.maps), sdev.Imports())
	}
	server.rx.feed.Unlock()
	worker.must(value(wdev, 8, 2, pattern(2, 100)))
	wantValue(t, server.next(), 2, sdev.Device(), pattern(2, 100))
}

// TestDeviceOneSided: with a peer on the host values on the device are not taken.
func TestDeviceOneSided(t *testing.T) {
	d := simgpu.New(1)
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, on(d)), newNode(t, n, 8, nil)
	worker.start()
	server.start()
	worker.connect(server)
	server.connect(worker)
	if worker.TakesDevice(8) || server.TakesDevice(9) {
		t.Error("a peer on the host takes values on the device")
	}
	if err := worker.Send(value(d, 8, 1, []byte("x"))); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("sent: %v", err)
	}
}

// TestDeviceProbe: a peer whose probe is not what it says is not copied from.
func TestDeviceProbe(t *testing.T) {
	d := simgpu.New(1)
	o := van.Options{Config: env.Default(), Log: slog.New(slog.DiscardHandler), Backend: d}
	inner, err := inproc.NewNetwork().Factory()(o)
	if err != nil {
		t.Fatal(err)
	}
	v := New(inner, o)
	name := bytes.Repeat([]byte{7}, 16)
	if v.own.device, err = openDevice(d, name); err != nil {
		t.Fatal(err)
	}
	export := func(change func(*backend.Export)) []byte {
		e, b := v.own.device.exports, make([]byte, van.ExportLen)
		change(&e)
		van.PutExport(b, &e)
		return b
	}
	for _, c := range []struct {
		name   string
		b      []byte
		want   string
		probed []byte
	}{
		{"stale", export(func(e *backend.Export) { e.Handle[7] = 9 }), "stale", name},
		{"another's", export(func(*backend.Export) {}), "not the peer's", bytes.Repeat([]byte{8}, 16)},
		{"outside", export(func(e *backend.Export) { e.Offset = 1 }), "inside its allocation", name},
		{"huge", export(func(e *backend.Export) { e.Size = 1 << 60 }), "inside its allocation", name},
	} {
		if s, err := openPeerDevice(&v.rx, c.b, c.probed); err == nil || s != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	if err := v.own.device.close(); err != nil {
		t.Error(err)
	}
	_ = d.Close()
	d.Leaks(t)
}

// TestHostileDevice: records that name a device's memory wrongly end the link.
func TestHostileDevice(t *testing.T) {
	le := binary.LittleEndian
	for name, change := range map[string]func(b []byte){
		"no bytes":       func(b []byte) { le.PutUint32(b[16+partHead*partVals+8:], 0) },
		"beyond the end": func(b []byte) { le.PutUint64(b[exportAt(b)+88:], 101) },
		"stale handle":   func(b []byte) { b[exportAt(b)+7] = 0xff; le.PutUint64(b[exportAt(b)+64:], 1<<40) },
		"keys":           func(b []byte) { le.PutUint32(b[16+partHead+12:], partDevice) },
		"no such slot":   func(b []byte) { setSlot(b, slotCount, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			worker, server, wdev, _ := devicePair(t)
			l := worker.peers.link(8)
			m := value(wdev, 8, 1, pattern(1, 100))
			e, err := wdev.Export(m.Vals)
			if err != nil {
				t.Fatal(err)
			}
			l.mu.Lock()
			l.writeRecord(t, m, &backend.Shared{Export: e}, change)
			l.mu.Unlock()
			server.event(9, false)
			worker.event(8, true)
			worker.must(data(8, 2, []byte("again")))
			wantValue(t, server.next(), 2, backend.Host, []byte("again"))
		})
	}
}

// exportAt is where the export of the record in b begins.
func exportAt(b []byte) int {
	off := recordHead
	for i := range partVals {
		off += align(int(binary.LittleEndian.Uint32(b[16+partHead*i+8:])))
	}
	return off
}
