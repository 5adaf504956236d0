package local_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/local"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// records acts as the scheduler: it passes node records between the nodes.
type records struct{ m sync.Map } // address to endpoint

// told is a van whose peers' records are complete.
type told struct {
	*local.Van
	all *records
}

func (v *told) Unwrap() van.Van { return v.Van }

func (v *told) Bind(ctx context.Context, self van.Node) (int, error) {
	port, err := v.Van.Bind(ctx, self)
	if err == nil {
		self.Port = port
		v.all.m.Store(self.Addr(), local.Endpoint(v.Endpoint()))
	}
	return port, err
}

func (v *told) Connect(ctx context.Context, id int, peer van.Node) error {
	if e, ok := v.all.m.Load(peer.Addr()); ok {
		peer.Endpoint = e.([]byte)
	}
	return v.Van.Connect(ctx, id, peer)
}

// wrap makes vans of a suite local ones.
func wrap(all *records, keys *auth.Keys, set func(*local.Van), inner van.Factory) func(t testing.TB) van.Van {
	return func(t testing.TB) van.Van {
		o := van.Options{Config: env.Default(), Log: slog.New(slog.DiscardHandler), Keys: keys}
		in, err := inner(o)
		if err != nil {
			t.Fatal(err)
		}
		v := local.New(in, o)
		local.LongNets(v)
		if set != nil {
			set(v)
		}
		return &told{Van: v, all: all}
	}
}

func TestConformance(t *testing.T) {
	network := inproc.NewNetwork()
	keys, err := auth.New([]byte("the secret of a cluster"), "", true)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		inner   van.Factory
		keys    *auth.Keys
		set     func(*local.Van)
		badHost string
	}{
		{"zmq", zmq.New, nil, nil, ""},
		{"inproc", network.Factory(), nil, nil, "no such host"},
		{"secret", network.Factory(), keys, nil, "no such host"},
		{"stream", network.Factory(), nil, local.StreamOnly, "no such host"},
	} {
		t.Run(c.name, func(t *testing.T) {
			vantest.Run(t, vantest.Suite{New: wrap(&records{}, c.keys, c.set, c.inner), BadHost: c.badHost})
		})
	}
}
