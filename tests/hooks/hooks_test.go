package hooks_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestConformance: without hooks it is the van inside.
func TestConformance(t *testing.T) {
	network := inproc.NewNetwork().Factory()
	vantest.Run(t, vantest.Suite{BadHost: "no host", MaxAllocs: -1, New: func(t testing.TB) van.Van {
		inner, err := network(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return &hooks.Van{Van: inner}
	}})
}

// pair is two connected nodes, and the timestamps of messages that the second one receives.
func pair(t *testing.T) (a, b *hooks.Van, got chan int32) {
	t.Helper()
	network := inproc.NewNetwork().Factory()
	got = make(chan int32, 16)
	var vans [2]*hooks.Van
	for i, id := range []int{van.WorkerID(0), van.ServerID(0)} {
		inner, err := network(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		vans[i] = &hooks.Van{Van: inner}
		if _, err := vans[i].Bind(t.Context(), van.Node{ID: id, Role: van.RoleOf(id), Hostname: "h", Port: 100 + i}); err != nil {
			t.Fatal(err)
		}
		vans[i].SetID(id)
		vans[i].Start(func(m *van.Message) { got <- m.Timestamp })
		t.Cleanup(func() { _ = vans[i].Close(context.Background()) })
	}
	if err := vans[0].Connect(t.Context(), van.ServerID(0), van.Node{ID: van.ServerID(0), Role: van.Server, Hostname: "h", Port: 101}); err != nil {
		t.Fatal(err)
	}
	return vans[0], vans[1], got
}

func message(ts int32, key []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, ts, 0, 0
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes(key), backend.Bytes(make([]byte, 100))
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
	return m
}

func next(t *testing.T, got <-chan int32) int32 {
	t.Helper()
	select {
	case ts := <-got:
		return ts
	case <-time.After(20 * time.Second):
		t.Fatal("nothing comes")
		return 0
	}
}

// TestVerdicts: messages are refused, lost, and kept on both sides, and then leave and
// come in the order in which they are let.
func TestVerdicts(t *testing.T) {
	a, b, got := pair(t)
	a.OnSend(func(m *van.Message) hooks.Verdict {
		return map[int32]hooks.Verdict{1: hooks.Refuse(van.ErrQueueFull), 2: hooks.Lose, 3: hooks.Keep}[m.Timestamp]
	})
	b.OnReceive(func(m *van.Message) hooks.Verdict {
		return map[int32]hooks.Verdict{4: hooks.Keep, 5: hooks.Lose}[m.Timestamp]
	})
	key := make([]byte, 8)
	for ts := range int32(7) {
		if err := a.Send(message(ts, key)); errors.Is(err, van.ErrQueueFull) != (ts == 1) {
			t.Errorf("message %d: %v", ts, err)
		}
	}
	if x, y := next(t, got), next(t, got); x != 0 || y != 6 {
		t.Fatalf("messages %d and %d came, want 0 and 6", x, y)
	}
	if n := b.Waiting(); n != 1 {
		t.Errorf("%d messages wait, want 1", n)
	}
	b.DeliverKept()
	if x := next(t, got); x != 4 {
		t.Fatalf("message %d came, want 4", x)
	}
	key[0] = 9 // a short frame was copied
	if k := a.Kept(); len(k) != 1 || k[0].Keys.Host()[0] != 0 {
		t.Errorf("%d messages are kept", len(k))
	}
	if err := a.SendKept(); err != nil {
		t.Fatal(err)
	}
	if x := next(t, got); x != 3 {
		t.Fatalf("message %d came, want 3", x)
	}
	if n := a.Sends(); n != 7 {
		t.Errorf("%d sends are counted, want 7", n)
	}
}

// TestHeld: Held counts messages that their receiver has not freed.
func TestHeld(t *testing.T) {
	a, b, got := pair(t)
	b.OnReceive(func(*van.Message) hooks.Verdict { return hooks.Keep })
	if err := a.Send(message(1, make([]byte, 8))); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); b.Waiting() == 0; {
		if time.Now().After(end) {
			t.Fatal("nothing comes")
		}
	}
	if n := b.Held(); n != 1 {
		t.Errorf("%d messages are held, want 1", n)
	}
	b.DeliverKept()
	next(t, got)
	for end := time.Now().Add(20 * time.Second); b.Held() != 0; {
		if time.Now().After(end) {
			t.Fatalf("%d messages are held, want none", b.Held())
		}
	}
}
