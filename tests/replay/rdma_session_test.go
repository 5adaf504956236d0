package replay

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
)

// rdmaSession is a recorded session over RDMA.
type rdmaSession struct {
	vansession.Session
	lines []*rdmaLine
}

// rdmaLine is something that a recorded node did with its RDMA device.
type rdmaLine struct {
	Seq int

	// CM: create_qp, rdma_connect or rdma_accept.
	CM                 string
	Node, Peer         int
	Send, Recv, Inline int // create_qp: depths and bytes asked for
	Retry, RNR         int

	// Post: the kind of work request.
	Post     string
	From, To int
	QP       uint32
	Active   bool // on a connection that From has opened
	Chain    int
	Op       string
	Flags    string // S: signaled, I: inline
	Len      int
	Imm      *uint32
	Phase    string

	Hex   string
	bytes []byte // the first of Len, or private data
}

// Kinds of posts.
const (
	kindStart   = "rendezvous_start"
	kindReply   = "rendezvous_reply"
	kindMeta    = "meta"
	kindPayload = "payload"
	kindSlave   = "payload_slave"
)

func loadRDMA(t *testing.T, name string) *rdmaSession {
	t.Helper()
	f, err := os.Open("testdata/" + name + ".jsonl")
	must(t, err)
	defer f.Close()
	s := &rdmaSession{}
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 1<<20)
	for no := 1; scan.Scan(); no++ {
		if no == 1 {
			var head struct {
				Name, Description string
				Env               map[string]any
				Nodes             []vansession.Node
			}
			must(t, json.Unmarshal(scan.Bytes(), &head))
			s.Name, s.Description, s.Nodes, s.Env = head.Name, head.Description, head.Nodes, map[string]string{}
			for k, v := range head.Env {
				s.Env[k] = fmt.Sprint(v)
			}
			continue
		}
		l := &rdmaLine{}
		must(t, json.Unmarshal(scan.Bytes(), l))
		l.bytes, err = unpackHex(l.Hex)
		if err != nil || l.Post != "" && len(l.bytes) != l.Len && (len(l.bytes) != 64 || l.Post != kindPayload && l.Post != kindSlave) {
			t.Fatalf("%s:%d: %d bytes of %d, %v", name, no, len(l.bytes), l.Len, err)
		}
		s.lines = append(s.lines, l)
	}
	must(t, scan.Err())
	if len(s.Nodes) == 0 || len(s.lines) == 0 {
		t.Fatalf("%s: %d nodes, %d lines", name, len(s.Nodes), len(s.lines))
	}
	return s
}

// unpackHex reads hex in which (N) is N zeros.
func unpackHex(s string) (b []byte, err error) {
	for s != "" {
		digits, rest, found := strings.Cut(s, "(")
		part, err := hex.DecodeString(digits)
		if err != nil {
			return nil, err
		}
		b = append(b, part...)
		if !found {
			return b, nil
		}
		count, after, ok := strings.Cut(rest, ")")
		n, err := strconv.Atoi(count)
		if err != nil || !ok {
			return nil, fmt.Errorf("zeros (%s: %v", rest, err)
		}
		b = append(b, make([]byte, n)...)
		s = after
	}
	return b, nil
}

func (s *rdmaSession) node(id int) vansession.Node {
	return s.Nodes[slices.IndexFunc(s.Nodes, func(n vansession.Node) bool { return n.ID == id })]
}

// value is the array that a payload line begins, which has the same bytes over and over.
func (l *rdmaLine) value(n int) []byte {
	return (&vansession.Frame{Len: n, Bytes: l.bytes}).Full()
}

// rdmaMessage is a message of a session, put together from its work requests.
type rdmaMessage struct {
	seq      int // of the meta
	from, to int
	flow     int // number of the connection between these two in this direction
	packed   []byte
	meta     van.Meta
	value    []byte // of pushes and pull responses
	lines    []*rdmaLine
}

// pair is a direction between two nodes.
type pair struct{ from, to int }

// flows returns the queue pairs of the connections that nodes opened to each other, in
// order.
func (s *rdmaSession) flows() map[pair][]uint32 {
	f := map[pair][]uint32{}
	for _, l := range s.lines {
		if l.CM == "rdma_connect" {
			p := pair{l.Node, l.Peer}
			f[p] = append(f[p], l.QP)
		}
	}
	return f
}

// messages returns all messages in the order of their metas.
func (s *rdmaSession) messages(t *testing.T) (all []*rdmaMessage) {
	flows := s.flows()
	payload := map[uint32]*rdmaLine{}
	last := map[pair]*rdmaMessage{}
	type tensor struct {
		pair
		key uint64
	}
	pushed := map[tensor]*rdmaLine{}
	for _, l := range s.lines {
		p := pair{l.From, l.To}
		switch l.Post {
		case kindPayload:
			payload[l.QP] = l
		case kindSlave:
			last[p].lines = append(last[p].lines, l)
		case kindMeta:
			m := &rdmaMessage{seq: l.Seq, from: l.From, to: l.To, packed: l.bytes, lines: []*rdmaLine{l}}
			must(t, van.DecodeMeta(m.packed, &m.meta))
			m.flow = slices.Index(flows[p], l.QP) / qpCount
			if !m.meta.IsControl() && m.meta.Push == m.meta.Request {
				first := payload[l.QP]
				delete(payload, l.QP)
				// Intended: "moved tensor". The tensors were the same ones each time.
				if k := (tensor{p, m.meta.Key}); m.meta.Push && pushed[k] == nil {
					pushed[k] = first
				} else if m.meta.Push {
					c := *first
					c.bytes = pushed[k].bytes
					first = &c
					intendedSeen.Store("moved tensor", true)
				}
				m.lines = []*rdmaLine{first, l}
				m.value = first.value(int(m.meta.ValLen))
			}
			all, last[p] = append(all, m), m
		}
	}
	return all
}
