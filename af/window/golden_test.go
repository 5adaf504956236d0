package window

import (
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// TestGolden: results of parsing arbitrary bodies, and the numbering of windows and messages.
func TestGolden(t *testing.T) {
	golden.Check(t, "wire", 20, func(rng *rand.Rand, w io.Writer) {
		for range 100 {
			n := note{verb: verb(1 + rng.IntN(int(lastVerb))), signal: uint16(golden.Edge(rng, 5)), window: 4, epoch: 5, seq: golden.Edge(rng, 6), offset: 7, taken: golden.Edge(rng, 8), bytes: 9}
			b := n.append(nil)
			fmt.Fprintf(w, "%x\n", b)
			got, err := parse(golden.Mangle(rng, b))
			fmt.Fprintln(w, got, golden.Err(err))
			s := shape{golden.Edge(rng, 64), uint32(rng.IntN(9)), uint32(rng.IntN(9)), rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0}
			is, err := parseShape(golden.Mangle(rng, s.append(nil)))
			fmt.Fprintln(w, is.size, is.signals, is.number, is.refused, is.device, is.inUse, golden.Err(err))
			fmt.Fprintln(w, appOf(rng.Uint64(), uint32(rng.IntN(600)), rng.IntN(4096)))
			x := &base{}
			x.first.Store(int32(golden.Edge(rng, 1<<31-5)) &^ 1 & (1<<31 - 1))
			fmt.Fprintln(w, x.timestamp(golden.Edge(rng, 1<<30)), x.timestamp(golden.Edge(rng, 6)))
		}
	})
}

// TestRoomGolden: when there is room for another message, and when all have been taken, of any numbers sent, taken and
// still read by a transport.
func TestRoomGolden(t *testing.T) {
	golden.Check(t, "room", 60, func(rng *rand.Rand, w io.Writer) {
		p := newPeer(&base{}, 0, 9)
		all := peers{p}
		for range 300 {
			switch rng.IntN(6) {
			case 0, 1:
				p.out.next.Add(uint64(rng.IntN(maxUnderWay / 2)))
				p.out.bytes.Add(uint64(rng.IntN(maxBytes / 2)))
			case 2:
				n := note{taken: p.out.placed.Load() + uint64(rng.IntN(maxUnderWay/2)), bytes: p.out.placedBytes.Load() + uint64(rng.IntN(maxBytes/2))}
				fmt.Fprintln(w, "learn", golden.Err(p.out.learn(&n)))
			case 3:
				n := note{taken: uint64(rng.IntN(10)), bytes: uint64(rng.IntN(10))} // late
				_ = p.out.learn(&n)
			case 4:
				l := &p.out.lendings[p.out.next.Load()%ring]
				l.seq.Store(p.out.next.Load() + 1)
			case 5:
				p.out.lendings[rng.IntN(ring)].seq.Store(0)
			}
			want := p.out.next.Load() - uint64(rng.IntN(3))
			lent := 0
			all.lent(func(seq uint64) { lent += int(seq) })
			fmt.Fprintln(w, p.out.next.Load(), p.out.bytes.Load(), p.out.placed.Load(), p.out.placedBytes.Load(), p.out.room(), p.out.flushed(want), all.lends(), lent)
		}
	})
}
