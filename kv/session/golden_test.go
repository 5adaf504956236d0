package session

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// TestParsersGolden: results of parsing arbitrary bodies and values, and of writing them again.
func TestParsersGolden(t *testing.T) {
	types := []string{"bool", "int8", "uint8", "int16", "float16", "bfloat16", "float32", "int64", "float64", "complex128", "", "object"}
	value := func(rng *rand.Rand) any {
		switch rng.IntN(9) {
		case 0:
			return nil
		case 1:
			return rng.IntN(2) == 0
		case 2:
			return int64(golden.Edge(rng, 5))
		case 3:
			return rng.Float64()
		case 4:
			return string(bytes.Repeat([]byte{'x'}, rng.IntN(20)))
		case 5:
			return make([]byte, rng.IntN(20))
		case 6:
			return HandleID(golden.Edge(rng, 5))
		default:
			a := Array{Type: types[rng.IntN(9)], Shape: []int{}}
			n := sizes[a.Type]
			for range rng.IntN(4) {
				a.Shape = append(a.Shape, rng.IntN(4))
				n *= a.Shape[len(a.Shape)-1]
			}
			a.Data = make([]byte, n)
			return a
		}
	}
	golden.Check(t, "parsers", 40, func(rng *rand.Rand, w io.Writer) {
		want := int32(1 + rng.IntN(int(wantForget)+1))
		q := request{session: 7, seq: golden.Edge(rng, 3), ranks: 4, handle: 6, text: "name"}
		for range rng.IntN(4) {
			q.kills = append(q.kills, rng.Uint64N(10))
		}
		for range 1 + rng.IntN(3) {
			q.values = append(q.values, value(rng))
		}
		good, err := q.append(nil, want)
		fmt.Fprintf(w, "%x %s\n", good, golden.Err(err))
		a := answer{session: 7, seq: 3, outcome: outcome(rng.IntN(3)), text: "why", value: value(rng), handles: []uint64{1, 2}}
		wrote, err := a.append(nil, want)
		fmt.Fprintf(w, "%x %s\n", wrote, golden.Err(err))
		enc, err := Encode(q.values...)
		fmt.Fprintf(w, "%x %s\n", enc, golden.Err(err))
		for range 60 {
			got, err := parseRequest(want, golden.Mangle(rng, good))
			fmt.Fprintln(w, got, golden.Err(err))
			back, err := parseAnswer(want, golden.Mangle(rng, wrote))
			fmt.Fprintln(w, back, golden.Err(err))
			l, err := Decode(golden.Mangle(rng, enc))
			fmt.Fprintln(w, len(l), golden.Err(err))
			x := Array{Type: types[rng.IntN(len(types))]}
			n := max(sizes[x.Type], 1)
			for range rng.IntN(4) {
				x.Shape = append(x.Shape, rng.IntN(6)-1)
				n *= max(x.Shape[len(x.Shape)-1], 0)
			}
			if rng.IntN(20) == 0 {
				x.Shape = append(x.Shape, make([]int, maxDims-len(x.Shape)+rng.IntN(3)-1)...)
			}
			if rng.IntN(10) == 0 {
				x.Shape = append(x.Shape, int(golden.Edge(rng, 1<<31)&(1<<40-1)))
			}
			x.Data = make([]byte, max(n+rng.IntN(3)-1, 0))
			fmt.Fprintln(w, golden.Err(x.check()))
		}
	})
}

// TestRankModel: a rank's values under its handles after any calls, against a map.
func TestRankModel(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 5))
		closed := 0
		s := &serving{r: &Rank{}, ctx: t.Context(), values: map[uint64]any{}, funcs: map[string]Function{}}
		want := map[uint64]any{}
		has := func() (l []uint64) {
			for id, v := range want {
				if _, none := v.(noValue); !none {
					l = append(l, id)
				}
			}
			slices.Sort(l)
			return l
		}
		open := 0
		for id := range uint64(200) {
			switch rng.IntN(5) {
			case 0:
				c := &closer{n: &closed}
				s.drop(id)
				s.values[id], want[id] = c, c
				open++
			case 1:
				s.values[id], want[id] = noValue("no"), noValue("no")
			case 2: // kills, some of handles that are not there
				for range 3 {
					k := rng.Uint64N(id + 1)
					if _, is := want[k].(*closer); is {
						open--
					}
					delete(want, k)
					s.drop(k)
				}
			case 3:
				w := pendingCall{q: request{handle: id, values: []any{int64(id)}}}
				w.m.Head = wantSet
				if a := s.do(w); a.outcome != done {
					t.Fatalf("set: %+v", a)
				}
				want[id] = int64(id)
			case 4:
				k := rng.Uint64N(id + 1)
				w := pendingCall{q: request{handle: k}}
				w.m.Head = wantGet
				a := s.do(w)
				v, is := want[k]
				_, none := v.(noValue)
				if ok := is && !none; ok != (a.outcome == done) || ok && a.value != v {
					t.Fatalf("get of %d: %+v, want %v", k, a, v)
				}
			}
			w := pendingCall{}
			w.m.Head = wantList
			if a := s.do(w); !slices.Equal(a.handles, has()) {
				t.Fatalf("handles %d, want %d", a.handles, has())
			}
		}
		total := open
		for id := range want {
			s.drop(id)
		}
		if closed < total || len(s.values) != 0 {
			t.Errorf("%d results closed, want %d at least; %d are left", closed, total, len(s.values))
		}
	}
}

type closer struct {
	n    *int
	once bool
}

func (c *closer) Close() error {
	if c.once {
		panic("closed twice")
	}
	c.once = true
	*c.n++
	return nil
}
