// Package golden compares the results of functions for many random inputs with their earlier results. A test writes a text for
// each seed; testdata/NAME.golden holds the first lines of these texts, and one checksum of the rest. A difference means a
// change, not necessarily a mistake: a reader of the file judges it. To accept a change, run the test with
// "-args -golden.update". To compare the whole text of two commits, write it to files with "-args -golden.out=DIRECTORY".
package golden

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

var (
	update = flag.Bool("golden.update", false, "rewrite the golden files")
	out    = flag.String("golden.out", "", "write the whole text of each golden file to this directory")
)

// shown is how many bytes of the text a golden file holds. The checksum covers the other lines.
const shown = 16 << 10

// Check compares what story writes for the seeds from 0 to seeds-1 with testdata/NAME.golden. A story must write the same
// text in every run: it sorts text that depends on the order of goroutines or of a map.
func Check(t *testing.T, name string, seeds int, story func(rng *rand.Rand, w io.Writer)) {
	t.Helper()
	var text bytes.Buffer
	for seed := range seeds {
		fmt.Fprintf(&text, "--- seed %d\n", seed)
		story(rand.New(rand.NewPCG(uint64(seed), 1)), &text)
	}
	file := filepath.Join("testdata", name+".golden")
	if *out != "" {
		if err := os.WriteFile(filepath.Join(*out, name+".txt"), text.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	is := shorten(collapse(text.Bytes()))
	if *update {
		err := os.MkdirAll("testdata", 0o755)
		if err == nil {
			err = os.WriteFile(file, is, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v (run with -args -golden.update to make it)", err)
	}
	if at, got, want := differ(is, was); at > 0 {
		t.Errorf("%s: line %d differs\n  is  %s\n  was %s\n-args -golden.update accepts all differences; -args -golden.out=DIRECTORY writes the whole text", file, at, got, want)
	}
}

// collapse replaces lines that repeat the line before by their number.
func collapse(text []byte) []byte {
	var short, last []byte
	again := 0
	for line := range bytes.Lines(text) {
		if bytes.Equal(line, last) {
			again++
			continue
		}
		if again > 0 {
			short = fmt.Appendf(short, "... and %d more\n", again)
		}
		short, last, again = append(short, line...), line, 0
	}
	if again > 0 {
		short = fmt.Appendf(short, "... and %d more\n", again)
	}
	return short
}

// shorten returns the first lines of text, and a line with a checksum of the other lines.
func shorten(text []byte) []byte {
	if len(text) <= shown {
		return text
	}
	end := bytes.LastIndexByte(text[:shown], '\n') + 1
	h := fnv.New64a()
	_, _ = h.Write(text[end:])
	return fmt.Appendf(bytes.Clone(text[:end]), "--- and %d lines with the checksum %016x\n", bytes.Count(text[end:], []byte("\n")), h.Sum64())
}

// differ returns the number of the first line that differs, from 1 on, and both lines; 0 if there is none.
func differ(is, was []byte) (at int, got, want []byte) {
	if bytes.Equal(is, was) {
		return 0, nil, nil
	}
	for at = 1; ; at++ {
		got, is, _ = bytes.Cut(is, []byte("\n"))
		want, was, _ = bytes.Cut(was, []byte("\n"))
		if !bytes.Equal(got, want) || len(is) == 0 && len(was) == 0 {
			return at, got, want
		}
	}
}

var numbers = regexp.MustCompile(`[0-9]+`)

// Err describes an error in a golden text: that there is one, and the numbers in it. Its words may change.
func Err(err error) string {
	if err == nil {
		return "nil"
	}
	return fmt.Sprint("error ", numbers.FindAllString(err.Error(), -1))
}

// edges are numbers near which code often is wrong.
var edges = []uint64{0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 1 << 15, 1<<15 - 1, 1 << 16, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32,
	1<<50 + 1, 1 << 63, 1<<64 - 1}

// Edge returns one of edges, a number near n, or a small number.
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
