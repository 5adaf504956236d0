package rdma_test

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma"
	"github.com/stepaf/stepaf-go/van/resend"
)

var addr = netip.MustParseAddr("10.77.0.1")

// fakeWith makes vans on one emulated network, each in a process of its own. keys may be nil.
func fakeWith(t testing.TB, keys *auth.Keys, change func(*env.Config), options ...func(*fakeverbs.Config)) (func(testing.TB) van.Van, *fakeverbs.Net) {
	n := fakeverbs.NewNet(options...)
	n.OnError(func(err error) { t.Errorf("the network: %v", err) })
	t.Cleanup(func() {
		for _, l := range n.Leaks() {
			t.Errorf("leaked: %s", l)
		}
		n.Close()
	})
	return func(t testing.TB) van.Van {
		cfg := env.Default()
		cfg.VanType = "ibverbs"
		if change != nil {
			change(cfg)
		}
		v := rdma.NewOn(n.Stack(addr), van.Options{Config: cfg, Log: testLog(t), Keys: keys})
		rdma.LongNets(v)
		return v
	}, n
}

func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return nil
	}
	return slog.New(slog.NewTextHandler(writer{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

type writer struct{ t testing.TB }

func (w writer) Write(b []byte) (int, error) {
	w.t.Logf("%s", b)
	return len(b), nil
}

// variant is one run of the suite, with its own configuration, network or wrapping van.
type variant struct {
	name    string
	keys    *auth.Keys
	change  func(*env.Config)
	options func(*fakeverbs.Config)
	suite   vantest.Suite
	wrap    func(van.Van) van.Van
}

func TestConformance(t *testing.T) {
	keys, err := auth.New([]byte("the secret of a cluster"), "", true)
	if err != nil {
		t.Fatal(err)
	}
	conform(t, []variant{
		{name: "plain"},
		{name: "secret", keys: keys},
		{name: "split", change: func(c *env.Config) { c.SplitQPLag = true }},
		{name: "small queues", change: func(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth = 8, 8 }},
		{name: "resend-drop20", suite: vantest.Suite{Lossy: true}, wrap: func(v van.Van) van.Van {
			d := drop.New(v, 20, 1, nil)
			d.Enable()
			r := resend.New(d, resend.Options{Timeout: 20e6, MaxTries: 100, CloseWait: 10 * 20e6}) // otherwise Close would lose a message that is dropped four times
			r.Enable()
			return r
		}},
	})
}

// TestConformanceRarely runs the suite with configurations whose results seldom differ from those of TestConformance.
func TestConformanceRarely(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	keys, err := auth.New([]byte("the secret of a cluster"), "", true)
	if err != nil {
		t.Fatal(err)
	}
	conform(t, []variant{
		{name: "secret, split", keys: keys, change: func(c *env.Config) { c.SplitQPLag = true }},
		{name: "one queue pair", change: func(c *env.Config) { c.QPNum = 1 }},
		{name: "no inline data", options: func(c *fakeverbs.Config) { c.MaxInline = 0 }},
		{name: "slow to connect", options: func(c *fakeverbs.Config) { c.EventDelay = 10 * time.Millisecond }},
		{name: "drop0", wrap: func(v van.Van) van.Van {
			d := drop.New(v, 0, 1, nil)
			d.Enable()
			return d
		}},
	})
}

func conform(t *testing.T, variants []variant) {
	for _, s := range variants {
		t.Run(s.name, func(t *testing.T) {
			var options []func(*fakeverbs.Config)
			if s.options != nil {
				options = append(options, s.options)
			}
			plain, _ := fakeWith(t, s.keys, s.change, options...)
			s.suite.Host = addr.String()
			s.suite.MaxAllocs = -1 // the fake allocates; TestDeviceConformance counts
			s.suite.New = plain
			if s.wrap != nil {
				s.suite.New = func(t testing.TB) van.Van { return s.wrap(plain(t)) }
			}
			vantest.Run(t, s.suite)
		})
	}
}
