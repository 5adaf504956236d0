package collective

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/van/backend"
)

// TestFoldInPieces: a reduction in pieces has the same result as the reduction of the whole, for every length.
func TestFoldInPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	for _, n := range []int{8, pieceBytes - 8, pieceBytes, pieceBytes + 8, 2*pieceBytes + 24} {
		f := &reduction{by: numbers[int64]()[Sum]}
		a, b, got, want := random(n), random(n), random(n), make([]byte, n)
		f.by(backend.Slice(want), backend.Slice(a), backend.Slice(b))
		f.fold(backend.Slice(got), backend.Slice(a), backend.Slice(b))
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes: the reduction in pieces differs from the whole", n)
		}
	}
}
