package van

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// metaOf is a meta of random contents.
func metaOf(rng *rand.Rand) *Meta {
	m := &Meta{}
	m.Reset()
	m.Head, m.AppID, m.CustomerID, m.Timestamp = int32(rng.IntN(4)), int32(rng.IntN(9)), int32(rng.IntN(9)), int32(rng.IntN(1<<20))
	m.Request, m.Push, m.SimpleApp, m.IsTensor = rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0
	m.Key, m.Addr, m.ValLen, m.Option = rng.Uint64(), rng.Uint64(), int32(rng.IntN(1<<20)), int32(rng.IntN(9))
	m.RequestTrace = Trace{Start: rng.Uint64(), Process: 5, PostSend: 6, PostRecv: 7}
	m.ResponseTrace = Trace{Start: 8, Process: 9, PostSend: 10, PostRecv: rng.Uint64()}
	m.Dim = int32(rng.IntN(MaxDims + 1))
	for i := range m.Dim {
		m.Shape[i] = int64(rng.IntN(100))
	}
	for range rng.IntN(4) {
		m.DataTypes = append(m.DataTypes, DataType(rng.IntN(12)))
	}
	if rng.IntN(3) == 0 {
		m.Body = make([]byte, rng.IntN(30))
	}
	if rng.IntN(2) == 0 {
		m.Control.Cmd = []Command{Barrier, Ack, Heartbeat, AddNode, InstanceBarrier, Terminate}[rng.IntN(6)]
		m.Control.BarrierGroup, m.Control.MsgSig = rng.IntN(8), rng.Uint64()
		for range rng.IntN(3) {
			n := Node{Role: Role(rng.IntN(3)), ID: 8 + rng.IntN(5), Hostname: "10.0.0.1", Port: 80, AuxID: rng.IntN(4), Ports: []int32{80}}
			n.Endpoint = (&NodeExtension{Incarnation: rng.Uint32(), Cluster: 5, Settings: Settings{Known: true, Resend: rng.IntN(2) == 0, Workers: rng.IntN(20), Servers: 3}}).Encode()
			m.Control.Nodes = append(m.Control.Nodes, n)
		}
	}
	return m
}

// TestGolden: the results of decoding arbitrary metas and node extensions, and the texts of errors and names.
func TestGolden(t *testing.T) {
	golden.Check(t, "codec", 20, func(rng *rand.Rand, w io.Writer) {
		m := metaOf(rng)
		good, err := m.AppendTo(nil)
		fmt.Fprintf(w, "%x %d %s\n", good, m.EncodedLen(), golden.Err(err))
		var got Meta
		for range 60 {
			err := DecodeMeta(golden.Mangle(rng, good), &got)
			fmt.Fprintln(w, golden.Err(err))
			if err == nil {
				again, err := got.AppendTo(nil)
				fmt.Fprintf(w, "%x %s %s %t %d\n", again, golden.Err(err), got.String(), got.IsControl(), len(got.ShapeSlice()))
			}
			id := NodeExtension{Incarnation: 1 + rng.Uint32N(3), Cluster: 4, Local: make([]byte, rng.IntN(MaxLocalLen+2)),
				Settings: Settings{Known: rng.IntN(2) == 0, Resend: rng.IntN(2) == 0, Workers: int(golden.Edge(rng, MaxCount) & 0xffff), Servers: rng.IntN(9)}}
			b := golden.Mangle(rng, id.Encode())
			is, ok := ParseExtension(b)
			version, native := ExtensionVersionOf(b)
			fmt.Fprintln(w, is, ok, version, native)
			node := int(int32(golden.Edge(rng, 9)))
			fmt.Fprintln(w, NodeName(node), RoleOf(node), RankOf(node), ServerID(node&0xff), WorkerID(node&0xff), Command(node), Command(node).Valid(), Role(node&7))
			q := Requests{App: 1, Customer: 2, First: int32(rng.IntN(9)), Count: int32(rng.IntN(4))}
			x := &Meta{Request: rng.IntN(9) > 0, AppID: int32(1 + rng.IntN(9)/8), CustomerID: int32(2 + rng.IntN(9)/8), Timestamp: int32(rng.IntN(12))}
			fmt.Fprintln(w, q.Has(x))
			part := func(s string) string { return strings.Repeat(s, rng.IntN(2)) }
			e := &Error{Op: "send", Node: part("n"), Peer: part("p"), Detail: part("d"), Hint: part("h"), Elapsed: time.Duration(rng.IntN(2)) * time.Second, Limit: time.Duration(rng.IntN(2)) * time.Minute}
			if rng.IntN(2) == 0 {
				e.Err = errors.New("cause")
			}
			fmt.Fprintln(w, e.Error())
		}
	})
}
