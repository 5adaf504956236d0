// Package sums holds what something does with many inputs, drawn from seeds, to what it did before: a file of
// the test has a sum for each seed. It says that something is different, not that it is wrong. Who
// changes what is compared runs the test with -sums.update. It is for tests.
package sums

import (
	"encoding/binary"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	update = flag.Bool("sums.update", false, "rewrite the sums")
	show   = flag.Int("sums.show", -1, "print what is summed up for this seed")
)

// Check compares the sums of what story writes for seeds 0 to seeds-1 with testdata/NAME.sums. A story must
// be the same at every run; what an order of goroutines or of a map decides has to be sorted first.
func Check(t *testing.T, name string, seeds int, story func(rng *rand.Rand, w io.Writer)) {
	t.Helper()
	file := filepath.Join("testdata", name+".sums")
	b, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatalf("%v (run with -sums.update to make it)", err)
	}
	was := strings.Fields(string(b))
	var is []string
	for seed := range seeds {
		h := fnv.New64a()
		var w io.Writer = h
		if *show == seed {
			w = io.MultiWriter(h, os.Stdout)
		}
		story(rand.New(rand.NewPCG(uint64(seed), 1)), w)
		is = append(is, fmt.Sprintf("%016x", h.Sum64()))
	}
	if *update {
		if err = os.MkdirAll("testdata", 0o755); err == nil {
			err = os.WriteFile(file, []byte(strings.Join(is, "\n")+"\n"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	if len(was) != len(is) {
		t.Fatalf("%s has %d sums, want %d (run with -sums.update)", file, len(was), len(is))
	}
	differ := 0
	for seed := range is {
		if is[seed] == was[seed] {
			continue
		}
		if differ++; differ == 1 {
			t.Errorf("seed %d differs: compare what -sums.show=%d prints with what it printed before; run with -sums.update to accept", seed, seed)
		}
	}
	if differ > 0 {
		t.Errorf("%d of %d seeds differ from %s", differ, seeds, file)
	}
}

var numbers = regexp.MustCompile(`[0-9]+`)

// Err is what a sum says of an error: that there is one, and the numbers in it, since its words may change.
func Err(err error) string {
	if err == nil {
		return "nil"
	}
	return fmt.Sprint("error ", numbers.FindAllString(err.Error(), -1))
}

// edges are numbers near which mistakes are made.
var edges = []uint64{0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 1 << 15, 1<<15 - 1, 1 << 16, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32,
	1<<50 + 1, 1 << 63, 1<<64 - 1}

// Edge is one of those numbers, or near n, or any small one.
func Edge(rng *rand.Rand, n uint64) uint64 {
	switch rng.IntN(4) {
	case 0:
		return n + uint64(rng.IntN(5)) - 2
	case 1:
		return uint64(rng.IntN(40))
	default:
		return edges[rng.IntN(len(edges))]
	}
}

// Mangle changes a copy of b in a few places, or cuts it, or makes it longer.
func Mangle(rng *rand.Rand, b []byte) []byte {
	b = append([]byte(nil), b...)
	for range 1 + rng.IntN(2) {
		if len(b) == 0 {
			return b
		}
		at := rng.IntN(len(b))
		switch rng.IntN(8) {
		case 0:
			b = b[:at]
		case 1:
			b = append(b, make([]byte, 1+rng.IntN(16))...)
		case 2:
			b[at] ^= 1 << rng.IntN(8)
		case 3:
			b[at] = byte(Edge(rng, uint64(b[at])))
		case 4, 5:
			if at &^= 3; at+4 <= len(b) {
				binary.LittleEndian.PutUint32(b[at:], uint32(Edge(rng, uint64(binary.LittleEndian.Uint32(b[at:])))))
			}
		case 6:
			if at &^= 7; at+8 <= len(b) {
				binary.LittleEndian.PutUint64(b[at:], Edge(rng, binary.LittleEndian.Uint64(b[at:])))
			}
		case 7: // the same again
		}
	}
	return b
}
