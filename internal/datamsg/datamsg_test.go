package datamsg

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestReply: an answer has the fields of its request, and none of the message's previous contents.
func TestReply(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		q := &van.Message{}
		q.Reset()
		q.Sender, q.ProcessEpoch, q.Request, q.Push = rng.IntN(100), rng.Uint32(), true, rng.IntN(2) == 0
		q.AppID, q.CustomerID, q.Head, q.Timestamp = rng.Int32(), rng.Int32(), rng.Int32(), rng.Int32()
		q.Key, q.Addr, q.ValLen, q.Option = rng.Uint64(), rng.Uint64(), rng.Int32(), rng.Int32()
		q.RequestTrace = van.Trace{Start: rng.Uint64(), PostSend: rng.Uint64(), PostRecv: rng.Uint64(), Process: rng.Uint64()}
		r := ReplyTo(q)
		got := &van.Message{}
		got.Request, got.Placed, got.Frames, got.Body = true, true, 2, []byte("old")
		r.Fill(got)
		want := &van.Message{}
		want.Reset()
		want.Receiver, want.ProcessEpoch, want.Push = q.Sender, q.ProcessEpoch, q.Push
		want.AppID, want.CustomerID, want.Head, want.Timestamp = q.AppID, q.CustomerID, q.Head, q.Timestamp
		want.Key, want.Addr, want.ValLen, want.Option, want.RequestTrace = q.Key, q.Addr, q.ValLen, q.Option, q.RequestTrace
		got.Body, want.Body = got.Body[:len(got.Body):0], nil
		if len(got.Body) == 0 {
			got.Body = nil
		}
		if !reflect.DeepEqual(&got.Meta, &want.Meta) || got.Receiver != want.Receiver || got.ProcessEpoch != want.ProcessEpoch || got.Frames != 0 || got.Placed {
			t.Fatalf("%+v, want %+v", got, want)
		}
		lens := backend.Mem{}
		if rng.IntN(2) == 0 {
			lens = backend.Bytes(make([]byte, 4))
		}
		vals := backend.Bytes(make([]byte, rng.IntN(50)))
		if rng.IntN(3) == 0 {
			vals = backend.Mem{}
		}
		keys := backend.Bytes(make([]byte, 8))
		got.DataTypes = append(got.DataTypes, van.TypeChar)
		SetData(got, keys, vals, lens, van.TypeFloat)
		types, frames := []van.DataType{van.TypeUint64, van.TypeFloat}, 2
		if lens.Len() > 0 {
			types, frames = append(types, van.TypeInt32), 3
		}
		if got.Frames != frames || !reflect.DeepEqual(got.DataTypes, types) || got.Keys.Len() != 8 || got.Vals.Len() != vals.Len() || got.Lens.Len() != lens.Len() ||
			int(got.DataSize) != got.PayloadLen() || got.Src != backend.Host || got.Dst != backend.Host {
			t.Fatalf("%+v", got)
		}
	}
	m := &van.Message{}
	room := make([]byte, 8)
	SetData(m, backend.Bytes(room), backend.At(backend.Bytes(room).Ptr(), math.MaxInt32, backend.Device{Type: backend.GPU, ID: 1}, nil), backend.Mem{}, van.TypeOther)
	if m.DataSize != math.MaxInt32 || m.Src.Type != backend.GPU || m.Dst.ID != 1 {
		t.Errorf("size %d, from %v to %v", m.DataSize, m.Src, m.Dst)
	}
}

// holder counts references.
type holder struct{ n int }

func (h *holder) Retain()  { h.n++ }
func (h *holder) Release() { h.n-- }

// TestRecvBuffers: pushes are received in the buffer that is registered for their worker and key, and otherwise stay in
// the message. A refused list changes nothing.
func TestRecvBuffers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Group: 2})
	n := c.Servers[1] // instance 1: workers 1 and 3
	b := NewRecvBuffers((*cluster.Node)(n))
	own := &holder{}
	room := make([]byte, 64)
	all := backend.At(backend.Bytes(room).Ptr(), 64, backend.Host, own)
	place := func(sender int, key uint64, v string) (backend.Mem, bool, error) {
		return b.Place(sender, key, backend.Bytes([]byte(v)), false)
	}
	if m, owned, err := place(van.WorkerID(1), 5, "abc"); err != nil || owned || string(m.Host()) != "abc" {
		t.Errorf("nothing is registered: %s, %t, %v", m.Host(), owned, err)
	}
	part := func(worker int, key uint64, at, n int) RecvBuffer { return RecvBuffer{worker, key, all.Sub(at, n)} }
	for _, bad := range [][]RecvBuffer{{part(-1, 5, 0, 8)}, {part(2, 5, 0, 8)}, {part(0, 5, 0, 8), part(1, 5, 8, 8), part(0, 5, 16, 8)}} {
		vantest.Fails(t, b.Register(bad...), van.ErrInvalid)
	}
	if own.n != 0 {
		t.Errorf("%d holds of what was refused", own.n)
	}
	if err := errors.Join(b.Register(part(0, 5, 0, 8), part(1, 5, 8, 8)), b.Register(part(0, 6, 16, 8))); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, b.Register(part(1, 7, 24, 8), part(0, 6, 32, 8)), van.ErrInvalid)
	if own.n != 3 {
		t.Errorf("%d holds, want 3", own.n)
	}
	for _, x := range []struct {
		sender, at int
		key        uint64
		v          string
		owned      bool
	}{{van.WorkerID(1), 0, 5, "01234567", true}, {van.WorkerID(3), 8, 5, "xyz", true}, {van.WorkerID(1), 16, 6, "", true}, {van.WorkerID(1), 16, 6, "q", true}, {van.WorkerID(3), 0, 6, "kept", false},
		{van.WorkerID(0), 0, 5, "another's", false}, {van.WorkerID(3), 0, 7, "refused", false}} {
		before := bytes.Clone(room)
		m, owned, err := place(x.sender, x.key, x.v)
		if err != nil || owned != x.owned || string(m.Host()) != x.v {
			t.Errorf("%+v: %q, %t, %v", x, m.Host(), owned, err)
		}
		if x.owned {
			copy(before[x.at:], x.v)
		}
		if !bytes.Equal(room, before) {
			t.Errorf("%+v: the memory is %q, want %q", x, room, before)
		}
	}
	if _, _, err := place(van.WorkerID(1), 5, "012345678"); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("9 bytes for 8: %v", err)
	}
	if got, owned, err := b.Place(van.WorkerID(0), 5, backend.Bytes([]byte("there")), true); err != nil || !owned || string(got.Host()) != "there" {
		t.Errorf("what the transport has put there: %q, %t, %v", got.Host(), owned, err)
	}
	if err := b.Register(part(1, 9, 40, 8)); err != nil { // after pushes have arrived
		t.Fatal(err)
	}
	if m, owned, err := place(van.WorkerID(3), 9, "new"); err != nil || !owned || string(room[40:43]) != "new" || m.Len() != 3 {
		t.Errorf("registered later: %q, %t, %v", room[40:43], owned, err)
	}
	for id, ok := range map[int]bool{van.WorkerID(0): true, van.WorkerID(3): true, van.WorkerID(4): false, van.ServerID(0): false, van.SchedulerID: false, van.Empty: false} {
		if err := CheckSender((*cluster.Node)(n), &van.Message{Sender: id}); (err == nil) != ok {
			t.Errorf("a request of node %d: %v", id, err)
		}
	}
}

// refusing is a van that accepts some buffers only.
type refusing struct {
	van.Van
	left int
}

func (v *refusing) Unwrap() van.Van { return v.Van }

func (v *refusing) RegisterRecvBuffer(int, uint64, backend.Mem) error {
	if v.left--; v.left < 0 {
		return van.ErrQueueFull
	}
	return nil
}

// TestRecvBuffersRefused: buffers that the transport has accepted before it refuses one stay registered, and the error
// says so.
func TestRecvBuffersRefused(t *testing.T) {
	x := &refusing{left: 1}
	c := testcluster.Start(t, testcluster.Options{Wrap: func(role string, _ int, f van.Factory) van.Factory {
		if role != "server" {
			return f
		}
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			x.Van = v
			return x, err
		}
	}})
	b := NewRecvBuffers((*cluster.Node)(c.Servers[0]))
	list := []RecvBuffer{{0, 1, backend.Bytes(make([]byte, 8))}, {0, 2, backend.Bytes(make([]byte, 8))}}
	vantest.Fails(t, b.Register(list...), van.ErrQueueFull, "the 1 before it of 2")
	vantest.Fails(t, b.Register(list[0]), van.ErrInvalid)
	err := b.Register(list[1])
	vantest.Fails(t, err, van.ErrQueueFull)
	x.left = 1
	if err := b.Register(list[1]); err != nil {
		t.Error(err)
	}
}
