package stack_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/simgpu"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/local"
	"github.com/stepaf/stepaf-go/van/pace"
	"github.com/stepaf/stepaf-go/van/resend"
	"github.com/stepaf/stepaf-go/van/stack"
	"github.com/stepaf/stepaf-go/van/stage"
	"github.com/stepaf/stepaf-go/van/tcp"
)

// counting is a van that implements only Meter.
type counting struct {
	van.Van
	stats van.Stats
}

func (c *counting) Stats() van.Stats { return c.stats }
func (c *counting) Type() string     { return "counting" }

// TestStatsPassThrough: each counter of a van can be read through each van that wraps it.
func TestStatsPassThrough(t *testing.T) {
	inner := &counting{}
	s := reflect.ValueOf(&inner.stats).Elem()
	for i := range s.NumField() {
		s.Field(i).SetUint(uint64(1000 + i))
	}
	for _, w := range []struct {
		name string
		van  van.Van
	}{
		{"drop", drop.New(inner, 0, 1, nil)},
		{"local", local.New(inner, van.Options{Config: env.Default()})},
		{"pace", pace.New(inner, pace.Options{})},
		{"resend", resend.New(inner, resend.Options{})},
		{"stage", stage.New(inner, stage.Options{Backend: simgpu.New(0)})},
		{"tcp", tcp.New(inner, van.Options{Config: env.Default()})},
	} {
		m, ok := van.As[van.Meter](w.van)
		if !ok {
			t.Errorf("%s: no counters", w.name)
			continue
		}
		got := reflect.ValueOf(m.Stats())
		for i := range got.NumField() {
			if name := got.Type().Field(i).Name; got.Field(i).Uint() != s.Field(i).Uint() {
				t.Errorf("%s: %s is %d, want %d", w.name, name, got.Field(i).Uint(), s.Field(i).Uint())
			}
		}
	}
}

// TestPathsLeftOut: the log says which paths of data a variable excludes.
func TestPathsLeftOut(t *testing.T) {
	for data, want := range map[string]string{env.DataTCP: "no shared memory with peers", env.DataZMQ: "no data goes over tcp"} {
		cfg, log := env.Default(), vantest.Log{}
		cfg.EnableIPC, cfg.Data = 0, data
		v, err := stack.Configured(van.Options{Config: cfg, Incarnation: 1, Log: log.Logger()}, van.Worker)
		if err != nil {
			t.Fatal(err)
		}
		if err := v.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(log.String(), want) {
			t.Errorf("STEPAF_DATA=%s: the log does not say %q:\n%s", data, want, log.String())
		}
	}
}
