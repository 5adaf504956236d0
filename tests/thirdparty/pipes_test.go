package pipes

import (
	"bytes"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
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

// TestNothingPilesUp: a node that is disconnected and connected again and again keeps
// nothing of the connections before.
func TestNothingPilesUp(t *testing.T) {
	hub := &Hub{}
	var nodes [2]*node
	for i := range nodes {
		v, err := hub.Factory()(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = v.Close(t.Context()) }()
		nodes[i] = v.(*node)
		if _, err := v.Bind(t.Context(), van.Node{ID: 8 + i, Hostname: "a", Port: 2000 + i}); err != nil {
			t.Fatal(err)
		}
		v.Start(func(*van.Message) {})
	}
	for range 20 {
		if err := nodes[1].Connect(t.Context(), 8, van.Node{Hostname: "a", Port: 2000}); err != nil {
			t.Fatal(err)
		}
		nodes[1].Disconnect(8)
	}
	for _, n := range nodes {
		for left, limit := -1, time.Now().Add(20*time.Second); left != 0; runtime.Gosched() {
			n.mu.Lock()
			left = len(n.parted) + len(n.pipes) + len(n.from)
			n.mu.Unlock()
			if time.Now().After(limit) {
				t.Fatalf("%d connections, pipes and peers are kept", left)
			}
		}
	}
}
