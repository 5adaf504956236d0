package zmq

import (
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
)

// sumsOwn is the incarnation of the node that reads.
const sumsOwn = 0xbadcafe

// TestParsersGolden: the results of parsing arbitrary routing ids.
func TestParsersGolden(t *testing.T) {
	golden.Check(t, "parsers", 40, func(rng *rand.Rand, w io.Writer) {
		id := []int{van.SchedulerID, 7, 8, 9, 10, 1000, van.Empty - 1, van.Empty, van.Empty + 1}[rng.IntN(9)]
		name := routingID(peerName{id, []uint32{0, 1, 0xbadcafe, 1<<32 - 1}[rng.IntN(4)]}, sumsOwn)
		fmt.Fprintln(w, name)
		for range 100 {
			b := golden.Mangle(rng, []byte(name))
			p, ours := nameOf(b, sumsOwn)
			fmt.Fprintln(w, p, ours)
			b = []byte(name)
			if len(b) > 0 {
				b[rng.IntN(len(b))] = "0123456789abcdefg/:`psPS.x"[rng.IntN(26)]
			}
			p, ours = nameOf(b, sumsOwn)
			fmt.Fprintln(w, p, ours)
		}
	})
}
