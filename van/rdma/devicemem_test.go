package rdma_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma"
)

// TestDeviceMemory: a tensor's value is received in memory of the receiver's device. Keys, and other data that the CPU reads, are received in host memory.
func TestDeviceMemory(t *testing.T) {
	n := fakeverbs.NewNet()
	t.Cleanup(n.Close)
	back := simgpu.New(3)
	got := make(chan *van.Message, 4)
	var vans [2]van.Van
	var nodes [2]van.Node
	for i, id := range []int{8, 9} {
		cfg := env.Default()
		cfg.VanType = "ibverbs"
		vans[i] = rdma.NewOn(n.Stack(netip.MustParseAddr("10.77.0.1")), van.Options{Config: cfg, Backend: back})
		nodes[i] = van.Node{Role: van.RoleOf(id), ID: id, Hostname: "10.77.0.1", AuxID: -1}
		self := nodes[i]
		self.ID = van.Empty
		port, err := vans[i].Bind(t.Context(), self)
		if err != nil {
			t.Fatal(err)
		}
		nodes[i].Port = port
		vans[i].SetID(id)
		vans[i].Start(func(m *van.Message) { got <- m.Retain() })
		t.Cleanup(func() { _ = vans[i].Close(t.Context()) })
	}
	for i := range vans {
		if err := vans[i].Connect(t.Context(), nodes[1-i].ID, nodes[1-i]); err != nil {
			t.Fatal(err)
		}
	}
	value := bytes.Repeat([]byte("value"), 2000)
	on, err := back.Alloc(len(value))
	if err != nil {
		t.Fatal(err)
	}
	if err := back.Copy(on, backend.Bytes(value)); err != nil {
		t.Fatal(err)
	}
	for i, keys := range []int{1, 2} {
		var m van.Message
		m.Reset()
		m.Receiver, m.Request, m.Push, m.Timestamp = 8, true, true, int32(i)
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8*keys)), on
		m.IsTensor, m.ValLen = keys == 1, int32(len(value))
		m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
		if keys > 1 { // plain keys and values are on the host
			m.Keys = backend.Bytes(binary.LittleEndian.AppendUint64(make([]byte, 8), 5))
			m.Vals = backend.Bytes(value)
		}
		if err := vans[1].Send(&m); err != nil {
			t.Fatal(err)
		}
		r := <-got
		if onHost := r.Vals.OnHost(); onHost != (keys > 1) || !r.Keys.OnHost() || r.Keys.Len() != 8*keys {
			t.Errorf("%d keys: %d bytes of keys on %s, the value on %s", keys, r.Keys.Len(), r.Keys.Device(), r.Vals.Device())
		}
		back2 := make([]byte, len(value))
		if err := back.Copy(backend.Bytes(back2), r.Vals); err != nil || !bytes.Equal(back2, value) {
			t.Errorf("%d keys: the value has changed (%v)", keys, err)
		}
		r.Release()
	}
	// A receive buffer on the device is not announced: its values stay where they arrive. A buffer on the host has them.
	buffer, err := back.Alloc(len(value))
	if err != nil {
		t.Fatal(err)
	}
	host := backend.Bytes(make([]byte, len(value)))
	for key, b := range map[uint64]backend.Mem{11: buffer, 12: host} {
		if err := vans[0].(van.BufferRegistrar).RegisterRecvBuffer(9, key, b); err != nil {
			t.Fatal(err)
		}
	}
	for i, key := range []uint64{11, 11, 11, 12, 12, 12} {
		var m van.Message
		m.Reset()
		m.Receiver, m.Request, m.Push, m.Timestamp, m.Key = 8, true, true, int32(10+i), key
		m.Frames, m.Keys, m.Vals = 2, backend.Bytes(binary.LittleEndian.AppendUint64(nil, key)), on
		m.IsTensor, m.ValLen = true, int32(len(value))
		m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
		if err := vans[1].Send(&m); err != nil {
			t.Fatal(err)
		}
		r := <-got
		if r.Placed != (key == 12) || r.Vals.OnHost() != (key == 12) || key == 12 && (r.Vals.Addr() != host.Addr() || !bytes.Equal(host.Host(), value)) {
			t.Errorf("push %d of key %d is placed: %t, on %s", i, key, r.Placed, r.Vals.Device())
		}
		r.Release()
	}
}
