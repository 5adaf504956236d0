package rdma

import (
	"flag"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	vanrdma "github.com/stepaf/stepaf-go/van/rdma"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var pushPulls = flag.Int("push-pulls", 1500, "number of push_pulls in TestFlat")

// counted is a stack that counts the calls of all its devices.
type counted struct {
	verbs.Stack
	regions, bytes     atomic.Int64 // registered at present
	posts, polls, full atomic.Int64 // calls of Post and Poll, and calls of Poll that returned completions
	notes              atomic.Int64 // SENDs: the van's own messages, for example credits
	completions        atomic.Int64
	mu                 sync.Mutex
	devices            map[verbs.Device]*countedDevice
}

func (c *counted) NewChannel() (verbs.Channel, error) {
	ch, err := c.Stack.NewChannel()
	if err != nil {
		return nil, err
	}
	return &countedChannel{ch, c}, nil
}

type countedChannel struct {
	verbs.Channel
	c *counted
}

func (ch *countedChannel) NewID(cookie uint64) (verbs.ID, error) {
	id, err := ch.Channel.NewID(cookie)
	if err != nil {
		return nil, err
	}
	return &countedID{id, ch.c}, nil
}

func (ch *countedChannel) Next() (verbs.Event, error) {
	ev, err := ch.Channel.Next()
	if ev.New != nil {
		ev.New = &countedID{ev.New, ch.c}
	}
	return ev, err
}

type countedID struct {
	verbs.ID
	c *counted
}

func (id *countedID) Device() (verbs.Device, error) {
	d, err := id.ID.Device()
	if err != nil {
		return nil, err
	}
	id.c.mu.Lock()
	defer id.c.mu.Unlock()
	x := id.c.devices[d]
	if x == nil {
		x = &countedDevice{d, id.c}
		id.c.devices[d] = x
	}
	return x, nil
}

type countedDevice struct {
	verbs.Device
	c *counted
}

func (d *countedDevice) Register(p unsafe.Pointer, n int, a verbs.Access) (verbs.MR, error) {
	mr, err := d.Device.Register(p, n, a)
	if err != nil {
		return nil, err
	}
	d.c.regions.Add(1)
	d.c.bytes.Add(int64(n))
	return &countedMR{mr, d.c, n}, nil
}

func (d *countedDevice) Post(wrs []verbs.SendWR) (int, error) {
	d.c.posts.Add(1)
	for i := range wrs {
		if wrs[i].Op == verbs.OpSendImm {
			d.c.notes.Add(1)
		}
	}
	return d.Device.Post(wrs)
}

func (d *countedDevice) Poll(out []verbs.Completion, spin, block time.Duration) (int, error) {
	d.c.polls.Add(1)
	n, err := d.Device.Poll(out, spin, block)
	if n > 0 {
		d.c.full.Add(1)
	}
	d.c.completions.Add(int64(n))
	return n, err
}

type countedMR struct {
	verbs.MR
	c *counted
	n int
}

func (m *countedMR) Deregister() error {
	m.c.regions.Add(-1)
	m.c.bytes.Add(-int64(m.n))
	return m.MR.Deregister()
}

// calls returns the calls into C that the devices have counted themselves.
func (c *counted) calls(t testing.TB) (posts, polls int64) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for d := range c.devices {
		x, ok := d.(verbs.CallCounter)
		if !ok {
			t.Fatalf("%T does not count its calls", d)
		}
		p, q := x.Calls()
		posts, polls = posts+int64(p), polls+int64(q)
	}
	return posts, polls
}

// alone starts a cluster in this process, whose devices count.
func alone(t testing.TB) (*cluster, *counted) {
	t.Helper()
	addresses(t)
	stack, err := verbs.Load(verbs.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := &counted{Stack: stack, devices: map[verbs.Device]*countedDevice{}}
	return start(t, options{place: func(string, int) place { return place{} }, wrap: func(string, int, van.Factory) van.Factory {
		return func(o van.Options) (van.Van, error) { return vanrdma.NewOn(c, o), nil }
	}}), c
}

// tensors makes n tensors of size bytes.
func tensors(t testing.TB, n, size int) (all []af.Tensor) {
	t.Helper()
	for range n {
		x, err := af.FromSlice(make([]byte, size))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, x)
	}
	return all
}

// pushPull makes a push_pull without allocations of its own.
func pushPull(t testing.TB, w *af.Worker, push []af.KeyTensor, pull [][]af.KeyTensor) {
	h, err := w.PushPull(push, pull)
	if err == nil {
		err = h.Wait(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// serveOne answers each batch with one tensor.
func serveOne(t testing.TB, c *cluster, answer func() af.Tensor) {
	t.Helper()
	out := make([]af.KeyTensor, 1)
	if err := nodetest.Serve(c.Servers[0], func(b af.Batch) {
		out[0] = af.KeyTensor{Key: b.Pulls()[0].Key, Val: answer()}
		if err := b.Respond(out, af.ByKey); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// holdings is the memory of the process in bytes: heap and stacks are Go's; resident also includes C's memory and pages of the program.
type holdings struct {
	resident, files, routines int
	regions, bytes            int64
	heap, stacks              uint64
}

func (c *counted) look(t testing.TB) holdings {
	t.Helper()
	nodetest.Settle()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	return holdings{
		nodetest.Resident(t, os.Getpid()), len(files), runtime.NumGoroutine(),
		c.regions.Load(), c.bytes.Load(), mem.HeapInuse, mem.StackInuse,
	}
}

// TestFlat: no resource grows over many push_pulls with changing tensors.
func TestFlat(t *testing.T) {
	notShort(t)
	c, n := alone(t)
	const pool, size = 64, 8000
	from, to, back := tensors(t, pool, size), tensors(t, pool, size), tensors(t, pool, size)
	i := 0
	serveOne(t, c, func() af.Tensor { return back[i*7%pool] })
	w := c.clients()[0].w
	push, pull := make([]af.KeyTensor, 1), [][]af.KeyTensor{make([]af.KeyTensor, 1)}
	once := func() {
		push[0] = af.KeyTensor{Key: uint64(i % 5), Val: from[i%pool]}
		pull[0][0] = af.KeyTensor{Key: uint64(i % 3), Val: to[i*5%pool]}
		pushPull(t, w, push, pull)
		i++
	}
	for range 1000 {
		once()
	}
	before := n.look(t)
	t.Logf("before %+v", before)
	noise := 3 << 20
	if vantest.Race {
		noise = 12 << 20
	}
	// The memory of the program and of the runtime grows occasionally. Memory that leaks with each push_pull would grow each time.
	after, grown := before, []int{}
	for range 3 {
		last := after
		for range *pushPulls {
			once()
		}
		after = n.look(t)
		t.Logf("after %d more push_pulls %+v", *pushPulls, after)
		grown = append(grown, after.resident-last.resident)
		if after.resident-last.resident <= noise {
			break
		}
	}
	if grown[len(grown)-1] > noise {
		t.Errorf("resident memory has grown each time, by %d bytes", grown)
	}
	// Idle regions may have been evicted, and not all may have been in use at first.
	if after.regions > before.regions || after.bytes > before.bytes {
		t.Errorf("%d regions of %d bytes were %d of %d before", after.regions, after.bytes, before.regions, before.bytes)
	}
	if after.files > before.files || after.routines > before.routines+2 {
		t.Errorf("%d files and %d goroutines were %d and %d before", after.files, after.routines, before.files, before.routines)
	}
	c.end()
	if r, b := n.regions.Load(), n.bytes.Load(); r != 0 || b != 0 {
		t.Errorf("at the end %d regions of %d bytes are still registered", r, b)
	}
}

// TestCalls: a message costs at most one call into C to send, and a batch of completions one call to receive.
func TestCalls(t *testing.T) {
	for _, size := range []int{100, 50000} {
		c, n := alone(t)
		back := tensors(t, 1, size)[0]
		serveOne(t, c, func() af.Tensor { return back })
		w := c.clients()[0].w
		x := tensors(t, 6, size)
		push := []af.KeyTensor{{Key: 1, Val: x[0]}, {Key: 2, Val: x[1]}, {Key: 3, Val: x[2]}, {Key: 4, Val: x[3]}}
		pull := [][]af.KeyTensor{{{Key: 1, Val: x[4]}}}
		sent := func() (sum int64) {
			for _, node := range c.Nodes() {
				sum += int64(testcluster.Stats(node).SentMessages)
			}
			return sum
		}
		for range 50 {
			pushPull(t, w, push, pull)
		}
		// Loops poll meanwhile. A count that must be the smaller one is read later at first, and earlier at the end.
		asked, got, full, completions := n.posts.Load(), n.polls.Load(), n.full.Load(), n.completions.Load()
		messages, notes := sent(), n.notes.Load()
		posts, polls := n.calls(t)
		const rounds, least, parts = 200, 200 * (1 + 1), 200 * (4 + 1 + 1) // messages of the program; messages of ps-lite that stand for them
		for range rounds {
			pushPull(t, w, push, pull)
		}
		posts2, polls2 := n.calls(t)
		posts, polls = posts2-posts, polls2-polls
		// A message is counted after it was posted: its answer may arrive before.
		vantest.Eventually(t, 10*time.Second, "all messages to be counted", func() bool { return sent()-messages >= least })
		messages, notes = sent()-messages, n.notes.Load()-notes
		asked, got, full, completions = n.posts.Load()-asked, n.polls.Load()-got, n.full.Load()-full, n.completions.Load()-completions
		t.Logf("%d bytes: %d messages, %d notes, %d calls to post; %d completions in %d batches, %d calls to poll", size, messages, notes, posts, completions, full, polls)
		if posts > parts+parts/10+notes { // a tenth for requests and returns of slots
			t.Errorf("%d bytes: %d calls to post %d messages and %d notes", size, posts, parts, notes)
		}
		if posts > asked {
			t.Errorf("%d bytes: %d calls into C for %d of Post", size, posts, asked)
		}
		if polls > got { // calls that return nothing are waits
			t.Errorf("%d bytes: %d calls into C for %d of Poll", size, polls, got)
		}
		if full > completions || completions == 0 {
			t.Errorf("%d bytes: %d batches of %d completions", size, full, completions)
		}
		c.end()
	}
}

// TestAllocations: a push_pull in steady state allocates nothing, on worker and server together.
func TestAllocations(t *testing.T) {
	notShort(t)
	if vantest.Race {
		t.Skip("the race detector allocates")
	}
	for _, size := range []int{100, 20000} {
		c, _ := alone(t)
		back := tensors(t, 1, size)[0]
		serveOne(t, c, func() af.Tensor { return back })
		w := c.clients()[0].w
		x := tensors(t, 2, size)
		push, pull := []af.KeyTensor{{Key: 1, Val: x[0]}}, [][]af.KeyTensor{{{Key: 1, Val: x[1]}}}
		for range 500 {
			pushPull(t, w, push, pull)
		}
		// testing.AllocsPerRun leaves one processor, on which pollers and waiters take turns. A slow machine needs another goroutine or thread for many requests, since
		// the engine considers a receiver blocked. It does not need one for all of few requests.
		const windows, rounds = 100, 5
		least := uint64(1 << 62)
		for range windows {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range rounds {
				pushPull(t, w, push, pull)
			}
			runtime.ReadMemStats(&after)
			least = min(least, after.Mallocs-before.Mallocs)
		}
		t.Logf("%d bytes: %d allocations in %d push_pulls", size, least, rounds)
		if least >= rounds {
			t.Errorf("%d bytes: %d allocations in %d push_pulls, want none", size, least, rounds)
		}
		c.end()
	}
}
