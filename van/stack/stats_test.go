package stack_test

import (
	"reflect"
	"testing"

	_ "github.com/stepaf/stepaf-go/internal/testlimit"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/local"
	"github.com/stepaf/stepaf-go/van/pace"
	"github.com/stepaf/stepaf-go/van/resend"
	"github.com/stepaf/stepaf-go/van/stage"
)

// counting is a van that implements only Meter.
type counting struct {
	van.Van
	stats van.Stats
}

func (c *counting) Stats() van.Stats { return c.stats }

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
