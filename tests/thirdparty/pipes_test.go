package pipes

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// TestConformance: the suite that the transports of the library pass.
func TestConformance(t *testing.T) {
	hub := &Hub{}
	vantest.Run(t, vantest.Suite{BadHost: "no host", MaxAllocs: -1, New: func(t testing.TB) van.Van {
		v, err := hub.Factory()(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}})
}

// TestHeader: lengths that a peer invents are refused before anything is allocated.
func TestHeader(t *testing.T) {
	for name, h := range map[string]header{
		"a meta too long":     {meta: maxMeta + 1},
		"too many frames":     {frames: van.MaxFrames + 1},
		"a frame too long":    {frames: 1, len: [3]int{maxFrame + 1}},
		"a frame that is not": {frames: 1, len: [3]int{1, 1}},
	} {
		if _, err := read(bytes.NewReader(h.appendTo(nil))); !errors.Is(err, errFormat) {
			t.Errorf("%s: %v, want %v", name, err, errFormat)
		}
	}
}
