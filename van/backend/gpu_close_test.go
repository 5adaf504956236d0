package backend

import (
	"errors"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// waitingGPU is a backend with something of each kind to free. Its device has a stream of another user that waits
// for a word until end is called.
func waitingGPU(t *testing.T, wait func(g *gpu, stream uintptr, word Mem) error) (f *fakeDriver, g *gpu, end func()) {
	t.Helper()
	f = newFake(1)
	f.exported = newFake(1)
	var made [2]*gpu
	for i := range made {
		b, err := newGPU(f, 0)
		if err != nil {
			t.Fatal(err)
		}
		made[i] = b.(*gpu)
	}
	g, other := made[0], made[1]
	peer := open(t, f.exported)
	far, err := peer.Alloc(512)
	if err != nil {
		t.Fatal(err)
	}
	e, err := peer.Export(far)
	if err != nil {
		t.Fatal(err)
	}
	_, importErr := g.Import(e)
	_, allocErr := g.Alloc(5000)
	_, pinErr := g.AllocPinned(600)
	_, registerErr := g.RegisterHost(Bytes(mmap(4096)))
	_, streamErr := g.NewStream()
	if err := errors.Join(importErr, allocErr, pinErr, registerErr, streamErr); err != nil {
		t.Fatal(err)
	}
	stream, err := other.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	words, err := other.Alloc(16)
	if err != nil {
		t.Fatal(err)
	}
	there := counterAt(uintptr(words.Ptr()))
	counterAt(uintptr(words.Ptr()) + 8).Store(7)
	if err := wait(other, stream, words); err != nil {
		t.Fatal(err)
	}
	for f.waits.Load() == 0 {
		clock.Sleep(minPause)
	}
	return f, g, func() { there.Store(7); settle(t, other, stream) }
}

// freed counts what gives something back.
func (f *fakeDriver) freed() map[string]int {
	m := map[string]int{}
	for _, name := range []string{"memFree", "hostUnregister", "ipcClose", "moduleUnload", "streamDestroy", "eventDestroy", "release"} {
		m[name] = f.times(name)
	}
	return m
}

var waitKinds = map[string]func(g *gpu, stream uintptr, words Mem) error{
	"WaitSeq": func(g *gpu, stream uintptr, words Mem) error {
		return g.WaitSeq(stream, words.Sub(0, 8), words.Sub(8, 8))
	},
	"WaitFlag": func(g *gpu, stream uintptr, words Mem) error { return g.WaitFlag(stream, words.Sub(0, 8), 7) },
	"WaitBits": func(g *gpu, stream uintptr, words Mem) error { return g.WaitBits(stream, words.Sub(0, 8), 7) },
	"WaitCount": func(g *gpu, stream uintptr, words Mem) error {
		return g.WaitCount(stream, words.Sub(0, 8), 7)
	},
}

// TestCloseWhileAStreamWaits: to free anything would wait for that stream, so Close leaves
// all and says how much.
func TestCloseWhileAStreamWaits(t *testing.T) {
	for name, wait := range waitKinds {
		t.Run(name, func(t *testing.T) {
			f, g, end := waitingGPU(t, wait)
			before := f.freed()
			wantError(t, g.Close(), ErrInUse, "gpu:0: Close", "not ended after 1s", "5000 bytes of the device", "8792 bytes of host memory", "1 mappings")
			if after := f.freed(); !maps.Equal(before, after) {
				t.Errorf("calls that free: %v, before %v", after, before)
			}
			end()
			if err := g.Close(); err != nil {
				t.Errorf("Close again: %v", err)
			}
			if len(f.misuses) > 0 {
				t.Error(f.misuses)
			}
		})
	}
}

// TestCloseAfterAStreamWaited: if a stream waited and has gone on, Close frees everything.
func TestCloseAfterAStreamWaited(t *testing.T) {
	for name, wait := range waitKinds {
		t.Run(name, func(t *testing.T) {
			f, g, end := waitingGPU(t, wait)
			end()
			before := f.freed()
			if err := g.Close(); err != nil {
				t.Error(err)
			}
			after := f.freed()
			for what, n := range map[string]int{"memFree": 1, "hostUnregister": 3, "ipcClose": 1, "release": 1} {
				if got := after[what] - before[what]; got != n {
					t.Errorf("%d calls of %s, want %d", got, what, n)
				}
			}
		})
	}
}

// TestCloseAsksTheDevice: a failed device has no waiting streams. If a device does not report whether streams
// wait, freeing may hang, so Close frees nothing.
func TestCloseAsksTheDevice(t *testing.T) {
	f, g, end := waitingGPU(t, waitKinds["WaitFlag"])
	end()
	f.fail("synchronize", codeNotPermitted)
	before := f.freed()
	wantError(t, g.Close(), ErrInUse, "synchronize: FAKE_800 (800)", "5000 bytes of the device")
	if after := f.freed(); !maps.Equal(before, after) {
		t.Errorf("calls that free: %v, before %v", after, before)
	}

	f, g, end = waitingGPU(t, waitKinds["WaitFlag"])
	end()
	f.fail("synchronize", codeIllegalAddress)
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if n := f.times("memFree"); n != 1 {
		t.Errorf("%d calls of memFree, want 1", n)
	}
}

// TestCloseWhileTheDriverBlocks: Close does not wait without a limit for a call of the driver, and meanwhile other calls
// go on, since one of them may end the wait of the first.
func TestCloseWhileTheDriverBlocks(t *testing.T) {
	f := newFake(1)
	b, err := newGPU(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := b.(*gpu)
	in, gate, called := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	ends := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(ends)
	go func() { called <- g.enter(func() error { close(in); <-gate; return nil }) }()
	<-in
	closed, used := make(chan error, 1), make(chan error, 1)
	go func() { closed <- g.Close() }()
	go func() {
		var err error
		for end := time.Now().Add(closeLimit / 2); err == nil && time.Now().Before(end); clock.Sleep(minPause) {
			err = g.Health()
		}
		used <- err
	}()
	limit := time.After(10 * time.Second)
	for range 2 {
		select {
		case err := <-used:
			if err != nil {
				t.Errorf("another call: %v", err)
			}
		case err := <-closed:
			wantError(t, err, ErrInUse, "gpu:0: Close", "not ended after 5s")
		case <-limit:
			t.Fatal("a call, or Close, waits for a call that the driver does not end")
		}
	}
	ends()
	if err := <-called; err != nil {
		t.Error(err)
	}
	if err := g.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	if l := f.leaks(); len(l) > 0 {
		t.Error(l)
	}
}
