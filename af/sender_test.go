package af

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// counting owns the messages of a story.
type counting struct{ n int }

func (c *counting) Free(*van.Message) { c.n++ }

// TestBatchStories: the batches that a server assembles from the messages of two workers, and its memory
// meanwhile. The messages interleave, overtake each other, are lost, repeated, invalid or canceled. The accounts
// match the retained messages, and in the end every message has been released.
func TestBatchStories(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Set: func(c *postoffice.Config) { c.RecvBudgetPeer, c.RecvBudget = 1<<20, 2<<20 }})
	room := make([]byte, 4<<20)
	golden.Check(t, "batches", 30, func(rng *rand.Rand, w io.Writer) {
		s, err := NewServer(c.Servers[0], ServerOptions{AppID: 3})
		if err != nil {
			t.Fatal(err)
		}
		s.reorders = rng.IntN(3) > 0
		var later []Batch
		err = s.Handle(func(b Batch) {
			fmt.Fprint(w, "batch of ", b.Worker(), " ", b.w.first, " ", b.w.last, " ", b.Single(), b.Answered(), b.Wanted(), b.w.bytes, ":")
			for _, p := range b.Pushes() {
				fmt.Fprint(w, " ", p.Key, p.Val.Dims(), p.Val.Dtype())
			}
			for _, p := range b.Pulls() {
				fmt.Fprint(w, " ", p.Key, p.Len, p.Shape)
			}
			fmt.Fprintln(w)
			if rng.IntN(3) == 0 {
				later = append(later, b.Retain())
			}
			b.Release()
		})
		if err != nil {
			t.Fatal(err)
		}
		owner, made := &counting{}, 0
		var waits []*van.Message
		ts := [2]int32{}
		message := func(worker int, head van.BatchFlag) *van.Message {
			m := &van.Message{}
			m.Reset()
			m.Sender, m.ProcessEpoch, m.Request, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.WorkerID(worker), 1, true, head, ts[worker], 3, 0
			ts[worker]++
			n := int64(1 + rng.IntN(100_000))
			m.Push, m.IsTensor, m.Dtype, m.Dim = rng.IntN(3) > 0, true, int32(Float32), 1
			m.Shape[0], m.ValLen = n, int32(4*n)
			m.Frames, m.Keys = 2, backend.Bytes(binary.LittleEndian.AppendUint64(nil, uint64(rng.IntN(5))))
			if m.Push {
				m.Vals = backend.Bytes(room[:4*n])
			}
			switch rng.IntN(40) { // nonsense
			case 0:
				m.ValLen++
				m.Vals = backend.Mem{}
			case 1:
				m.Frames = 0
			case 2:
				m.Head = 4
			case 3:
				m.Keys = backend.Bytes(make([]byte, 7))
			case 4:
				m.ProcessEpoch = 2
			case 5:
				m.SimpleApp = true
			case 6:
				m.Dtype = -1
			}
			m.Adopt(owner, nil)
			made++
			return m
		}
		for range 120 {
			worker := rng.IntN(2)
			switch rng.IntN(12) {
			case 0, 1, 2: // another batch
				switch n := 1 + rng.IntN(4); n {
				case 1:
					waits = append(waits, message(worker, van.Single))
				default:
					waits = append(waits, message(worker, van.BatchStart))
					for range n - 2 {
						waits = append(waits, message(worker, van.BatchMiddle))
					}
					waits = append(waits, message(worker, van.BatchEnd))
				}
			case 3: // one is lost
				if len(waits) > 0 && rng.IntN(3) == 0 {
					waits[0].Release()
					waits = waits[1:]
				}
			case 4:
				if rng.IntN(4) == 0 {
					fmt.Fprintln(w, "dropped", s.senders[worker].drop(func(uint32, int32, int32) bool { return true }))
				}
			case 5:
				s.cancel(cluster.Canceled{Sender: van.WorkerID(worker), Customer: int32(rng.IntN(8) / 7), First: max(ts[worker]-int32(rng.IntN(8)), 0), Count: int32(rng.IntN(4))})
			case 6:
				if len(later) > 0 {
					later[0].Release()
					later = later[1:]
				}
			default:
				for range rng.IntN(6) {
					if len(waits) == 0 {
						break
					}
					i := 0
					if rng.IntN(4) == 0 {
						i = rng.IntN(min(len(waits), 4))
					}
					m := waits[i]
					waits = append(waits[:i], waits[i+1:]...)
					s.receive(m)
					if rng.IntN(20) == 0 {
						s.receive(m) // twice
					}
					m.Release()
				}
			}
			for _, x := range s.senders {
				x.mu.Lock()
				open, held := 0, 0
				for _, b := range x.open {
					open += b.bytes
				}
				for _, m := range x.pending {
					held += m.PayloadLen()
				}
				if x.openBytes != open || x.pendingBytes != held || int(x.pendingCount.Load()) != len(x.pending) {
					t.Errorf("%d bytes of open batches are counted, want %d; %d of held messages, want %d; %d messages, want %d",
						x.openBytes, open, x.pendingBytes, held, x.pendingCount.Load(), len(x.pending))
				}
				fmt.Fprint(w, len(x.open), " ", open, " ", len(x.pending), " ", held, "; ")
				x.mu.Unlock()
			}
			fmt.Fprintln(w, owner.n)
		}
		for _, m := range waits {
			m.Release()
		}
		for _, b := range later {
			b.Release()
			b.Release() // no effect: all holds are released
		}
		s.Close()
		if owner.n != made {
			t.Errorf("%d of %d messages were given back", owner.n, made)
		}
		for _, x := range s.senders {
			for _, b := range x.free {
				if b.refs.Load() != 0 || len(b.answers) > 0 {
					t.Errorf("a batch that is to be used again has %d holds and %d answers", b.refs.Load(), len(b.answers))
				}
			}
		}
	})
}

// TestLossOfTheOneBefore: a server may be notified of a worker's loss after the replacement process has begun a
// batch. The new batch goes on; the batch of the lost process is canceled.
func TestLossOfTheOneBefore(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s, err := NewServer(c.Servers[0], ServerOptions{AppID: 3})
	if err != nil {
		t.Fatal(err)
	}
	var served []int32
	if err := s.Handle(func(b Batch) {
		served = append(served, b.w.first)
		b.Release()
	}); err != nil {
		t.Fatal(err)
	}
	const epoch = 1 // of the process that the server knows
	push := func(epoch uint32, ts int32, head van.BatchFlag) {
		m := &van.Message{}
		m.Reset()
		m.Sender, m.ProcessEpoch, m.Request, m.Push, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.WorkerID(0), epoch, true, true, head, ts, 3, 0
		m.IsTensor, m.Dtype, m.Dim, m.Shape[0], m.ValLen = true, int32(Uint8), 1, 1, 1
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, 1))
		s.receive(m)
	}
	push(epoch-1, 70, van.BatchStart)
	push(epoch, 10, van.BatchStart)
	s.dropSender(van.WorkerID(0))
	push(epoch-1, 71, van.BatchEnd)
	push(epoch, 11, van.BatchEnd)
	if len(served) != 1 || served[0] != 10 {
		t.Errorf("batches %d were handed to the application, want that of the new process, 10", served)
	}
	s.Close()
}

// TestWrongPullAnswers: an answer that does not match its request is refused, and nothing is written. An answer
// already placed by the transport is not copied.
func TestWrongPullAnswers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	w, err := NewWorker(c.Workers[0], WorkerOptions{AppID: 3})
	if err != nil {
		t.Fatal(err)
	}
	const p, q = 1, 2 // for each of two servers: a push, and two pulls
	var room [2 * q][]byte
	b := &batch{c: &w.calls, p: p, q: q}
	for i := range room {
		room[i] = make([]byte, 8)
		x, err := FromBytes(room[i], 0, 8)
		if err != nil {
			t.Fatal(err)
		}
		b.pulls = append(b.pulls, KeyTensor{Key: uint64(10 + i), Val: x})
	}
	answer := func(key uint64, value string, change func(m *van.Message)) *van.Message {
		m := &van.Message{}
		m.Reset()
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(binary.LittleEndian.AppendUint64(nil, key)), backend.Bytes([]byte(value))
		if change != nil {
			change(m)
		}
		return m
	}
	for i, wrong := range []struct {
		ts  int
		msg *van.Message
		err error
	}{
		{0, answer(12, "answer 2", nil), van.ErrMalformed}, // the push's
		{1, answer(12, "answer 2", func(m *van.Message) { m.Push = true }), van.ErrMalformed},
		{1, answer(13, "answer 3", nil), van.ErrMalformed},
		{1, answer(10, "answer 0", nil), van.ErrMalformed},
		{2, answer(12, "answer 2", nil), van.ErrMalformed},
		{1, answer(12, "answer 2", func(m *van.Message) { m.Frames = 1 }), van.ErrMalformed},
		{1, answer(12, "answer 2", func(m *van.Message) { m.Keys = backend.Bytes(make([]byte, 7)) }), van.ErrMalformed},
		{1, answer(12, "answer 2", func(m *van.Message) { m.Keys = backend.Bytes(make([]byte, 16)) }), van.ErrMalformed},
		{1, answer(12, "answer", nil), van.ErrInvalid},
		{1, answer(12, "answer 22", nil), van.ErrInvalid},
		{1, answer(12, "", nil), van.ErrInvalid},
		{1, answer(12, "answer", func(m *van.Message) { m.Placed = true }), van.ErrInvalid},
	} {
		if err := b.Answer(wrong.ts, 1, wrong.msg); !errors.Is(err, wrong.err) {
			t.Errorf("answer %d: %v, want %v", i, err, wrong.err)
		}
	}
	if err := b.Answer(0, 1, answer(0, "", func(m *van.Message) { m.Push, m.Frames = true, 0 })); err != nil {
		t.Errorf("the acknowledgement of the push: %v", err)
	}
	if err := b.Answer(1, 1, answer(12, "answer 2", func(m *van.Message) { m.Placed = true })); err != nil {
		t.Errorf("an answer that is there already: %v", err)
	}
	for i := range room {
		if string(room[i]) != string(make([]byte, 8)) {
			t.Errorf("%q was written to pull %d", room[i], i)
		}
	}
	for from := range 2 {
		for k := range q {
			i := from*q + k
			if err := b.Answer(p+k, from, answer(uint64(10+i), fmt.Sprintf("answer %d", i), nil)); err != nil || string(room[i]) != fmt.Sprintf("answer %d", i) {
				t.Errorf("pull %d got %q, %v", i, room[i], err)
			}
		}
	}
}

// TestBatchIsBounded: a batch has as many tensors as fit, of pushes and pulls together.
func TestBatchIsBounded(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s, err := NewServer(c.Servers[0], ServerOptions{AppID: 3})
	if err != nil {
		t.Fatal(err)
	}
	pull := &van.Part{Len: 1, Dim: 1, Dtype: int32(Uint8)}
	pull.Shape[0] = 1
	b := &batchState{s: s, pushes: make([]KeyTensor, van.MaxParts-2)}
	for i := range 4 {
		if err := b.add(pull, &van.Message{}); (err == nil) != (i < 2) || err != nil && !errors.Is(err, van.ErrMalformed) {
			t.Errorf("tensor %d: %v", van.MaxParts-2+i, err)
		}
	}
	if len(b.pulls) != 2 {
		t.Errorf("%d pulls, want 2", len(b.pulls))
	}
	pull.Len = 2
	if err := (&batchState{s: s}).add(pull, &van.Message{}); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("a pull of another size than its shape: %v", err)
	}
}

// TestRefusedBatchIsReleased: a batch that is refused for its last tensor gives its message back.
func TestRefusedBatchIsReleased(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.RecvBudgetPeer, c.RecvBudget = 1<<20, 1<<20 }})
	s, err := NewServer(c.Servers[0], ServerOptions{AppID: 3})
	if err == nil {
		err = s.Handle(func(b Batch) { b.Release() })
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(last *van.Part){
		"another size": func(last *van.Part) { last.Shape[0]++ },
		"dropped":      func(last *van.Part) { last.Vals = backend.Mem{} },
		"too large": func(last *van.Part) {
			last.Len = 1 << 20
			last.Shape[0] = 1 << 20
			last.Vals = backend.Bytes(make([]byte, 1<<20))
		},
		"accepted": func(*van.Part) {},
	} {
		owner, m := &counting{}, &van.Message{}
		m.Reset()
		m.Sender, m.ProcessEpoch, m.Request, m.Push, m.Timestamp, m.AppID, m.CustomerID = van.WorkerID(0), 1, true, true, 5, 3, 0
		for i := range 3 {
			p := van.Part{Key: uint64(i), Push: true, Len: 8, Dtype: int32(Uint8), Dim: 1, Vals: backend.Bytes(make([]byte, 8))}
			p.Shape[0] = 8
			m.Parts = append(m.Parts, p)
		}
		change(&m.Parts[2])
		m.WriteDirectory()
		m.Adopt(owner, nil)
		if err := s.senders[0].acceptBatch(m); (err == nil) != (name == "accepted") {
			t.Errorf("%s: %v", name, err)
		}
		if m.Release(); owner.n != 1 {
			t.Errorf("%s: the message is given back %d times, want once", name, owner.n)
		}
	}
}

// TestSenderLimits: an open batch may have STEPAF_RECV_BUDGET bytes and not a byte more. Of messages without an
// open batch the latest 1024 are held, and refused ones are counted. Only the worker itself can cancel its batches.
func TestSenderLimits(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Set: func(c *postoffice.Config) { c.RecvBudgetPeer, c.RecvBudget = 1<<20, 2<<20 }})
	s, err := NewServer(c.Servers[0], ServerOptions{AppID: 3})
	if err == nil {
		err = s.Handle(func(b Batch) { t.Error("a batch is complete") })
	}
	if err != nil {
		t.Fatal(err)
	}
	s.reorders = true
	x := s.senders[0]
	owner, made := &counting{}, 0
	accept := func(ts int32, head van.BatchFlag, size int) error {
		m := &van.Message{}
		m.Reset()
		m.Sender, m.ProcessEpoch, m.Request, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.WorkerID(0), 1, true, head, ts, 3, 0
		m.IsTensor, m.Dtype, m.Dim, m.Shape[0], m.ValLen = true, int32(Uint8), 1, int64(size), int32(size)
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes(make([]byte, size))
		m.Push = size > 0
		m.Adopt(owner, nil)
		made++
		defer m.Release()
		return x.accept(m)
	}
	const most = 2<<20 - 2*8 // and two keys
	for more := range 2 {
		begun := int32(100 * more)
		if err := accept(begun, van.BatchStart, 1000); err != nil {
			t.Fatal(err)
		}
		if err := accept(begun+1, van.BatchMiddle, most-1000+more); (err == nil) != (more == 0) || err != nil && !errors.Is(err, van.ErrInvalid) {
			t.Errorf("a batch of %d bytes more than the limit: %v", more, err)
		}
		if more == 0 {
			s.dropSenders()
		}
	}
	if len(x.open) != 0 {
		t.Errorf("%d batches are open, want none", len(x.open))
	}

	if err := accept(1000, van.BatchStart, 1); err != nil {
		t.Fatal(err)
	}
	for _, other := range []int{van.ServerID(0), van.SchedulerID, van.WorkerID(1)} {
		s.dropSender(other)
		s.cancel(cluster.Canceled{Sender: other, First: 1000, Count: 1})
		if len(x.open) != 1 {
			t.Fatalf("node %d has given up what worker 0 has begun", other)
		}
	}

	for i := range maxOpen + 2 {
		if err := accept(int32(2000+10*i), van.BatchMiddle, 0); err != nil {
			t.Errorf("message %d that continues no batch: %v", i, err)
		}
	}
	if err := accept(1900, van.BatchMiddle, 1<<20); err != nil { // with its key more than the budget: it takes no other's place
		t.Error(err)
	}
	testcluster.Counted(t, c.Servers[0], postoffice.Stats{InvalidRequests: 1, RefusedRequests: 3})
	s.cancel(cluster.Canceled{Sender: van.WorkerID(0), First: 2020, Count: 1})
	if len(x.open) != 1 || len(x.pending) != maxOpen-1 {
		t.Errorf("%d batches are open, %d messages are held, want 1 and %d", len(x.open), len(x.pending), maxOpen-1)
	}
	s.Close()
	if owner.n != made {
		t.Errorf("%d of %d messages were given back", owner.n, made)
	}
}

// TestCustomersOfAWorker: the timestamps of two tensor workers of one node are the same, and the messages of their batches interleave, as
// those of two threads of a C++ process do, or overtake each other. Each batch has only the tensors of its own worker.
func TestCustomersOfAWorker(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	for app, reorders := range []bool{false, true} {
		s, err := NewServer(c.Servers[0], ServerOptions{AppID: app})
		if err != nil {
			t.Fatal(err)
		}
		s.reorders = reorders
		var got []string
		err = s.Handle(func(b Batch) {
			keys := ""
			for _, p := range b.Pushes() {
				keys += fmt.Sprint(" ", p.Key)
			}
			got = append(got, fmt.Sprint("customer ", b.w.customer, ":", keys))
			b.Release()
		})
		if err != nil {
			t.Fatal(err)
		}
		receive := func(customer int32, ts int32, head van.BatchFlag) {
			m := &van.Message{}
			m.Reset()
			m.Sender, m.ProcessEpoch, m.Request, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.WorkerID(0), 1, true, head, ts, int32(app), customer
			m.Push, m.IsTensor, m.Dtype, m.Dim, m.Shape[0], m.ValLen = true, true, int32(Uint8), 1, 1, 1
			key := uint64(10*customer + ts)
			m.Frames, m.Keys, m.Vals = 2, backend.Bytes(binary.LittleEndian.AppendUint64(nil, key)), backend.Bytes([]byte{1})
			s.receive(m)
		}
		if reorders {
			receive(2, 1, van.BatchEnd) // before the beginning of its batch
		}
		receive(1, 0, van.BatchStart)
		receive(2, 0, van.BatchStart)
		receive(1, 1, van.BatchEnd)
		if !reorders {
			receive(2, 1, van.BatchEnd)
		}
		slices.Sort(got)
		if want := []string{"customer 1: 10 11", "customer 2: 20 21"}; !slices.Equal(got, want) {
			t.Errorf("messages overtake each other %t: batches %q, want %q", reorders, got, want)
		}
	}
}
