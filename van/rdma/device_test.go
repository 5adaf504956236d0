package rdma_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// realDevice returns the RDMA libraries and the IPv4 address of an active port, or skips.
func realDevice(t testing.TB) (verbs.Stack, string) {
	t.Helper()
	stack, err := verbs.Load(verbs.Options{})
	if err != nil {
		t.Skipf("no RDMA here: %v", err)
	}
	all, err := stack.Devices()
	if err != nil {
		t.Skipf("no RDMA here: %v", err)
	}
	for _, d := range all {
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				if p.Active && g.Addr.Is4() {
					return stack, g.Addr.String()
				}
			}
		}
	}
	t.Skipf("no RDMA here: none of %d devices has an active port with an IPv4 address; make rdma-test runs this in a virtual machine", len(all))
	return nil, ""
}

// TestDeviceConformance runs the suite on a real RDMA stack.
func TestDeviceConformance(t *testing.T) {
	stack, host := realDevice(t)
	for _, s := range []struct {
		name   string
		change func(*env.Config)
	}{
		{"with a secret", func(c *env.Config) { c.Secret = "the secret of a cluster" }},
		{"one queue pair", func(c *env.Config) { c.QPNum = 1 }},
	} {
		t.Run(s.name, func(t *testing.T) {
			if testing.Short() && s.name != "with a secret" {
				t.Skip("the suite runs in full on simulated devices")
			}
			vantest.Run(t, vantest.Suite{Host: host, New: func(t testing.TB) van.Van {
				cfg := env.Default()
				cfg.VanType = "ibverbs"
				s.change(cfg)
				keys, err := auth.Open(cfg)
				if err != nil {
					t.Fatal(err)
				}
				return rdma.NewOn(stack, van.Options{Config: cfg, Log: testLog(t), Keys: keys})
			}})
		})
	}
}
