package stage_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/stage"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// gpu0 is the device of the values: device 0 of each node.
var gpu0 = simgpu.New(0)

func TestConformance(t *testing.T) {
	net := inproc.NewNetwork().Factory()
	suite := func(f van.Factory, badHost string) vantest.Suite {
		return vantest.Suite{BadHost: badHost, New: func(t testing.TB) van.Van {
			inner, err := f(van.Options{Config: env.Default()})
			if err != nil {
				t.Fatal(err)
			}
			return stage.New(inner, stage.Options{Backend: simgpu.New(0)})
		}}
	}
	t.Run("inproc", func(t *testing.T) { vantest.Run(t, suite(net, "no host")) })
	if !vantest.Race { // overAll's tests run over van/zmq with the race detector
		t.Run("zmq", func(t *testing.T) { vantest.Run(t, suite(zmq.New, "")) })
	}
}

func TestNothingToStage(t *testing.T) {
	inner, err := inproc.NewNetwork().Factory()(van.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []backend.Backend{nil, backend.NewCPU()} {
		if v := stage.New(inner, stage.Options{Backend: b}); v != inner {
			t.Errorf("backend %v: wrapped all the same", b)
		}
	}
}

// pair is a worker, id 9, and a server, id 8, connected to each other.
type pair struct {
	worker, server   van.Van
	wdev, sdev       *simgpu.Device
	atWorker, atServ chan *van.Message
	blocking         *blocking
}

// blocking is a device whose streams may wait for the CPU.
type blocking struct {
	streams atomic.Bool
	frees   atomic.Int32
}

type device = simgpu.Device // Device is also the name of a method

// blocker is such a device. It counts freed memory.
type blocker struct {
	*device
	b *blocking
}

func (d blocker) MayBlock() bool { return d.b.streams.Load() }

func (d blocker) Free(m backend.Mem) error {
	d.b.frees.Add(1)
	return d.device.Free(m)
}

func (d blocker) FreePinned(m backend.Mem) error { return d.Free(m) }

func connect(t *testing.T, o stage.Options) *pair {
	t.Helper()
	return connectOver(t, inproc.NewNetwork().Factory(), o)
}

// overAll runs a test over each transport for host memory.
func overAll(t *testing.T, test func(t *testing.T, p *pair)) {
	for name, f := range map[string]van.Factory{"inproc": inproc.NewNetwork().Factory(), "zmq": zmq.New} {
		t.Run(name, func(t *testing.T) { test(t, connectOver(t, f, stage.Options{})) })
	}
}

func connectOver(t *testing.T, net van.Factory, o stage.Options) *pair {
	t.Helper()
	p := &pair{wdev: simgpu.New(0), sdev: simgpu.New(0), atWorker: make(chan *van.Message, 100), atServ: make(chan *van.Message, 100), blocking: &blocking{}}
	node := func(role van.Role, id int, d *simgpu.Device, in chan *van.Message) (van.Van, van.Node) {
		inner, err := net(van.Options{Config: env.Default()})
		if err != nil {
			t.Fatal(err)
		}
		o.Backend = blocker{d, p.blocking}
		v := stage.New(inner, o)
		n := van.Node{Role: role, ID: id, Hostname: "127.0.0.1"}
		port, err := v.Bind(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		n.Port = port
		v.Start(func(m *van.Message) { in <- m.Retain() })
		return v, n
	}
	var wn, sn van.Node
	p.worker, wn = node(van.Worker, 9, p.wdev, p.atWorker)
	p.server, sn = node(van.Server, 8, p.sdev, p.atServ)
	p.worker.SetID(9)
	p.server.SetID(8)
	if err := errors.Join(p.worker.Connect(t.Context(), 8, sn), p.server.Connect(t.Context(), 9, wn)); err != nil {
		t.Fatal(err)
	}
	return p
}

// shut closes both vans.
func (p *pair) shut(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), vantest.Limit)
	defer cancel()
	if err := errors.Join(p.worker.Close(ctx), p.server.Close(ctx)); err != nil {
		t.Error(err)
	}
}

func (p *pair) close(t *testing.T) {
	t.Helper()
	p.shut(t)
	p.wdev.Leaks(t)
	p.sdev.Leaks(t)
}

func take(t *testing.T, c chan *van.Message) *van.Message {
	t.Helper()
	select {
	case m := <-c:
		return m
	case <-time.After(vantest.Limit):
		t.Fatal("no message came")
		return nil
	}
}

// push is a pushed tensor for node 8.
func push(key uint64, vals backend.Mem) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.IsTensor, m.Key = 8, true, true, true, key
	m.Src, m.Dst = vals.Device(), vals.Device()
	m.Frames, m.Keys, m.Vals = 2, backend.Slice([]uint64{key}), vals
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	return m
}

type told chan struct{}

func (c told) Sent() { close(c) }

// TestCloseWhileStreamsWait: buffers are left to the backend, whose driver would wait for
// the streams; otherwise they are freed.
func TestCloseWhileStreamsWait(t *testing.T) {
	for _, waits := range []bool{false, true} {
		p := connect(t, stage.Options{})
		p.blocking.streams.Store(waits)
		if err := p.worker.Send(push(5, gpu0.Mem(make([]byte, 5000)))); err != nil {
			t.Fatal(err)
		}
		m := take(t, p.atServ)
		if m.Vals.OnHost() {
			t.Error("the value is on the host")
		}
		m.Release()
		p.shut(t)
		want := int32(p.wdev.Allocs() + p.sdev.Allocs())
		if want < 2 {
			t.Errorf("%d buffers were made", want)
		}
		if waits {
			want = 0
		}
		if n := p.blocking.frees.Load(); n != want {
			t.Errorf("streams may wait: %t: %d buffers are freed, want %d", waits, n, want)
		}
	}
}

func TestPushFromDeviceToDevice(t *testing.T) {
	overAll(t, pushFromDeviceToDevice)
}

func pushFromDeviceToDevice(t *testing.T, p *pair) {
	for round := range 50 {
		want := bytes.Repeat([]byte{byte(round + 1)}, 1000+round*997)
		m := push(5, gpu0.Mem(bytes.Clone(want)))
		vals := m.Vals
		done := make(told)
		m.Done = done
		if err := p.worker.Send(m); err != nil {
			t.Fatal(err)
		}
		if m.Vals.Ptr() != vals.Ptr() || m.Vals.Device() != gpu0.Device() || m.Done != van.Completion(done) || m.RequestTrace.PostSend == 0 {
			t.Error("Send has changed the caller's message, or not stamped it")
		}
		clear(simgpu.Raw(m.Vals)) // Send has copied it
		<-done
		got := take(t, p.atServ)
		if got.Vals.Device() != gpu0.Device() || !bytes.Equal(simgpu.Raw(got.Vals), want) || got.Placed || got.Key != 5 {
			t.Errorf("round %d: %d bytes on %s arrived", round, got.Vals.Len(), got.Vals.Device())
		}
		got.Release()
	}
	staged, unpinned, refused := p.worker.(*stage.Van).Counts()
	if staged != 50 || unpinned != 0 || refused != 0 {
		t.Errorf("staged %d, unpinned %d, refused %d", staged, unpinned, refused)
	}
	if n := p.sdev.Allocs(); n > 25 {
		t.Errorf("%d buffers for 50 values of similar sizes", n)
	}
	p.close(t)
}

func TestBuffersAreUsedAgain(t *testing.T) {
	overAll(t, buffersAreUsedAgain)
}

func buffersAreUsedAgain(t *testing.T, p *pair) {
	for range 1000 {
		if err := p.worker.Send(push(1, gpu0.Mem(make([]byte, 70_000)))); err != nil {
			t.Fatal(err)
		}
		take(t, p.atServ).Release()
	}
	if p.wdev.Allocs() > 50 || p.sdev.Allocs() != 1 { // libzmq may release a value a little later
		t.Errorf("%d and %d buffers for one value at a time", p.wdev.Allocs(), p.sdev.Allocs())
	}
	p.close(t)
}

// Each retained message keeps its own memory.
func TestHeldMessages(t *testing.T) {
	p := connect(t, stage.Options{})
	var held []*van.Message
	for i := range 20 {
		if err := p.worker.Send(push(uint64(i), gpu0.Mem(bytes.Repeat([]byte{byte(i)}, 5000)))); err != nil {
			t.Fatal(err)
		}
		held = append(held, take(t, p.atServ))
	}
	for i, m := range held {
		if simgpu.Raw(m.Vals)[0] != byte(i) || simgpu.Raw(m.Vals)[4999] != byte(i) {
			t.Errorf("message %d has another's bytes", i)
		}
	}
	last := held[0]
	for _, m := range held[1:] {
		m.Release()
	}
	ctx, cancel := context.WithTimeout(context.Background(), vantest.Limit)
	defer cancel()
	if err := p.server.Close(ctx); err != nil {
		t.Error(err)
	}
	if simgpu.Raw(last.Vals)[0] != 0 {
		t.Error("the message that is still held has lost its bytes")
	}
	last.Release()
	p.close(t)
}

func TestHostValuesPass(t *testing.T) {
	overAll(t, hostValuesPass)
}

func hostValuesPass(t *testing.T, p *pair) {
	m := push(1, backend.Bytes([]byte("on the host")))
	if err := p.worker.Send(m); err != nil {
		t.Fatal(err)
	}
	got := take(t, p.atServ)
	if string(got.Vals.Host()) != "on the host" {
		t.Errorf("%q on %s", got.Vals.Host(), got.Vals.Device())
	}
	got.Release()

	// An answer from the device stays on the host: the worker knows its destination.
	a := push(1, gpu0.Mem([]byte("an answer of the server")))
	a.Receiver, a.Request, a.Push = 9, false, false
	if err := p.server.Send(a); err != nil {
		t.Fatal(err)
	}
	got = take(t, p.atWorker)
	if string(got.Vals.Host()) != "an answer of the server" {
		t.Errorf("%q on %s", got.Vals.Host(), got.Vals.Device())
	}
	got.Release()
	if p.wdev.Allocs() != 0 {
		t.Errorf("%d buffers were made at the worker", p.wdev.Allocs())
	}
	p.close(t)
}

func TestRegisteredBuffer(t *testing.T) {
	overAll(t, registeredBuffer)
}

func registeredBuffer(t *testing.T, p *pair) {
	reg, ok := van.As[van.BufferRegistrar](p.server)
	if !ok {
		t.Fatal("no BufferRegistrar")
	}
	dst := gpu0.Mem(make([]byte, 100))
	if err := errors.Join(reg.RegisterRecvBuffer(9, 7, dst), reg.RegisterRecvBuffer(9, 8, backend.Bytes(make([]byte, 9)))); err != nil {
		t.Fatal(err)
	}
	if err := reg.RegisterRecvBuffer(9, 9, simgpu.New(4).Mem(make([]byte, 1))); !errors.Is(err, van.ErrInvalid) || !errors.Is(err, backend.ErrWrongDevice) {
		t.Errorf("another device's buffer: %v", err)
	}
	if err := p.worker.Send(push(7, gpu0.Mem(bytes.Repeat([]byte{3}, 90)))); err != nil {
		t.Fatal(err)
	}
	m := take(t, p.atServ)
	if !m.Placed || m.Vals.Ptr() != dst.Ptr() || m.Vals.Len() != 90 || simgpu.Raw(dst)[89] != 3 || simgpu.Raw(dst)[90] != 0 {
		t.Errorf("placed %t, %d bytes", m.Placed, m.Vals.Len())
	}
	m.Release()
	if err := p.worker.Send(push(7, gpu0.Mem(make([]byte, 100)))); err != nil {
		t.Fatal(err)
	}
	if m = take(t, p.atServ); !m.Placed || m.Vals.Ptr() != dst.Ptr() || m.Vals.Len() != 100 {
		t.Errorf("a value that just fits: placed %t, %d bytes", m.Placed, m.Vals.Len())
	}
	m.Release()
	if err := p.worker.Send(push(7, gpu0.Mem(make([]byte, 101)))); err != nil {
		t.Fatal(err)
	}
	m = take(t, p.atServ)
	if m.Placed || m.Vals.Len() != 101 || !m.Vals.OnHost() {
		t.Errorf("a value too large: placed %t, %d bytes on %s", m.Placed, m.Vals.Len(), m.Vals.Device())
	}
	m.Release()
	p.close(t)
}

func TestLimitsAndFailures(t *testing.T) {
	p := connect(t, stage.Options{Pinned: 8192, Device: 8192})
	// Too large for both limits: sent through ordinary memory, and left there.
	if err := p.worker.Send(push(1, gpu0.Mem(bytes.Repeat([]byte{4}, 9000)))); err != nil {
		t.Fatal(err)
	}
	m := take(t, p.atServ)
	if !m.Vals.OnHost() || m.Vals.Len() != 9000 || m.Vals.Host()[8999] != 4 {
		t.Errorf("%d bytes on %s", m.Vals.Len(), m.Vals.Device())
	}
	m.Release()
	_, unpinned, _ := p.worker.(*stage.Van).Counts()
	_, _, refused := p.server.(*stage.Van).Counts()
	if unpinned != 1 || refused != 1 {
		t.Errorf("unpinned %d, refused %d", unpinned, refused)
	}
	// Idle buffers are freed for another size.
	for _, n := range []int{100, 8000, 100, 5000} {
		if err := p.worker.Send(push(1, gpu0.Mem(make([]byte, n)))); err != nil {
			t.Fatal(err)
		}
		m := take(t, p.atServ)
		if m.Vals.OnHost() {
			t.Errorf("%d bytes stay on the host", n)
		}
		m.Release()
	}
	boom := errors.New("the device is gone")
	for i := range 8 { // more copies than buffers: each buffer is reused after a failed copy
		fails := i%2 == 1
		p.sdev.Fail(map[bool]error{true: boom}[fails])
		if err := p.worker.Send(push(1, gpu0.Mem(make([]byte, 50)))); err != nil {
			t.Fatal(err)
		}
		if m = take(t, p.atServ); m.Vals.OnHost() != fails {
			t.Errorf("value %d is on %s, its copy fails: %t", i, m.Vals.Device(), fails)
		}
		m.Release()
	}
	p.sdev.Fail(nil)

	p.wdev.Fail(boom)
	msg := push(1, gpu0.Mem(make([]byte, 50)))
	if err := p.worker.Send(msg); !errors.Is(err, boom) || !strings.Contains(err.Error(), "server 0 (id 8)") {
		t.Errorf("Send on a failed device: %v", err)
	}
	p.wdev.Fail(nil)
	msg.Vals = simgpu.New(3).Mem(make([]byte, 50))
	if err := p.worker.Send(msg); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "tensor on gpu:3 but this node owns gpu:0") {
		t.Errorf("another device's value: %v", err)
	}
	msg.Vals, msg.Receiver = gpu0.Mem(make([]byte, 50)), 10
	if err := p.worker.Send(msg); !errors.Is(err, van.ErrUnknownPeer) {
		t.Errorf("a stranger: %v", err)
	}
	if msg.Vals.Device() != gpu0.Device() || msg.Vals.Len() != 50 || msg.Done != nil {
		t.Errorf("a message that was not sent has %d bytes on %s and Done %v, want what it had", msg.Vals.Len(), msg.Vals.Device(), msg.Done)
	}
	p.close(t)
}

func TestManySenders(t *testing.T) {
	overAll(t, manySenders)
}

func manySenders(t *testing.T, p *pair) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 100 {
				if err := p.worker.Send(push(uint64(i), gpu0.Mem(bytes.Repeat([]byte{byte(i)}, 100+37*j)))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 800 {
		m := take(t, p.atServ)
		if b := simgpu.Raw(m.Vals); b[0] != byte(m.Key) || b[len(b)-1] != byte(m.Key) {
			t.Errorf("key %d has bytes of %d", m.Key, b[0])
		}
		m.Release()
	}
	wg.Wait()
	p.close(t)
}

// TestDirect: a peer that accepts device values gets them without a copy.
func TestDirect(t *testing.T) {
	p := connect(t, stage.Options{Direct: func(int) bool { return true }})
	dst := gpu0.Mem(make([]byte, 100))
	if err := p.server.(van.BufferRegistrar).RegisterRecvBuffer(9, 7, dst); err != nil {
		t.Fatal(err)
	}
	if err := p.worker.Send(push(1, gpu0.Mem(bytes.Repeat([]byte{3}, 90)))); err == nil {
		t.Error("the van inside, which takes host memory only, was not asked")
	}
	if staged, _, _ := p.worker.(*stage.Van).Counts(); staged != 0 {
		t.Errorf("%d values were copied", staged)
	}
	p.close(t)
}

// particular is a van that refuses values on a device.
type particular struct{ van.Van }

func (p particular) Unwrap() van.Van { return p.Van }

func (p particular) Send(m *van.Message) error {
	if !m.Vals.OnHost() {
		return &van.Error{Op: "send", Err: backend.ErrNotExportable}
	}
	return p.Van.Send(m)
}

// TestDirectRefused: a value whose memory cannot be shared is staged.
func TestDirectRefused(t *testing.T) {
	net := inproc.NewNetwork().Factory()
	var log bytes.Buffer
	p := connectOver(t, func(o van.Options) (van.Van, error) {
		v, err := net(o)
		return particular{v}, err
	}, stage.Options{Log: slog.New(slog.NewTextHandler(&log, nil)), Direct: func(int) bool { return true }})
	const times = 4
	for range times {
		if err := p.worker.Send(push(1, gpu0.Mem(bytes.Repeat([]byte{3}, 90)))); err != nil {
			t.Fatal(err)
		}
		m := take(t, p.atServ)
		if m.Vals.OnHost() || !bytes.Equal(simgpu.Raw(m.Vals), bytes.Repeat([]byte{3}, 90)) {
			t.Errorf("%d bytes on %s", m.Vals.Len(), m.Vals.Device())
		}
		m.Release()
	}
	if staged, _, _ := p.worker.(*stage.Van).Counts(); staged != times {
		t.Errorf("%d values were copied", staged)
	}
	if n := p.worker.(van.Meter).Stats().UnsharedValues; n != times {
		t.Errorf("%d values are counted", n)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings, want one:\n%s", n, log.String())
	}
	p.close(t)
}

// TestPathGone: if the direct path ends between its choice and Send, the value is staged. The memory is not the
// cause, so the value is neither counted nor warned of.
func TestPathGone(t *testing.T) {
	net := inproc.NewNetwork().Factory()
	var log bytes.Buffer
	var direct atomic.Bool
	direct.Store(true)
	p := connectOver(t, func(o van.Options) (van.Van, error) {
		v, err := net(o)
		return particular{v}, err
	}, stage.Options{Log: slog.New(slog.NewTextHandler(&log, nil)), Direct: func(int) bool { return direct.Swap(false) }})
	if err := p.worker.Send(push(1, gpu0.Mem(bytes.Repeat([]byte{3}, 90)))); err != nil {
		t.Fatal(err)
	}
	take(t, p.atServ).Release()
	if n := p.worker.(van.Meter).Stats().UnsharedValues; n != 0 || strings.Contains(log.String(), "level=WARN") {
		t.Errorf("%d values are counted:\n%s", n, log.String())
	}
	p.close(t)
}
