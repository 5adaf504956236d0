package af

import (
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestChecksGolden: the errors of the checks of arbitrary shapes, lists, ranks and options.
func TestChecksGolden(t *testing.T) {
	room := make([]byte, 1<<16)
	golden.Check(t, "checks", 20, func(rng *rand.Rand, w io.Writer) {
		for range 150 {
			d := Dtype(rng.IntN(50) - 1)
			shape := make([]int64, rng.IntN(5)+rng.IntN(9)/8*5)
			for i := range shape {
				shape[i] = int64(rng.IntN(6))
				if rng.IntN(12) == 0 {
					shape[i] = int64(golden.Edge(rng, 1<<30))
				}
			}
			n, err := byteSize(d, shape)
			fmt.Fprintln(w, d.Size(), d.Valid(), n, golden.Err(err))
			have := max(min(n, len(room)-1)+rng.IntN(9)/8, 0)
			x, err := NewTensor(backend.Bytes(room[:have]), d, shape...)
			fmt.Fprintln(w, x.Len(), x.Dims(), x.rank(), x.rows(), golden.Err(err))
			if err == nil && x.rows() > 0 {
				rows := rng.Int64N(x.rows() + 1)
				x.head(rows)
				fmt.Fprintln(w, x.Len(), x.Dims())
			}
			to := To{}
			for range rng.IntN(4) {
				to = append(to, rng.IntN(5)-1+rng.IntN(2))
			}
			fmt.Fprintln(w, golden.Err(to.check(1+rng.IntN(4))))
			list := func() (l []KeyTensor) {
				for range rng.IntN(5) + rng.IntN(20)/19*40 {
					l = append(l, KeyTensor{Key: rng.Uint64N(200)})
				}
				return l
			}
			push, pull := list(), list()
			if rng.IntN(50) == 0 {
				push = make([]KeyTensor, van.MaxParts-1+rng.IntN(3))
				for i := range push {
					push[i].Key = uint64(i)
				}
			}
			fmt.Fprintln(w, golden.Err(distinct(push, "push")), golden.Err(checkLists(push, testcluster.PerServer(pull, 1+rng.IntN(3)), 1+rng.IntN(3))))
			o, err := with(options{}, []CallOption{Stream(3), To{1}, Within(5), nil}[:rng.IntN(5)])
			fmt.Fprintln(w, o.stream, o.to, o.limit, golden.Err(err))
		}
	})
}
