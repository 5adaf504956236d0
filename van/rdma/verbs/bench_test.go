//go:build linux && cgo && !nordma

package verbs

import "testing"

// BenchmarkRoundTrip sends 8 bytes in turn in both directions. One thread polls for both ends.
func BenchmarkRoundTrip(b *testing.B) {
	r := newRig(b)
	x, y := r.usualPair()
	d := x.dev()
	buf := r.memory(8)
	var wrs [1]SendWR
	var out [8]Completion
	for b.Loop() {
		for _, e := range []*end{x, y} {
			wrs[0] = inline(buf, 1)
			wrs[0].QP = e.qp.Handle()
			if n, err := d.Post(wrs[:]); n != 1 || err != nil {
				b.Fatal(n, err)
			}
			for got := 0; got < 2; {
				n, err := d.Poll(out[:], -1, 0)
				if err != nil {
					b.Fatal(err)
				}
				got += n
			}
		}
	}
}

// BenchmarkPollEmpty measures a poll of an empty queue.
func BenchmarkPollEmpty(b *testing.B) {
	r := newRig(b)
	x, _ := r.usualPair()
	d := x.dev()
	var out [8]Completion
	for b.Loop() {
		if n, err := d.Poll(out[:], 0, 0); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
}
