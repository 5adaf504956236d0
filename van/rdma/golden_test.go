package rdma

import (
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/van"
)

// TestParsersGolden: the encoding of each format, and the result of decoding mangled input.
func TestParsersGolden(t *testing.T) {
	golden.Check(t, "parsers", 30, func(rng *rand.Rand, w io.Writer) {
		h := handshake{node: []int{1, 8, 9, van.Empty, 0, -1}[rng.IntN(6)], port: int(golden.Edge(rng, 65535) & 0xfffff), host: "10.77.0.1"[:rng.IntN(10)], epoch: 5, qp: rng.IntN(3), qpCount: rng.IntN(4), native: true}
		s := slotRequest{metaLen: golden.Edge(rng, 300), dataNum: []uint64{nativeSlotRequest, 0, 1, 3, 4}[rng.IntN(5)], data: [4]uint64{golden.Edge(rng, 1024), rng.Uint64N(16), golden.Edge(rng, 600), golden.Edge(rng, 5)}, origin: 1, key: 2}
		r := slotReply{meta: 1, metaKey: 2, data: 3, dataKey: 4, origin: 5, index: uint32(golden.Edge(rng, 6)), flags: replyBudget}
		x := trailer{numbered: rng.IntN(2) == 0, metaLen: rng.IntN(2) * rng.IntN(400), frames: []int{0, 2, 3}[rng.IntN(3)], lens: [van.MaxFrames]uint32{8, 100, 4}, n: rng.IntN(maxCredits + 1)}
		sb, rb, xb := make([]byte, slotRequestLen), make([]byte, slotReplyLen), make([]byte, trailerLen)
		s.put(sb)
		r.put(rb)
		x.put(xb)
		hb := h.encode()
		fmt.Fprintf(w, "%x %x %x %x %s %s\n", hb, sb, rb, xb, h.key(), h.name())
		for range 80 {
			got, err := decodeHandshake(golden.Mangle(rng, hb))
			fmt.Fprintln(w, got, golden.Err(err))
			if err == nil {
				fmt.Fprintln(w, got.key(), got.name())
			}
			var s slotRequest
			err = s.get(golden.Mangle(rng, sb))
			fmt.Fprintln(w, s, golden.Err(err))
			if err == nil {
				for _, ours := range []bool{true, false} {
					n, err := s.need(ours)
					fmt.Fprintln(w, n, golden.Err(err), s.priority())
				}
			}
			var r slotReply
			err = r.get(golden.Mangle(rng, rb))
			fmt.Fprintln(w, r, golden.Err(err), r.slot())
			var x trailer
			err = x.get(golden.Mangle(rng, xb))
			fmt.Fprintln(w, x, golden.Err(err))
		}
	})
}
