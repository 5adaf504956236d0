package replay

import (
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
)

// TestDifference changes every byte of recorded messages in turn: only those of
// dontCare may change without being noticed.
func TestDifference(t *testing.T) {
	s, err := vansession.Load("../../van/testdata/sessions/s1w1_batch.jsonl")
	must(t, err)
	r := &run{t: t, session: s}
	kinds := map[string]bool{}
	for i := range s.Events {
		e := &s.Events[i]
		if e.Type != vansession.Send {
			continue
		}
		m, err := parseMessage(e)
		must(t, err)
		kinds[m.meta.Control.Cmd.String()] = true
		free := make([]bool, len(m.packed))
		for _, d := range dontCare {
			switch {
			case d.node:
				for k, n := range m.meta.Control.Nodes {
					if d.only == nil || d.only(r, &m.meta, &n) {
						begin := len(m.packed) - nodeSize*(len(m.meta.Control.Nodes)-k) + d.off
						copy(free[begin:], slices.Repeat([]bool{true}, d.len))
					}
				}
			case d.only == nil || d.only(r, &m.meta, nil):
				copy(free[d.off:], slices.Repeat([]bool{true}, d.len))
			}
		}
		want := r.expectation(m)
		for k := range m.packed {
			got := append([][]byte{slices.Clone(want.packed)}, want.data...)
			got[0][k] ^= 0x10
			if d := r.difference(got, want); (d == "") != free[k] {
				t.Errorf("event %d: byte %d of the meta changed: %q, want it ignored: %t", e.Seq, k, d, free[k])
			}
		}
		for k := range want.data {
			got := append([][]byte{want.packed}, slices.Clone(want.data)...)
			got[k+1] = append(slices.Clone(got[k+1]), 0)
			if r.difference(got, want) == "" {
				t.Errorf("event %d: a longer data frame %d is not noticed", e.Seq, k)
			}
			if len(want.data[k]) > 0 {
				got[k+1] = slices.Clone(want.data[k])
				got[k+1][len(got[k+1])-1] ^= 1
				if r.difference(got, want) == "" {
					t.Errorf("event %d: a change in data frame %d is not noticed", e.Seq, k)
				}
			}
		}
	}
	for _, c := range []van.Command{van.AddNode, van.Barrier, van.InstanceBarrier, van.EmptyCmd} {
		if !kinds[c.String()] {
			t.Errorf("no %s in the session", c)
		}
	}
}
