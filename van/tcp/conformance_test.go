package tcp

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// node is a van whose peers know it for a node of this library.
type node struct {
	*Van
	incarnation uint32
}

var (
	incarnations atomic.Uint32
	records      sync.Map // identities of all nodes, by port
)

// nodes makes such vans. keys may be nil.
func nodes(keys *auth.Keys, tls bool) func(t testing.TB) van.Van {
	return func(t testing.TB) van.Van {
		cfg := env.Default()
		cfg.TLS = tls
		cfg.HeartbeatInterval, cfg.HeartbeatTimeout = 2*time.Second, time.Minute
		n := &node{incarnation: incarnations.Add(1)}
		o := van.Options{Config: cfg, Incarnation: n.incarnation, Keys: keys}
		in, err := zmq.New(o)
		if err != nil {
			t.Fatal(err)
		}
		n.Van = New(in, o)
		return n
	}
}

func (n *node) Unwrap() van.Van { return n.Van }

func (n *node) Bind(ctx context.Context, self van.Node) (int, error) {
	port, err := n.Van.Bind(ctx, self)
	if err == nil {
		records.Store(port, (&van.NodeExtension{Incarnation: n.incarnation, DataPort: uint16(n.DataPort())}).Encode())
	}
	return port, err
}

// WillBind makes n's record known before n has bound: without a data port, so that its data goes over the van inside.
func (n *node) WillBind(port int) {
	records.Store(port, (&van.NodeExtension{Incarnation: n.incarnation}).Encode())
}

func (n *node) Connect(ctx context.Context, id int, peer van.Node) error {
	if b, ok := records.Load(peer.Port); ok {
		peer.Endpoint = b.([]byte)
	}
	return n.Van.Connect(ctx, id, peer)
}

// TestConformance runs the suite of all transports, without a cluster secret, with a secret, and with TLS.
func TestConformance(t *testing.T) {
	keys, err := auth.New([]byte("a secret of the conformance suite"), "suite", true)
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]vantest.Suite{
		"plain":  {New: nodes(nil, false)},
		"secret": {New: nodes(keys, false)},
		"tls":    {New: nodes(keys, true), MaxAllocs: 4}, // crypto/tls allocates a reader for each record, and for a read without a record
	} {
		t.Run(name, func(t *testing.T) { vantest.Run(t, s) })
	}
}
