package replay

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
)

// Places in a packed meta and in a node record.
const (
	offTimestamp = 40
	offDataSize  = 72
	offAddr      = 88
	offTraces    = 184
	metaSize     = 288

	nodePorts, nodePort = 76, 204
	nodeSize            = 552
)

// message is one recorded message and its parts.
type message struct {
	*vansession.Event
	meta   van.Meta
	packed []byte
	data   [][]byte // the data frames
}

func parseMessage(e *vansession.Event) (*message, error) {
	m := &message{Event: e}
	for i := range e.Frames {
		switch f := &e.Frames[i]; f.Kind {
		case "meta":
			m.packed = f.Full()
		case "dest", "self":
		default:
			m.data = append(m.data, f.Full())
		}
	}
	if err := van.DecodeMeta(m.packed, &m.meta); err != nil {
		return nil, fmt.Errorf("event %d: %w", e.Seq, err)
	}
	return m, nil
}

// dontCare are the bytes in which our node's messages may differ from the
// recording.
var dontCare = []struct {
	name     string
	why      string
	node     bool // the place is in each node record, not in the meta
	off, len int
	only     func(r *run, m *van.Meta, node *van.Node) bool // nil: always
}{
	{name: "request_trace, response_trace", off: offTraces, len: 80,
		why: "times, zero in the original unless built with tracing; TestReplay checks those of s1w1_trace"},
	{name: "addr", off: offAddr, len: 8, only: func(r *run, m *van.Meta, _ *van.Node) bool { return m.Request && !m.IsControl() && m.Addr != 0 },
		why: "the tensor's address in the worker's memory"},
	{name: "timestamp", off: offTimestamp, len: 4, only: func(r *run, m *van.Meta, _ *van.Node) bool { return r.heartbeats && m.IsControl() },
		why: "heartbeats, which come by the clock, share the control counter; checkCounter checks it"},
	{name: "node.ports[1:]", node: true, off: nodePorts + 4, len: nodePort - nodePorts - 4,
		why: "num_ports is 1; the original leaves the others uninitialised"},
	{name: "node.dev_types, node.dev_ids", node: true, off: 208, len: 256, why: "uninitialised in the original"},
	{name: "node padding", node: true, off: 465, len: 3, why: "never written"},
	{name: "node.customer_id of the scheduler", node: true, off: 468, len: 4, why: "uninitialised in the original",
		only: func(_ *run, _ *van.Meta, n *van.Node) bool { return n.Role == van.Scheduler }},
	{name: "node.endpoint_name", node: true, off: 472, len: 64, why: "uninitialised in the original; here van.NodeExtension, which nodes of the original pass on unread"},
	{name: "node.endpoint_name_len", node: true, off: 536, len: 1, why: "0 in the original; here the length of van.NodeExtension"},
	{name: "node padding at the end", node: true, off: 548, len: 4, why: "never written"},
}

// late reports whether our node may send m later than the original did, though not
// after the next message on the same connection: acknowledgements of the pushes of a batch.
func late(m *van.Meta) bool {
	return !m.IsControl() && !m.Request && m.Push && (m.Head == van.BatchStart || m.Head == van.BatchMiddle)
}

// repairs are the intended differences in content.
var repairs = []struct {
	name  string
	why   string
	apply func(m *message) // changes the expectation if it concerns it
}{
	{name: "pull without payload",
		why: "the original sends the whole pull buffer with a request for a tensor, which nobody reads; " +
			"its servers accept an empty frame",
		apply: func(m *message) {
			if m.meta.Request && m.meta.IsTensor && !m.meta.Push {
				m.data[1] = nil
				binary.LittleEndian.PutUint32(m.packed[offDataSize:], uint32(len(m.data[0])))
			}
		}},
}

// expectation returns the recorded message as our node should send it: with this
// run's ports and with repairs.
func (r *run) expectation(m *message) *message {
	c := &message{Event: m.Event, meta: m.meta, packed: r.translate(m), data: slices.Clone(m.data)}
	for _, p := range repairs {
		p.apply(c)
	}
	return c
}

// translate puts this run's ports into the node records of a recorded message.
func (r *run) translate(m *message) []byte {
	b := slices.Clone(m.packed)
	for _, n := range records(b, &m.meta) {
		for _, off := range []int{nodePorts, nodePort} {
			if port, ok := r.ports[int(binary.LittleEndian.Uint32(n[off:]))]; ok {
				binary.LittleEndian.PutUint32(n[off:], uint32(port))
			}
		}
	}
	return b
}

// records returns the node records of a packed meta.
func records(packed []byte, m *van.Meta) [][]byte {
	l := make([][]byte, len(m.Control.Nodes))
	for i := range l {
		l[i] = packed[len(packed)-nodeSize*(len(l)-i):][:nodeSize]
	}
	return l
}

// masked returns a packed meta with ones in all places that do not matter.
func (r *run) masked(packed []byte, m *van.Meta) []byte {
	b := slices.Clone(packed)
	nodes := records(b, m)
	for _, d := range dontCare {
		if !d.node {
			if d.only == nil || d.only(r, m, nil) {
				cover(b[d.off:][:d.len])
			}
			continue
		}
		for i := range nodes {
			if d.only == nil || d.only(r, m, &m.Control.Nodes[i]) {
				cover(nodes[i][d.off:][:d.len])
			}
		}
	}
	return b
}

func cover(b []byte) {
	for i := range b {
		b[i] = 0xff
	}
}

// difference says how a message that our node sent, a meta and data frames,
// differs from the expected one; "" when it does not.
func (r *run) difference(got [][]byte, want *message) string {
	var meta van.Meta
	if err := van.DecodeMeta(got[0], &meta); err != nil {
		return err.Error()
	}
	lengths := func(packed []byte, data [][]byte) []int {
		n := []int{len(packed)}
		for _, f := range data {
			n = append(n, len(f))
		}
		return n
	}
	if g, w := lengths(got[0], got[1:]), lengths(want.packed, want.data); !slices.Equal(g, w) {
		return fmt.Sprintf("frames of %v bytes, want %v: %s", g, w, meta.String())
	}
	g, w := r.masked(got[0], &meta), r.masked(want.packed, &want.meta)
	for i := range w {
		if g[i] != w[i] {
			return fmt.Sprintf("meta differs at byte %d\n got %+v\nwant %+v", i, meta, want.meta)
		}
	}
	for i := range want.data {
		if !bytes.Equal(got[i+1], want.data[i]) {
			return fmt.Sprintf("data frame %d is %.64x, want %.64x", i, got[i+1], want.data[i])
		}
	}
	return ""
}
