package zmq

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
)

// sumsOwn is the incarnation of the node that reads.
const sumsOwn = 0xbadcafe

// TestParsersGolden: the results of parsing arbitrary routing ids and bundles.
func TestParsersGolden(t *testing.T) {
	golden.Check(t, "parsers", 40, func(rng *rand.Rand, w io.Writer) {
		id := []int{van.SchedulerID, 7, 8, 9, 10, 1000, van.Empty - 1, van.Empty, van.Empty + 1}[rng.IntN(9)]
		name := routingID(peerName{id, []uint32{0, 1, 0xbadcafe, 1<<32 - 1}[rng.IntN(4)]}, sumsOwn)
		fmt.Fprintln(w, name)
		var good []byte
		good = binary.LittleEndian.AppendUint32(good, uint32(1+rng.IntN(3)))
		good = append(good, bundleMagic...)
		var behind []int
		for range int(good[0]) {
			frames := []uint32{0, 2, 3}[rng.IntN(3)]
			head := make([]byte, recordHead)
			binary.LittleEndian.PutUint32(head, uint32(8*(1+rng.IntN(9))))
			binary.LittleEndian.PutUint32(head[4:], frames)
			body := make([]byte, binary.LittleEndian.Uint32(head))
			for i := range int(frames) {
				n := uint32(rng.IntN(40))
				if rng.IntN(2) == 0 {
					behind = append(behind, int(n))
					n |= outside
				} else {
					body = append(body, make([]byte, (n+7)&^7)...)
				}
				binary.LittleEndian.PutUint32(head[recordFrames+4*i:], n)
			}
			if rng.IntN(2) == 0 {
				head[recordMark] = 1
				behind = append(behind, 1)
			}
			good = append(append(good, head...), body...)
		}
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
			l := append([]int(nil), behind...)
			if len(l) > 0 && rng.IntN(4) == 0 {
				l[rng.IntN(len(l))] += rng.IntN(3) - 1
			}
			if rng.IntN(8) == 0 {
				l = append(l, rng.IntN(3))
			}
			x := golden.Mangle(rng, good)
			if len(x) < bundleHead {
				continue
			}
			rest, n, err := openBundle(x, l)
			fmt.Fprintln(w, len(rest), n, golden.Err(err))
			for range n {
				var r record
				if rest, err = r.read(rest, l); err != nil {
					t.Fatal(err)
				}
				l = l[r.outside:]
				fmt.Fprintln(w, len(r.meta), r.frames, r.values, r.mark, r.outside, len(r.frame[0].data), len(r.frame[1].data), len(rest))
			}
		}
	})
}

// TestFlowLimits: the numbers of bytes at which a peer is asked to wait, and to continue.
func TestFlowLimits(t *testing.T) {
	golden.Check(t, "flow", 20, func(rng *rand.Rand, w io.Writer) {
		for range 100 {
			out := &outgoing{budget: int64(rng.IntN(3)) << 20}
			f := &flow{recvAll: int64(rng.IntN(4)) << 22, holdAt: int64(rng.IntN(5)) << 19}
			f.waiting.Store(f.recvAll/2 + int64(rng.IntN(3)) - 1)
			ask, letGo := f.limits()
			fmt.Fprintln(w, out.controlLimit(), ask, letGo)
		}
	})
}
