package backend

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
)

// deviceAlign is what cuMemAlloc promises.
const deviceAlign = 256

// Results of the driver that the backend does not distinguish.
const (
	codeInvalidValue  = 1
	codeInvalidDevice = 101
	codeInvalidHandle = 400
)

// fakeDriver is a driver without a GPU: device memory is memory that the test cannot
// read by accident (it is unmapped when freed), a stream is a goroutine with a queue.
// It notes every misuse that the true driver would punish or, worse, accept.
type fakeDriver struct {
	devices   int
	noFlags   bool // writeValue32 is not supported
	noBatches bool // writeValues32 is not supported
	noPeers   bool

	mu       sync.Mutex
	next     uintptr
	fails    map[string]int // the code that a function returns; 0 lets it work
	calls    map[string]int
	misuses  []string
	current  map[int][]uintptr // contexts of a thread, the last one is current
	mode     map[int]int32
	retained map[int]int
	mem      map[uintptr][]byte // device memory by base address
	register map[uintptr]int
	streams  map[uintptr]*fakeStream
	events   map[uintptr]*fakeEvent
	opened   map[uintptr]int
	buffer   int // length of the last dma-buf
	modules  int
	blocked  map[int]*atomic.Bool // by device
	exported *fakeDriver          // the process whose handles this one opens
	seg      fakeSegments

	captured atomic.Pointer[fakeStream]
	waits    atomic.Int32 // streams that wait for a word
}

type fakeStream struct {
	ops     chan func()
	pending atomic.Int64
	done    chan struct{}
}

type fakeEvent struct{ latest *atomic.Bool }

func newFake(devices int) *fakeDriver {
	return &fakeDriver{devices: devices, fails: map[string]int{}, calls: map[string]int{}, current: map[int][]uintptr{},
		mode: map[int]int32{}, retained: map[int]int{}, mem: map[uintptr][]byte{},
		register: map[uintptr]int{}, streams: map[uintptr]*fakeStream{}, events: map[uintptr]*fakeEvent{},
		opened: map[uintptr]int{}, blocked: map[int]*atomic.Bool{}, next: 0x100}
}

// call notes a call and returns the failure that a test has ordered. Without a
// context, needs is 0.
func (f *fakeDriver) call(name string, needsContext bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[name]++
	tid := unix.Gettid()
	if stack := f.current[tid]; needsContext && len(stack) == 0 {
		f.misuses = append(f.misuses, name+" on a thread without a context")
	}
	if needsContext && f.mode[tid] != relaxed {
		f.misuses = append(f.misuses, name+" in capture mode global")
	}
	if code := f.fails[name]; code != 0 {
		return f.err(name, code)
	}
	return nil
}

const relaxed = 2

func (f *fakeDriver) err(name string, code int) error {
	return &driverError{call: name, code: code, name: fmt.Sprintf("FAKE_%d", code)}
}

func (f *fakeDriver) fail(name string, code int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails[name] = code
}

func (f *fakeDriver) times(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[name]
}

// leaks lists what is still held, and misuses.
func (f *fakeDriver) leaks() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := append([]string(nil), f.misuses...)
	for what, n := range f.seg.left() {
		if n > 0 {
			l = append(l, fmt.Sprintf("%d mapped %s", n, what))
		}
	}
	for what, n := range map[string]int{"device allocations": len(f.mem), "registrations": len(f.register),
		"modules": f.modules, "streams": len(f.streams), "events": len(f.events), "imports": len(f.opened)} {
		if n > 0 {
			l = append(l, fmt.Sprintf("%d %s", n, what))
		}
	}
	for dev, n := range f.retained {
		if n != 0 {
			l = append(l, fmt.Sprintf("context of device %d retained %d times", dev, n))
		}
	}
	for tid, s := range f.current {
		if len(s) > 0 {
			l = append(l, fmt.Sprintf("thread %d has %d contexts", tid, len(s)))
		}
	}
	return l
}

func (f *fakeDriver) start() error          { return f.call("start", false) }
func (f *fakeDriver) version() (int, error) { return 13000, f.call("version", false) }
func (f *fakeDriver) count() (int, error)   { return f.devices, f.call("count", false) }
func (f *fakeDriver) device(o int) (int, error) {
	if err := f.call("device", false); err != nil || o < f.devices {
		return o + 40, err
	}
	return 0, f.err("device", codeInvalidDevice)
}
func (f *fakeDriver) name(int) (string, error)     { return "Fake H200", f.call("name", false) }
func (f *fakeDriver) uuid(int) (string, error)     { return "GPU-0", f.call("uuid", false) }
func (f *fakeDriver) pciBusID(int) (string, error) { return "0000:18:00.0", f.call("pciBusID", false) }
func (f *fakeDriver) totalMem(int) (int64, error)  { return 1 << 30, f.call("totalMem", false) }
func (f *fakeDriver) attribute(_ int, a deviceAttribute) (int, error) {
	return int(a), f.call("attribute", false)
}
func (f *fakeDriver) canAccessPeer(a, b int) (bool, error) {
	return !f.noPeers, f.call("canAccessPeer", false)
}

func (f *fakeDriver) retain(dev int) (uintptr, error) {
	if err := f.call("retain", false); err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.retained[dev]++
	return uintptr(1000 + dev), nil
}

func (f *fakeDriver) mayBlock(dev int) *atomic.Bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.blocked[dev] == nil {
		f.blocked[dev] = &atomic.Bool{}
	}
	return f.blocked[dev]
}

func (f *fakeDriver) release(dev int) error {
	if err := f.call("release", false); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.retained[dev]--
	return nil
}

func (f *fakeDriver) enter(ctx uintptr) (driverState, error) {
	if err := f.call("enter", false); err != nil {
		return driverState{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	tid := unix.Gettid()
	stack := f.current[tid]
	s := driverState{mode: f.mode[tid], pushed: len(stack) == 0 || stack[len(stack)-1] != ctx}
	if s.pushed {
		f.current[tid] = append(stack, ctx)
	}
	f.mode[tid] = relaxed
	return s, nil
}

func (f *fakeDriver) leave(s driverState) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	tid := unix.Gettid()
	f.mode[tid] = s.mode
	if stack := f.current[tid]; s.pushed {
		if len(stack) == 0 {
			f.misuses = append(f.misuses, "leave on another thread than enter")
			return nil
		}
		f.current[tid] = stack[:len(stack)-1]
	}
	return nil
}

func (f *fakeDriver) memInfo() (int64, int64, error) {
	return 1 << 20, 1 << 30, f.call("memInfo", true)
}

// mmap returns memory whose use after unmapping ends the test.
func mmap(n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	return b
}

func base(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func (f *fakeDriver) allocIn(m map[uintptr][]byte, n int) uintptr {
	b := mmap(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	m[base(b)] = b
	return base(b)
}

func (f *fakeDriver) freeIn(m map[uintptr][]byte, p uintptr) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := m[p]
	if b == nil {
		return f.err("free", codeInvalidValue)
	}
	delete(m, p)
	return unix.Munmap(b)
}

func (f *fakeDriver) memAlloc(n int) (uintptr, error) {
	if err := f.call("memAlloc", true); err != nil {
		return 0, err
	}
	return f.allocIn(f.mem, n), nil
}

// frees is call for a driver function that blocks while a stream waits. Waiting forever would hang the test, so
// frees counts a misuse instead.
func (f *fakeDriver) frees(name string) error {
	for end := time.Now().Add(2 * time.Second); f.waits.Load() > 0; clock.Sleep(minPause) {
		if time.Now().After(end) {
			f.mu.Lock()
			f.misuses = append(f.misuses, name+" hangs: a stream waits")
			f.mu.Unlock()
			break
		}
	}
	return f.call(name, true)
}

func (f *fakeDriver) memFree(p uintptr) error {
	if err := f.frees("memFree"); err != nil {
		return err
	}
	return f.freeIn(f.mem, p)
}

func (f *fakeDriver) hostRegister(p unsafe.Pointer, n int) error {
	if err := f.call("hostRegister", true); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.register[uintptr(p)] = n
	return nil
}

func (f *fakeDriver) hostUnregister(p unsafe.Pointer) error {
	if err := f.frees("hostUnregister"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.register, uintptr(p))
	return nil
}

func (f *fakeDriver) hostDeviceAddr(p unsafe.Pointer) (uintptr, error) {
	return uintptr(p), f.call("hostDeviceAddr", true)
}

func (f *fakeDriver) streamCreate() (uintptr, error) {
	if err := f.call("streamCreate", true); err != nil {
		return 0, err
	}
	s := &fakeStream{ops: make(chan func(), 64), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		for op := range s.ops {
			op()
			s.pending.Add(-1)
		}
	}()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next++
	f.streams[f.next] = s
	return f.next, nil
}

func (f *fakeDriver) stream(s uintptr) *fakeStream {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.streams[s]
}

// queue adds an operation to a stream.
func (f *fakeDriver) queue(name string, s uintptr, op func()) error {
	if err := f.call(name, true); err != nil {
		return err
	}
	st := f.stream(s)
	if st == nil {
		return f.err(name, codeInvalidHandle)
	}
	st.pending.Add(1)
	st.ops <- op
	return nil
}

// hold stops a stream until the returned function is called.
func (f *fakeDriver) hold(s uintptr) (release func()) {
	gate := make(chan struct{})
	st := f.stream(s)
	st.pending.Add(1)
	st.ops <- func() { <-gate }
	return sync.OnceFunc(func() { close(gate) })
}

func (f *fakeDriver) streamDestroy(s uintptr) error {
	if err := f.call("streamDestroy", true); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	st := f.streams[s]
	if st == nil {
		return f.err("streamDestroy", codeInvalidHandle)
	}
	delete(f.streams, s)
	close(st.ops)
	return nil
}

func (f *fakeDriver) streamQuery(s uintptr) error {
	if err := f.call("streamQuery", true); err != nil {
		return err
	}
	switch st := f.stream(s); {
	case st == nil:
		return f.err("streamQuery", codeInvalidHandle)
	case st.pending.Load() > 0:
		return f.err("streamQuery", codeNotReady)
	}
	return nil
}

func (f *fakeDriver) synchronize() error {
	if err := f.call("synchronize", true); err != nil {
		return err
	}
	for busy := true; busy; clock.Sleep(minPause) {
		busy = false
		f.mu.Lock()
		for _, s := range f.streams {
			busy = busy || s.pending.Load() > 0
		}
		f.mu.Unlock()
	}
	return nil
}

func (f *fakeDriver) streamCapturing(s uintptr) (bool, error) {
	c := f.captured.Load()
	return c != nil && c == f.stream(s), f.call("streamCapturing", true)
}

func word(addr uintptr) *atomic.Uint32 { return (*atomic.Uint32)(pointer(addr)) }

func (f *fakeDriver) writeValue32(s, addr uintptr, v uint32) error {
	if f.noFlags {
		return f.err("writeValue32", codeNotSupported)
	}
	return f.queue("writeValue32", s, func() { word(addr).Store(v) })
}

func (f *fakeDriver) writeValues32(s uintptr, w wordWrites) error {
	if f.noBatches {
		return f.err(batchWrites, codeNotSupported)
	}
	return f.queue("writeValues32", s, func() {
		for i := range w.n {
			word(w.addrs[i]).Store(w.values[i])
		}
	})
}

func (f *fakeDriver) waitValue32(s, addr uintptr, v uint32) error {
	return f.queue("waitValue32", s, func() {
		f.waits.Add(1)
		defer f.waits.Add(-1)
		for int32(word(addr).Load()-v) < 0 {
			clock.Sleep(minPause)
		}
	})
}

func (f *fakeDriver) waitBits64(s, addr uintptr, v uint64) error {
	return f.queue("waitBits64", s, func() {
		f.waits.Add(1)
		defer f.waits.Add(-1)
		for (*atomic.Uint64)(pointer(addr)).Load()&v == 0 {
			clock.Sleep(minPause)
		}
	})
}

func (f *fakeDriver) waitValue64(s, addr uintptr, v uint64) error {
	return f.queue("waitValue64", s, func() {
		f.waits.Add(1)
		defer f.waits.Add(-1)
		for int64((*atomic.Uint64)(pointer(addr)).Load()-v) < 0 {
			clock.Sleep(minPause)
		}
	})
}

func (f *fakeDriver) copyBytes(name string, dst, src uintptr, n int, s uintptr) error {
	return f.queue(name, s, func() {
		copy(unsafe.Slice((*byte)(pointer(dst)), n), unsafe.Slice((*byte)(pointer(src)), n))
	})
}

func (f *fakeDriver) copyAsync(dst, src uintptr, n int, s uintptr) error {
	return f.copyBytes("copyAsync", dst, src, n, s)
}

func (f *fakeDriver) copyToDevice(dst uintptr, src unsafe.Pointer, n int, s uintptr) error {
	return f.copyBytes("copyToDevice", dst, uintptr(src), n, s)
}

func (f *fakeDriver) copyToHost(dst unsafe.Pointer, src uintptr, n int, s uintptr) error {
	return f.copyBytes("copyToHost", uintptr(dst), src, n, s)
}

func (f *fakeDriver) moduleLoad(ptx string) (uintptr, error) {
	if err := f.call("moduleLoad", true); err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.modules++
	return 1, nil
}

func (f *fakeDriver) moduleUnload(uintptr) error {
	if err := f.frees("moduleUnload"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.modules--
	return nil
}

var fakeFunctions = []string{"stepaf_write", "stepaf_wait", "stepaf_add", "stepaf_copy"}

func (f *fakeDriver) moduleFunction(_ uintptr, name string) (uintptr, error) {
	return uintptr(slices.Index(fakeFunctions, name) + 1), f.call("moduleFunction", true)
}

func counterAt(addr uintptr) *atomic.Int64 { return (*atomic.Int64)(pointer(addr)) }

func (f *fakeDriver) launch(fn, s, a, b uintptr) error {
	return f.queue("launch", s, func() {
		switch fakeFunctions[fn-1] {
		case "stepaf_write":
			counterAt(a).Store(counterAt(b).Load())
		case "stepaf_wait":
			f.waits.Add(1)
			defer f.waits.Add(-1)
			for want := counterAt(b).Load(); counterAt(a).Load() < want; {
				clock.Sleep(minPause)
			}
		case "stepaf_add":
			counterAt(a).Add(1)
		}
	})
}

func (f *fakeDriver) launchCopies(_, s uintptr, g grid, list kernelCopies) error {
	return f.queue("launch", s, func() {
		f.waits.Add(1)
		defer f.waits.Add(-1)
		for _, c := range list[:g.copies] {
			for counterAt(c.gate).Load() == 0 {
				clock.Sleep(minPause)
			}
			if uint64(counterAt(c.gate).Load())>>32 == 0 {
				copy(unsafe.Slice((*byte)(pointer(c.dst)), c.n), unsafe.Slice((*byte)(pointer(c.src)), c.n))
			}
		}
	})
}

func (f *fakeDriver) eventCreate() (uintptr, error) {
	if err := f.call("eventCreate", true); err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next++
	f.events[f.next] = &fakeEvent{}
	return f.next, nil
}

func (f *fakeDriver) eventDestroy(e uintptr) error {
	if err := f.call("eventDestroy", true); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.events[e] == nil {
		return f.err("eventDestroy", codeInvalidHandle)
	}
	delete(f.events, e)
	return nil
}

func (f *fakeDriver) eventRecord(e, s uintptr) error {
	mark := &atomic.Bool{}
	if err := f.queue("eventRecord", s, func() { mark.Store(true) }); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events[e].latest = mark
	return nil
}

func (f *fakeDriver) streamWait(s, e uintptr) error {
	m := f.mark(e)
	return f.queue("streamWait", s, func() {
		for m != nil && !m.Load() {
			clock.Sleep(minPause)
		}
	})
}

func (f *fakeDriver) capturePoint(s uintptr) (at [6]uintptr, err error) {
	if captured, _ := f.streamCapturing(s); captured {
		at = [6]uintptr{7, 1, 1}
	}
	return at, f.call("capturePoint", true)
}

func (f *fakeDriver) captureRewind(uintptr, [6]uintptr) error { return f.call("captureRewind", true) }

func (f *fakeDriver) mark(e uintptr) *atomic.Bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[e].latest
}

func (f *fakeDriver) eventQuery(e uintptr) error {
	if err := f.call("eventQuery", true); err != nil {
		return err
	}
	if m := f.mark(e); m != nil && !m.Load() {
		return f.err("eventQuery", codeNotReady)
	}
	return nil
}

func (f *fakeDriver) addressRange(p uintptr) (uintptr, int, error) {
	if err := f.call("addressRange", true); err != nil {
		return 0, 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for b, m := range f.mem {
		if p >= b && p < b+uintptr(len(m)) {
			return b, len(m), nil
		}
	}
	if n := f.opened[p]; n > 0 {
		return p, n, nil
	}
	if b, m, ok := f.seg.at(p); ok {
		return b, m.n, nil
	}
	return 0, 0, f.err("addressRange", codeInvalidValue)
}

// in is what the driver does between enter and leave, on one thread.
func (f *fakeDriver) in(ctx uintptr, do func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	was, err := f.enter(ctx)
	if err != nil {
		return err
	}
	return cmp.Or(do(), f.leave(was))
}

func (f *fakeDriver) idleIn(ctx, s uintptr) (idle bool, err error) {
	err = f.in(ctx, func() error {
		if captured, err := f.streamCapturing(s); captured || err != nil {
			return err
		}
		err := f.streamQuery(s)
		if idle = err == nil; notReady(err) {
			return nil
		}
		return err
	})
	return idle, err
}

func (f *fakeDriver) copyIn(ctx, dst, src uintptr, n int, s uintptr, w wordWrites) (captured bool, err error) {
	err = f.in(ctx, func() (err error) {
		if captured, err = f.streamCapturing(s); captured || err != nil {
			return err
		}
		if err = f.copyAsync(dst, src, n, s); err != nil {
			return err
		}
		if w.n == 1 {
			return f.writeValue32(s, w.addrs[0], w.values[0])
		}
		return f.writeValues32(s, w)
	})
	return captured, err
}

func (f *fakeDriver) nameIn(ctx, addr uintptr) (n named, err error) {
	err = f.in(ctx, func() (err error) {
		if n.base, n.n, err = f.addressRange(addr); err == nil {
			n.id, err = f.bufferID(n.base)
		}
		if err == nil {
			n.known = true
			n.handle, err = f.ipcExport(n.base)
		}
		return err
	})
	return n, err
}

func (f *fakeDriver) bufferID(p uintptr) (uint64, error) {
	return uint64(p) ^ 7, f.call("bufferID", true)
}

func (f *fakeDriver) ipcExport(b uintptr) (h [64]byte, err error) {
	binary.LittleEndian.PutUint64(h[:], uint64(b))
	if err := f.call("ipcExport", true); err != nil {
		return h, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, _, mapped := f.seg.at(b); mapped {
		return h, f.err("ipcExport", codeInvalidValue)
	}
	return h, nil
}

func (f *fakeDriver) ipcOpen(h [64]byte) (uintptr, error) {
	if err := f.call("ipcOpen", true); err != nil {
		return 0, err
	}
	p := uintptr(binary.LittleEndian.Uint64(h[:]))
	n := 0
	if f.exported != nil {
		f.exported.mu.Lock()
		n = len(f.exported.mem[p])
		f.exported.mu.Unlock()
	}
	if n == 0 {
		return 0, f.err("ipcOpen", codeInvalidValue)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opened[p] > 0 {
		f.misuses = append(f.misuses, "a handle is opened twice")
	}
	f.opened[p] = n
	return p, nil
}

func (f *fakeDriver) ipcClose(p uintptr) error {
	if err := f.frees("ipcClose"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opened[p] == 0 {
		return f.err("ipcClose", codeInvalidValue)
	}
	delete(f.opened, p)
	return nil
}

func (f *fakeDriver) dmabuf(p uintptr, n int) (int, error) {
	if p%4096 != 0 || n%4096 != 0 {
		return -1, f.err("dmabuf", codeInvalidValue)
	}
	f.buffer = n
	return 99, f.call("dmabuf", true)
}
