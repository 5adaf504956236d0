package zmq_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/resend"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// TestConformance runs the suite over TCP and over Unix sockets, plain and wrapped.
func TestConformance(t *testing.T) {
	for _, local := range []bool{false, true} {
		transport := "tcp"
		if local {
			transport = "ipc"
		}
		plain := func(t testing.TB) van.Van {
			cfg := env.Default()
			cfg.Local = local
			v, err := zmq.New(van.Options{Config: cfg})
			if err != nil {
				t.Fatal(err)
			}
			zmq.LongNets(v)
			return v
		}
		type variant struct {
			name  string
			suite vantest.Suite
		}
		variants := []variant{{"plain", vantest.Suite{New: plain}}, {"native", vantest.Suite{New: natives(local, nil)}}}
		// Layers above this van do not depend on the kind of socket, nor does CURVE: once is enough.
		above := []variant{
			{"curve", vantest.Suite{New: natives(local, clusterKeys(t, "of the suite"))}},
			{"resend-drop20", vantest.Suite{MaxAllocs: -1, Lossy: true, New: func(t testing.TB) van.Van {
				d := drop.New(plain(t), 20, 1, nil)
				d.Enable()
				r := resend.New(d, resend.Options{Timeout: 20e6, MaxTries: 100, CloseWait: 10 * 20e6}) // else what is dropped four times is lost by Close
				r.Enable()
				return r
			}}},
		}
		if !vantest.Race { // the packages of these layers run the suite with the race detector
			above = append(above,
				variant{"drop0", vantest.Suite{MaxAllocs: -1, New: func(t testing.TB) van.Van {
					d := drop.New(plain(t), 0, 1, nil)
					d.Enable()
					return d
				}}},
				variant{"resend", vantest.Suite{MaxAllocs: -1, New: func(t testing.TB) van.Van {
					r := resend.New(plain(t), resend.Options{})
					r.Enable()
					return r
				}}})
		}
		if !local {
			variants = append(variants, above...)
		}
		for _, s := range variants {
			if local {
				s.suite.Host, s.suite.BadHost = "127.0.0.1", ""
			}
			t.Run(transport+"/"+s.name, func(t *testing.T) { vantest.Run(t, s.suite) })
		}
	}
}

// native is a van that its peers know as a node of this library.
type native struct {
	van.Van
	incarnation uint32
}

var incarnations atomic.Uint32

// natives returns a function that makes native vans, which know each other. keys may be nil.
func natives(local bool, keys *auth.Keys) func(t testing.TB) van.Van {
	return func(t testing.TB) van.Van {
		cfg := env.Default()
		cfg.Local = local
		// On a busy machine with the race detector, ten thousand messages that a receiver has
		// before it take longer than the default, at which it would count as dead.
		cfg.HeartbeatInterval, cfg.HeartbeatTimeout = 2*time.Second, time.Minute
		n := &native{incarnation: incarnations.Add(1)}
		v, err := zmq.New(van.Options{Config: cfg, Incarnation: n.incarnation, Keys: keys})
		if err != nil {
			t.Fatal(err)
		}
		zmq.LongNets(v)
		n.Van = v
		return n
	}
}

// clusterKeys are the keys of a cluster with that id.
func clusterKeys(t *testing.T, id string) *auth.Keys {
	t.Helper()
	keys, err := auth.New([]byte("a secret of the conformance suite"), id, true)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// records are those of all natives, by port.
var records sync.Map

func (n *native) Unwrap() van.Van { return n.Van }

func (n *native) Bind(ctx context.Context, self van.Node) (int, error) {
	port, err := n.Van.Bind(ctx, self)
	if err == nil {
		n.WillBind(port)
	}
	return port, err
}

// WillBind makes n's record known before n has bound.
func (n *native) WillBind(port int) {
	records.Store(port, (&van.NodeExtension{Incarnation: n.incarnation}).Encode())
}

func (n *native) Connect(ctx context.Context, id int, peer van.Node) error {
	if e, ok := records.Load(peer.Port); ok {
		peer.Endpoint = e.([]byte)
	}
	return n.Van.Connect(ctx, id, peer)
}
