package streams

// Messages of lying and confused peers have no effect.

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// both are the ends of a worker and a server.
func both(t *testing.T) (worker, server *Ends, device *simgpu.Device) {
	t.Helper()
	device = simgpu.New(0)
	t.Cleanup(func() { // after the nodes are closed
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1, Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": device}[role]
	}})
	worker, err := New(c.Workers[0])
	if err == nil {
		server, err = New(c.Servers[0])
	}
	if err != nil {
		t.Fatal(err)
	}
	return worker, server, device
}

// TestLiars: a message that makes no sense is a logged error, and changes nothing.
func TestLiars(t *testing.T) {
	worker, server, _ := both(t)
	w, s := worker.node.ID(), server.node.ID()
	say := func(v verb, id uint64) *note { n := example(v); n.id = id; return &n }
	for i := range maxOffers {
		if err := server.take(w, say(verbOffer, uint64(i))); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		what string
		e    *Ends
		from int
		n    *note
		want error
	}{
		{"nobody's", server, van.Empty, say(verbOffer, 99), van.ErrMalformed},
		{"a server's to a server", server, s, say(verbOffer, 99), van.ErrMalformed},
		{"the scheduler's", server, van.SchedulerID, say(verbOver, 99), van.ErrMalformed},
		{"an offer again", server, w, say(verbOffer, 1), van.ErrMalformed},
		{"one more offer", server, w, say(verbOffer, 99), van.ErrQueueFull},
		{"an answer to a server", server, w, say(verbAccept, 99), van.ErrMalformed},
		{"an offer to a worker", worker, s, say(verbOffer, 99), van.ErrMalformed},
		{"an answer to what is over", worker, s, say(verbAccept, 99), nil},
		{"the end of what is over", worker, s, say(verbOver, 99), nil},
	} {
		if err := c.e.take(c.from, c.n); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
	}
	offers := func() int {
		server.mu.Lock()
		defer server.mu.Unlock()
		return len(server.offers)
	}
	if n := offers(); n != maxOffers {
		t.Errorf("%d offers, want %d", n, maxOffers)
	}
	if err := server.take(w, say(verbOver, 3)); err != nil || offers() != maxOffers-1 {
		t.Errorf("an offer that was withdrawn: %v, %d offers", err, offers())
	}
}

// TestSameKeys: of several offers with the keys that a server has prepared, the first is taken.
func TestSameKeys(t *testing.T) {
	worker, server, d := both(t)
	w := worker.node.ID()
	tensor, err := af.NewTensor(d.Mem(make([]byte, 8)), af.Uint8, 8)
	if err != nil {
		t.Fatal(err)
	}
	x := &Exchange{ends: server, done: make(chan struct{}), ending: gpusync.NewEnding(1), peers: []*peer{{id: w, in: []af.KeyTensor{{Key: 1, Val: tensor}}}}}
	const first = ^uint64(0) - 2 // numbers go on from 0
	for i := range uint64(6) {
		n := example(verbOffer)
		n.id, n.out, n.in = first+(i*5)%6, parts(x.peers[0].in), nil
		if err := server.take(w, &n); err != nil {
			t.Fatal(err)
		}
	}
	for i := range uint64(6) {
		server.mu.Lock()
		found, err := x.match()
		server.mu.Unlock()
		if !found || err != nil || x.names[0].id != first+i {
			t.Fatalf("match %d: %t, %v, offer %d of them", i, found, err, x.names[0].id-first)
		}
	}
}

// TestOfferOfALostWorker: the offer of a lost worker is removed. A server that then prepares its end is matched
// with the replacement process.
func TestOfferOfALostWorker(t *testing.T) {
	worker, server, d := both(t)
	w, other := worker.node.ID(), van.WorkerID(1)
	tensor, err := af.NewTensor(d.Mem(make([]byte, 8)), af.Uint8, 8)
	if err != nil {
		t.Fatal(err)
	}
	x := &Exchange{ends: server, done: make(chan struct{}), ending: gpusync.NewEnding(1), peers: []*peer{{id: w, in: []af.KeyTensor{{Key: 1, Val: tensor}}}}}
	offer := func(from int, id uint64) {
		n := example(verbOffer)
		n.id, n.out, n.in = id, parts(x.peers[0].in), nil
		if err := server.take(from, &n); err != nil {
			t.Fatal(err)
		}
	}
	offer(w, 1)
	offer(other, 1)
	server.peerChanged(w, false, van.ErrPeerLost)
	offer(w, 2)
	server.mu.Lock()
	defer server.mu.Unlock()
	if n := len(server.offers); n != 2 {
		t.Errorf("%d offers, want one of each worker", n)
	}
	if found, err := x.match(); !found || err != nil || x.names[0].id != 2 {
		t.Errorf("match: %t, %v, %v; want offer 2", found, err, x.names)
	}
}

// TestOfferToTheNextServer: if a server is lost before it has answered a worker's offer, the worker offers the
// same to the replacement process.
func TestOfferToTheNextServer(t *testing.T) {
	worker, server, d := both(t)
	x, err := af.NewTensor(d.Mem(make([]byte, 8)), af.Uint8, 8)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := worker.Prepare(ctx, nil, []af.KeyTensor{{Key: 1, Val: x}}, nil)
		ended <- err
	}()
	offered := func() bool {
		server.mu.Lock()
		defer server.mu.Unlock()
		return len(server.offers) == 1
	}
	vantest.Eventually(t, 20*time.Second, "the offer has come", offered)
	server.mu.Lock()
	clear(server.offers) // as a new process has none
	server.mu.Unlock()
	worker.peerChanged(server.node.ID(), false, van.ErrPeerLost)
	worker.peerChanged(server.node.ID(), true, nil)
	vantest.Eventually(t, 20*time.Second, "it has come again", offered)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

// TestWrongMemory: an answer whose words are not where it says, or with other tensors, ends the worker's Prepare
// with an error, and maps nothing else; so does a second answer not.
func TestWrongMemory(t *testing.T) {
	for what, c := range map[string]struct {
		change func(n *note)
		want   string
	}{
		"another token":         {func(n *note) { n.flags.token[0]++ }, "is not the peer's"},
		"a handle of nothing":   {func(n *note) { n.flags.export.Handle = [64]byte{63: 1} }, "a stale handle"},
		"another key":           {func(n *note) { n.out[0].key++ }, "has tensors with keys [3], want [2]"},
		"another length":        {func(n *note) { n.out[0].len-- }, "the tensor with key 2 has 7 bytes"},
		"too few tensors":       {func(n *note) { n.out = nil }, "has tensors with keys []"},
		"a tensor of no memory": {func(n *note) { n.out[0].export.Handle = [64]byte{63: 1} }, "a stale handle"},
	} {
		t.Run(what, func(t *testing.T) {
			worker, server, d := both(t)
			list := func(key uint64) []af.KeyTensor {
				x, err := af.NewTensor(d.Mem(make([]byte, 8)), af.Uint8, 8)
				if err != nil {
					t.Fatal(err)
				}
				return []af.KeyTensor{{Key: key, Val: x}}
			}
			failed := make(chan error, 1)
			go func() {
				_, err := worker.Prepare(t.Context(), nil, list(1), list(2))
				failed <- err
			}()
			var id uint64
			for found := false; !found; {
				server.mu.Lock()
				changed := server.changed
				for k := range server.offers {
					id, found = k.id, true
				}
				server.mu.Unlock()
				if !found {
					<-changed
				}
			}
			page, err := d.Alloc(2 * slotStride)
			if err != nil {
				t.Fatal(err)
			}
			clear(simgpu.Raw(page))
			simgpu.Raw(page)[0] = 42
			answer := note{verb: verbAccept, id: id, flags: flagsName{at: slotHead, token: gpusync.Token{42}}, out: parts(list(2))}
			if answer.flags.export, err = d.Export(page); err != nil {
				t.Fatal(err)
			}
			out := list(2)
			m := out[0].Val.Mem()
			if answer.out[0].export, err = d.Export(m); err != nil {
				t.Fatal(err)
			}
			c.change(&answer)
			if err := server.send(worker.node.ID(), &answer); err != nil {
				t.Fatal(err)
			}
			if err := <-failed; err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "server 0") {
				t.Errorf("%v, want it to say %q, of server 0", err, c.want)
			}
		})
	}
}

// TestOfferBehindItsEnd: if an offer arrives after the end of its exchange, the server that accepts it is notified
// of that end, and its streams do not wait forever.
func TestOfferBehindItsEnd(t *testing.T) {
	devices := map[string]*simgpu.Device{"worker": simgpu.New(0), "server": simgpu.New(1)}
	t.Cleanup(func() {
		for _, d := range devices {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1, Backend: func(role string, _ int) backend.Backend {
		if d := devices[role]; d != nil {
			return d
		}
		return nil
	}})
	worker, err := New(c.Workers[0])
	if err != nil {
		t.Fatal(err)
	}
	server, err := New(c.Servers[0])
	if err != nil {
		t.Fatal(err)
	}
	list := func(role string) []af.KeyTensor {
		x, err := af.NewTensor(devices[role].Mem(make([]byte, 8)), af.Uint8, 8)
		if err != nil {
			t.Fatal(err)
		}
		return []af.KeyTensor{{Key: 1, Val: x}}
	}
	x := &Exchange{ends: worker, first: true, ending: gpusync.NewEnding(1), peers: []*peer{{id: server.node.ID(), out: list("worker")}}}
	own, err := x.make()
	if err != nil {
		t.Fatal(err)
	}
	own[0].verb, own[0].id = verbOffer, 7
	if err := worker.send(server.node.ID(), own[0]); err != nil {
		t.Fatal(err)
	}
	y, err := server.Prepare(t.Context(), nil, list("server"), nil)
	if err != nil {
		if !errors.Is(err, van.ErrClosed) {
			t.Errorf("%v, want %v", err, van.ErrClosed)
		}
		return // the notification arrived before the exchange was ready
	}
	if err := y.QueueReceive(3); err != nil && !errors.Is(err, ErrOver) {
		t.Fatal(err)
	}
	devices["server"].Settle(t, 3)
	if err := y.Check(); !errors.Is(err, van.ErrClosed) {
		t.Errorf("%v, want %v", err, van.ErrClosed)
	}
}

// TestGivenUpOfferIsTakenBack: Prepare ends while its worker still sends offers. An offer that leaves after the notice of the end is
// taken back, so that no later Prepare of the server takes it.
func TestGivenUpOfferIsTakenBack(t *testing.T) {
	device := simgpu.New(0)
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1, Backend: func(role string, _ int) backend.Backend {
		if role == "worker" {
			return device
		}
		return nil
	}})
	worker, err := New(c.Workers[0])
	if err != nil {
		t.Fatal(err)
	}
	server, err := New(c.Servers[0])
	if err != nil {
		t.Fatal(err)
	}
	offers := func(n int) {
		t.Helper()
		vantest.Eventually(t, 20*time.Second, "offers at the server", func() bool {
			server.mu.Lock()
			defer server.mu.Unlock()
			return len(server.offers) == n
		})
	}
	v, err := af.NewTensor(device.Mem(make([]byte, 8)), af.Uint8, 8)
	if err != nil {
		t.Fatal(err)
	}
	x, err := newExchange(worker, nil, []af.KeyTensor{{Key: 1, Val: v}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	own, err := x.make()
	if err != nil {
		t.Fatal(err)
	}
	worker.mu.Lock()
	x.names = []name{{worker.node.ID(), worker.last.Add(1)}}
	worker.all[x.names[0]] = x
	worker.mu.Unlock()
	x.fail(van.ErrTimeout)
	<-x.done // the server has been sent the notice
	own[0].verb, own[0].id = verbOffer, x.names[0].id
	if err := worker.send(server.node.ID(), own[0]); err != nil {
		t.Fatal(err)
	}
	offers(1)
	x.cancel(van.ErrTimeout)
	offers(0)
}
