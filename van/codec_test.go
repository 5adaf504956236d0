package van

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func TestEncodeVectors(t *testing.T) {
	for _, v := range loadVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			m := v.meta(t)
			if got := m.EncodedLen(); got != len(v.packed) {
				t.Fatalf("EncodedLen = %d, want %d", got, len(v.packed))
			}
			got := bytes.Repeat([]byte{0xa5}, len(v.packed))
			if field := refused[v.Name]; field != "" {
				wantInvalid(t, m.EncodeTo(got), field)
				m.put(got) // the layout holds all the same
			} else if err := m.EncodeTo(got); err != nil {
				t.Fatal(err)
			}
			wantBytes(t, got, v.packed)
			for _, r := range v.Unwritten {
				if pad := got[r[0]:][:r[1]]; !bytes.Equal(pad, make([]byte, r[1])) {
					t.Errorf("padding at %d is %x, want zero", r[0], pad)
				}
			}
		})
	}
}

func TestDecodeVectors(t *testing.T) {
	var m Meta // one for all: nothing of an earlier message may stay
	for _, v := range loadVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			if field := refused[v.Name]; field != "" {
				wantField(t, DecodeMeta(v.packed, &m), field)
				if v.Name != "field_order_probe" {
					return
				}
				body, err := m.get(v.packed) // without the check of the values
				if err != nil {
					t.Fatal(err)
				}
				m.Body = append(m.Body, body...)
			} else if err := DecodeMeta(v.packed, &m); err != nil {
				t.Fatal(err)
			}
			wantMeta(t, &m, v.meta(t))
			again := make([]byte, m.EncodedLen())
			m.put(again)
			wantBytes(t, again, v.packed)
		})
	}
}

func TestDecodeSessions(t *testing.T) {
	var m Meta
	for _, s := range loadSessions(t) {
		t.Run(s.Name, func(t *testing.T) {
			for i, packed := range s.Metas() {
				if err := DecodeMeta(packed, &m); err != nil {
					t.Fatalf("meta %d: %v", i, err)
				}
				got, err := m.AppendTo(nil)
				if err != nil {
					t.Fatalf("meta %d: %v", i, err)
				}
				wantBytes(t, got, packed)
			}
		})
	}
}

// TestDecodeIgnoresGarbage: bytes that a C++ node leaves uninitialised are accepted, and do not appear in the result.
func TestDecodeIgnoresGarbage(t *testing.T) {
	packed := loadVector(t, "add_node_reply_1w1s")
	var want Meta
	if err := DecodeMeta(packed, &want); err != nil {
		t.Fatal(err)
	}
	dirty := bytes.Clone(packed)
	fill := func(off, n int) {
		for i := range n {
			dirty[off+i] = 0xcd
		}
	}
	for i := range want.Control.Nodes {
		base := metaSize + i*nodeSize
		fill(base+nodeOffPorts+4, 4*(MaxPorts-1))
		fill(base+nodeOffDevTypes, 4*MaxPorts)
		fill(base+nodeOffDevIDs, 4*MaxPorts)
		fill(base+nodeOffIsRecovery+1, 3)
		fill(base+nodeOffCustomerID, 4)
		fill(base+nodeOffEndpoint, MaxEndpointName)
		fill(base+nodeOffAuxID+4, 4)
		end := len(want.Control.Nodes[i].Hostname) + 1
		fill(base+nodeOffHostname+end, hostnameSize-end)
	}
	for _, r := range [][2]int{{20, 4}, {33, 3}, {70, 2}, {76, 4}, {284, 4}} {
		fill(r[0], r[1])
	}
	fill(offBarrierGroup, 4)
	fill(offMsgSig, 8)
	var m Meta
	if err := DecodeMeta(dirty, &m); err != nil {
		t.Fatal(err)
	}
	for i := range m.Control.Nodes {
		n := &m.Control.Nodes[i]
		if len(n.DevTypes) != 1 || len(n.DevIDs) != 1 {
			t.Errorf("node %d: %d device types, %d ids, want as many as ports", i, len(n.DevTypes), len(n.DevIDs))
		}
		n.DevTypes, n.DevIDs, n.CustomerID = []int32{0}, []int32{0}, 0
	}
	wantMeta(t, &m, &want)
}

func TestDecodeTruncated(t *testing.T) {
	var m Meta
	for _, v := range loadVectors(t) {
		for n := range v.packed {
			// A fresh copy, so that reading past the end is a panic.
			if err := DecodeMeta(bytes.Clone(v.packed[:n]), &m); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%s cut to %d bytes: error %v, want ErrMalformed", v.Name, n, err)
			}
		}
		if refused[v.Name] == "" {
			wantField(t, DecodeMeta(append(bytes.Clone(v.packed), 0), &m), "meta length")
		}
	}
	wantField(t, DecodeMeta(nil, &m), "meta length")
}

func TestDecodeLies(t *testing.T) {
	const (
		data  = "push_request_batch_middle_8dims"
		table = "add_node_reply_1w1s"
		node1 = metaSize + nodeSize
	)
	i32 := func(v int32) []byte { return le.AppendUint32(nil, uint32(v)) }
	u64 := func(v uint64) []byte { return le.AppendUint64(nil, v) }
	for _, tc := range []struct {
		vector string
		off    int
		value  []byte
		field  string
	}{
		{data, offBodySize, i32(-1), "body_size"},
		{data, offBodySize, i32(math.MaxInt32), "body_size"},
		{data, offBodySize, i32(math.MinInt32), "body_size"},
		{data, offBodySize, i32(9), "body_size"},
		{data, offBodySize, i32(8), "data_type_size"}, // swallows the data types
		{data, offBodySize, i32(1), "data_type_size"},
		{data, offDataTypeSize, i32(-1), "data_type_size"},
		{data, offDataTypeSize, i32(3), "data_type_size"},
		{data, offDataTypeSize, i32(1 << 30), "data_type_size"}, // 4 times this is 0
		{data, offDataTypeSize, i32(1), "meta length"},
		{data, offDataTypeSize, i32(0), "meta length"},
		{data, offNodeSize, i32(1), "control.node_size"},
		{data, offNodeSize, i32(-1), "control.node_size"},
		{table, offNodeSize, i32(4), "control.node_size"},
		{table, offNodeSize, i32(math.MaxInt32), "control.node_size"},
		{table, offNodeSize, i32(2), "meta length"},
		{table, offDataTypeSize, i32(MaxDataTypes + 1), "data_type_size"},
		{table, offCmd, i32(0), "control.node_size"}, // nodes in a data message
		{table, offCmd, i32(10), "control.cmd"},
		{table, offCmd, i32(-1), "control.cmd"},
		{"instance_barrier_request_all", offBarrierGroup, i32(-1), "control.barrier_group"},
		{data, offRequest, []byte{2}, "request"},
		{data, offPush, []byte{255}, "push"},
		{data, offSimpleApp, []byte{2}, "simple_app"},
		{data, offIsTensor, i32(-1), "is_tensor"},
		{data, offIsTensor, i32(256), "is_tensor"},
		{data, offDim, i32(-1), "dim"},
		{data, offDim, i32(9), "dim"},
		{data, offDim, i32(math.MaxInt32), "dim"},
		{data, offShape, u64(math.MaxUint64), "shape[0]"},
		{data, offShape + 56, u64(1 << 63), "shape[7]"},
		{data, offDataSize, i32(-1), "data_size"},
		{data, offValLen, i32(math.MinInt32), "val_len"},
		{data, offSlaveQPNum, i32(-1), "slave_qp_num"},
		{data, offSlaveQPNum, i32(2), "slave_qp_num"},
		{table, metaSize + nodeOffHostname, bytes.Repeat([]byte("h"), 64), "control.node[0].hostname"},
		{table, node1 + nodeOffHostname, bytes.Repeat([]byte("h"), 64), "control.node[1].hostname"},
		{table, node1 + nodeOffRole, i32(3), "control.node[1].role"},
		{table, node1 + nodeOffRole, i32(-1), "control.node[1].role"},
		{table, node1 + nodeOffNumPorts, i32(33), "control.node[1].num_ports"},
		{table, node1 + nodeOffNumPorts, i32(-1), "control.node[1].num_ports"},
		{table, node1 + nodeOffPort, i32(-1), "control.node[1].port"},
		{table, node1 + nodeOffPort, i32(65536), "control.node[1].port"},
		{table, node1 + nodeOffIsRecovery, []byte{2}, "control.node[1].is_recovery"},
		{table, node1 + nodeOffEndpointLen, u64(65), "control.node[1].endpoint_name_len"},
		{table, node1 + nodeOffEndpointLen, u64(1 << 63), "control.node[1].endpoint_name_len"},
	} {
		t.Run(fmt.Sprintf("%s/%x", tc.field, tc.value[:min(8, len(tc.value))]), func(t *testing.T) {
			b := loadVector(t, tc.vector)
			copy(b[tc.off:], tc.value)
			var m Meta
			wantField(t, DecodeMeta(b, &m), tc.field)
		})
	}
}

// A negative shape entry beyond dim is ignored.
func TestDecodeShapeBeyondDim(t *testing.T) {
	b := loadVector(t, "push_request_batch_end")
	le.PutUint64(b[offShape+8:], math.MaxUint64)
	var m Meta
	if err := DecodeMeta(b, &m); err != nil {
		t.Fatal(err)
	}
	if got := m.ShapeSlice(); len(got) != 1 || got[0] != 3 || m.Shape[1] != 0 {
		t.Errorf("shape %v of %v, want [3] and zeros", got, m.Shape)
	}
}

// A short frame with large counts must not cause a large allocation.
func TestDecodeAllocatesLittle(t *testing.T) {
	b := loadVector(t, "add_node_reply_1w1s")
	le.PutUint32(b[offNodeSize:], 3_000_000)
	var m Meta
	wantField(t, DecodeMeta(b, &m), "control.node_size")
	le.PutUint32(b[offNodeSize:], 3)
	le.PutUint32(b[offBodySize:], 1<<30)
	wantField(t, DecodeMeta(b, &m), "body_size")
	if cap(m.Body) != 0 || cap(m.Control.Nodes) != 0 {
		t.Errorf("capacity for %d bytes and %d nodes, want none", cap(m.Body), cap(m.Control.Nodes))
	}
}

func TestDecodeKeepsNothingOfFrame(t *testing.T) {
	var m, want Meta
	for _, name := range []string{"body_types_and_node", shortened} {
		b := loadVector(t, name)
		if err := DecodeMeta(bytes.Clone(b), &want); err != nil {
			t.Fatal(err)
		}
		if err := DecodeMeta(b, &m); err != nil {
			t.Fatal(err)
		}
		for i := range b {
			b[i] = 0xee
		}
		wantMeta(t, &m, &want)
	}
}

func TestNodeClone(t *testing.T) {
	var m Meta
	if err := DecodeMeta(loadVector(t, shortened), &m); err != nil {
		t.Fatal(err)
	}
	kept := m.Control.Nodes[0].Clone()
	want := fmt.Sprintf("%+v", m.Control.Nodes[0])
	if err := DecodeMeta(loadVector(t, "add_node_request_worker"), &m); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintf("%+v", kept); got != want {
		t.Errorf("clone changed to %s\nwant %s", got, want)
	}
}

func TestValidate(t *testing.T) {
	node := func(change func(*Node)) func(*Meta) {
		return func(m *Meta) {
			m.Control.Cmd = AddNode
			n := Node{Role: Worker, ID: Empty, Hostname: "h", Ports: []int32{1}, Port: 1}
			change(&n)
			m.Control.Nodes = []Node{{Role: Server, Hostname: strings.Repeat("x", MaxHostnameLen)}, n}
		}
	}
	for _, tc := range []struct {
		field  string // "" means valid
		change func(*Meta)
	}{
		{"", func(*Meta) {}},
		{"", node(func(*Node) {})},
		{"", func(m *Meta) { m.Control.BarrierGroup, m.Control.MsgSig = 7, 7 }}, // not sent
		{"", func(m *Meta) { m.Dim, m.Shape[1] = 1, -1 }},
		{"data_type_size", func(m *Meta) { m.DataTypes = make([]DataType, MaxDataTypes+1) }},
		{"data_size", func(m *Meta) { m.DataSize = -1 }},
		{"val_len", func(m *Meta) { m.ValLen = -1 }},
		{"dim", func(m *Meta) { m.Dim = MaxDims + 1 }},
		{"dim", func(m *Meta) { m.Dim = -1 }},
		{"shape[1]", func(m *Meta) { m.Dim, m.Shape[1] = 2, -1 }},
		{"slave_qp_num", func(m *Meta) { m.SlaveQPNum = 2 }},
		{"control.cmd", func(m *Meta) { m.Control.Cmd = 10 }},
		{"control.node_size", func(m *Meta) { m.Control.Nodes = []Node{{}} }},
		{"control.barrier_group", func(m *Meta) { m.Control.Cmd, m.Control.BarrierGroup = Barrier, -1 }},
		{"control.node[1].role", node(func(n *Node) { n.Role = Joint })},
		{"control.node[1].hostname", node(func(n *Node) { n.Hostname = strings.Repeat("h", MaxHostnameLen+1) })},
		{"control.node[1].hostname", node(func(n *Node) { n.Hostname = "a\x00b" })},
		{"control.node[1].num_ports", node(func(n *Node) { n.Ports = make([]int32, MaxPorts+1) })},
		{"control.node[1].port", node(func(n *Node) { n.Port = 65536 })},
		{"control.node[1].dev_types", node(func(n *Node) { n.DevTypes = make([]int32, 2) })},
		{"control.node[1].dev_ids", node(func(n *Node) { n.DevIDs = make([]int32, 2) })},
		{"", node(func(n *Node) {
			n.Endpoint, n.Hostname = make([]byte, MaxEndpointName), strings.Repeat("h", MaxHostnameLen)
		})},
		{"", node(func(n *Node) { n.Ports = make([]int32, MaxPorts) })},
		{"", func(m *Meta) { m.DataTypes = make([]DataType, MaxDataTypes) }},
		{"control.node[1].endpoint_name_len", node(func(n *Node) { n.Endpoint = make([]byte, MaxEndpointName+1) })},
		{"control.node[1].id", node(func(n *Node) { n.ID = math.MaxInt32 + 1 })},
		{"control.node[1].customer_id", node(func(n *Node) { n.CustomerID = math.MinInt32 - 1 })},
		{"control.node[1].aux_id", node(func(n *Node) { n.AuxID = math.MaxInt32 + 1 })},
	} {
		var m Meta
		m.Reset()
		tc.change(&m)
		wantInvalid(t, m.Validate(), tc.field)
		dst := bytes.Repeat([]byte{0xa5}, m.EncodedLen())
		wantInvalid(t, m.EncodeTo(dst), tc.field)
		if tc.field == "" {
			wantInvalid(t, DecodeMeta(dst, &Meta{}), "") // a meta that may be sent is accepted
		}
		longer, err := m.AppendTo([]byte("x"))
		wantInvalid(t, err, tc.field)
		if tc.field != "" && (len(longer) != 1 || dst[0] != 0xa5 || dst[len(dst)-1] != 0xa5) {
			t.Errorf("%s: something was written", tc.field)
		}
	}
}

func TestEncodeToWrongLength(t *testing.T) {
	var m Meta
	m.Reset()
	for _, n := range []int{0, metaSize - 1, metaSize + 1} {
		if err := m.EncodeTo(make([]byte, n)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%d bytes: error %v, want ErrInvalid", n, err)
		}
	}
}

func TestAppendTo(t *testing.T) {
	for _, v := range loadVectors(t) {
		if refused[v.Name] != "" {
			continue
		}
		got, err := v.meta(t).AppendTo([]byte("before"))
		if err != nil {
			t.Fatal(err)
		}
		wantBytes(t, got, append([]byte("before"), v.packed...))
	}
}

func TestCodecAllocations(t *testing.T) {
	// The last two: control messages and bodies reuse the memory of the first run.
	for _, name := range []string{"push_request_single", "push_response", "pull_request_batch_end_bf16", "pull_response",
		"kv_push_request_with_lens", "add_node_reply_2w2s", "simple_app_request"} {
		b := loadVector(t, name)
		var m Meta
		if err := DecodeMeta(b, &m); err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, m.EncodedLen())
		if n := testing.AllocsPerRun(100, func() {
			if DecodeMeta(b, &m) != nil || m.EncodeTo(dst) != nil {
				t.Error("no longer codes")
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations for decode and encode, want 0", name, n)
		}
		if n := testing.AllocsPerRun(100, func() { dst, _ = m.AppendTo(dst[:0]) }); n != 0 {
			t.Errorf("%s: %v allocations to append, want 0", name, n)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	benchCodec(b, func(b *testing.B, packed []byte, m *Meta) {
		dst := make([]byte, len(packed))
		for b.Loop() {
			if err := m.EncodeTo(dst); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	benchCodec(b, func(b *testing.B, packed []byte, m *Meta) {
		for b.Loop() {
			if err := DecodeMeta(packed, m); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func benchCodec(b *testing.B, f func(*testing.B, []byte, *Meta)) {
	for _, name := range []string{"push_request_single", "pull_response", "add_node_reply_2w2s"} {
		b.Run(name, func(b *testing.B) {
			packed := loadVector(b, name)
			var m Meta
			if err := DecodeMeta(packed, &m); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			f(b, packed, &m)
		})
	}
}

// wantBytes reports the first difference of two packed metas.
func wantBytes(t *testing.T, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	around := func(b []byte) string { return hex.EncodeToString(b[min(len(b), i):min(len(b), i+16)]) }
	t.Errorf("%d bytes, want %d; from byte %d on %s, want %s", len(got), len(want), i, around(got), around(want))
}

func wantMeta(t *testing.T, got, want *Meta) {
	t.Helper()
	if !sameMeta(got, want) {
		t.Errorf("got  %+v\nwant %+v", *got, *want)
	}
}

// sameMeta compares the encoded fields; empty and nil slices are the same.
func sameMeta(a, b *Meta) bool {
	flat := func(m *Meta) (Meta, string) {
		c := *m
		c.Body, c.DataTypes, c.Control.Nodes = nil, nil, nil
		return c, fmt.Sprintf("%x %v %+v", m.Body, m.DataTypes, m.Control.Nodes)
	}
	ma, sa := flat(a)
	mb, sb := flat(b)
	return sa == sb && reflect.DeepEqual(ma, mb)
}

func wantField(t *testing.T, err error, field string) {
	t.Helper()
	var fe *FieldError
	if !errors.As(err, &fe) || !errors.Is(err, ErrMalformed) {
		t.Errorf("error %v, want a FieldError for %s", err, field)
	} else if fe.Field != field {
		t.Errorf("error %q names %s, want %s", err, fe.Field, field)
	}
}

// wantInvalid wants an error that wraps ErrInvalid and names field, or none when
// field is empty.
func wantInvalid(t *testing.T, err error, field string) {
	t.Helper()
	switch {
	case field == "":
		if err != nil {
			t.Errorf("error %v, want none", err)
		}
	case !errors.Is(err, ErrInvalid) || errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), ": "+field+" = "):
		t.Errorf("error %v, want ErrInvalid naming %s", err, field)
	}
}

// TestRefusedKeepsNothing: an invalid meta is refused before its body is copied. After
// a valid one, Reset releases a long body and many nodes.
func TestRefusedKeepsNothing(t *testing.T) {
	long := make([]byte, 8<<20)
	pack := func(edit func(*Meta), wrong func([]byte)) []byte {
		var m Meta
		m.Reset()
		edit(&m)
		b, err := m.AppendTo(nil)
		if err != nil {
			t.Fatal(err)
		}
		wrong(b)
		return b
	}
	nodes := func(m *Meta) {
		m.Control.Cmd = AddNode
		m.Control.Nodes = make([]Node, 1000)
	}
	for name, b := range map[string][]byte{
		"command":       pack(func(m *Meta) { m.Body = long }, func(b []byte) { b[offCmd] = 99 }),
		"data size":     pack(func(m *Meta) { m.Body = long }, func(b []byte) { b[offDataSize+3] = 0x80 }),
		"qp number":     pack(func(m *Meta) { m.Body = long }, func(b []byte) { b[offSlaveQPNum] = 9 }),
		"shape":         pack(func(m *Meta) { m.Body, m.Dim = long, 1 }, func(b []byte) { b[offShape+7] = 0x80 }),
		"barrier group": pack(func(m *Meta) { m.Body, m.Control.Cmd = long, Barrier }, func(b []byte) { b[offBarrierGroup+3] = 0x80 }),
		"last node":     pack(func(m *Meta) { nodes(m); m.Body = long }, func(b []byte) { b[len(b)-nodeSize+nodeOffRole] = 7 }),
		"nodes of data": pack(nodes, func(b []byte) { b[offCmd] = 0 }),
	} {
		t.Run(name, func(t *testing.T) {
			var m Meta
			if err := DecodeMeta(b, &m); !errors.Is(err, ErrMalformed) {
				t.Fatalf("got %v, want %v", err, ErrMalformed)
			}
			if cap(m.Body) > 0 || cap(m.Control.Nodes) > keepNodes {
				t.Errorf("it keeps %d bytes of a body and %d nodes", cap(m.Body), cap(m.Control.Nodes))
			}
		})
	}
	var m Meta
	if err := DecodeMeta(pack(func(m *Meta) { nodes(m); m.Body = long }, func([]byte) {}), &m); err != nil || len(m.Body) != len(long) {
		t.Fatalf("body of %d bytes, %v; want %d", len(m.Body), err, len(long))
	}
	m.Reset()
	if cap(m.Body) > keepBody || cap(m.Control.Nodes) > keepNodes {
		t.Errorf("Reset keeps %d bytes of a body and %d nodes, want at most %d and %d", cap(m.Body), cap(m.Control.Nodes), keepBody, keepNodes)
	}
}

// The stamps of both traces lie where the reference has them. The recorded vectors have
// zeros in most of these places.
func TestTraceLayout(t *testing.T) {
	var m Meta
	m.Reset()
	m.RequestTrace = Trace{PreStart: 0x11, Start: 0x12, PostSend: 0x13, PostRecv: 0x14, Process: 0x15}
	m.ResponseTrace = Trace{PreStart: 0x21, Start: 0x22, PostSend: 0x23, PostRecv: 0x24, Process: 0x25}
	got, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	at := map[int]byte{184: 0x11, 192: 0x12, 200: 0x13, 208: 0x14, 216: 0x15, 224: 0x21, 232: 0x22, 240: 0x23, 248: 0x24, 256: 0x25}
	for i := 184; i < 264; i++ {
		if got[i] != at[i] {
			t.Errorf("byte %d is %#x, want %#x", i, got[i], at[i])
		}
	}
	var back Meta
	if err := DecodeMeta(got, &back); err != nil {
		t.Fatal(err)
	}
	wantMeta(t, &back, &m)
}
