package streams

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

func example(v verb) note {
	if v == verbOver {
		return note{verb: v, id: 7, text: "why"}
	}
	n := note{verb: v, id: 1 << 63, out: []part{}, in: []part{}}
	n.flags = flagsName{export: backend.Export{Allocation: 3, Base: 1 << 40, Size: gpusync.PageLen, Offset: 4096}, at: 2 * slotStride, token: gpusync.Token{1, 15: 9}}
	n.flags.export.Handle[63] = 5
	n.out = append(n.out, part{key: 1, len: 100, export: backend.Export{Allocation: 4, Base: 1 << 41, Size: 1000, Offset: 900}}, part{key: 2})
	if v == verbOffer {
		n.in = append(n.in, part{key: 9, len: maxBytes})
	}
	return n
}

func TestWire(t *testing.T) {
	for _, v := range []verb{verbOffer, verbAccept, verbOver} {
		n := example(v)
		got, err := parse(n.append(nil))
		if err != nil || !reflect.DeepEqual(got, n) {
			t.Errorf("verb %d: %v, got\n%+v, want\n%+v", v, err, got, n)
		}
	}
	long := note{verb: verbOver, text: strings.Repeat("x", maxText+1)}
	if got, err := parse(long.append(nil)); err != nil || len(got.text) != maxText {
		t.Errorf("a long text: %v, %d bytes, want %d", err, len(got.text), maxText)
	}
}

// TestMalformed: each field that makes no sense is named.
func TestMalformed(t *testing.T) {
	changed := func(v verb, f func(n *note)) []byte {
		n := example(v)
		f(&n)
		return n.append(nil)
	}
	offer := changed(verbOffer, func(*note) {})
	set := func(at int, v byte) []byte {
		b := append([]byte(nil), offer...)
		b[at] = v
		return b
	}
	for _, c := range []struct {
		what, field string
		b           []byte
	}{
		{"nothing", "body_size", nil},
		{"a head alone", "body_size", offer[:headLen]},
		{"another version", "body version", set(0, version+1)},
		{"no verb", "body verb", set(1, 0)},
		{"a verb that there is not", "body verb", set(1, byte(lastVerb)+1)},
		{"a word in the head", "body word", changed(verbOffer, func(n *note) { n.flags.at = 0 })},
		{"a word between two", "body word", changed(verbOffer, func(n *note) { n.flags.at++ })},
		{"a word beyond any page", "body word", changed(verbOffer, func(n *note) { n.flags.at = gpusync.PageLen })},
		{"words beyond the allocation", "export", changed(verbOffer, func(n *note) { n.flags.export.Offset = gpusync.PageLen - slotStride })},
		{"a tensor beyond the allocation", "export", changed(verbAccept, func(n *note) { n.out[0].export.Offset = 901 })},
		{"too long a tensor", "body tensor length", changed(verbOffer, func(n *note) { n.in[0].len++ })},
		{"tensors that an answer has not", "body tensors", changed(verbAccept, func(n *note) { n.in = []part{{key: 1}} })},
		{"too few bytes", "body tensors", offer[:len(offer)-1]},
		{"too many bytes", "body tensors", append(offer, 0)},
		{"too many tensors", "body tensors", changed(verbOffer, func(n *note) { n.in = make([]part, maxTensors+1) })},
		{"too long a text", "body_size", append(changed(verbOver, func(n *note) { n.text = strings.Repeat("x", maxText) }), 'x')},
	} {
		_, err := parse(c.b)
		if f, ok := errors.AsType[*van.FieldError](err); !ok || f.Field != c.field {
			t.Errorf("%s: %v, want field %q", c.what, err, c.field)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, v := range []verb{verbOffer, verbAccept, verbOver} {
		n := example(v)
		f.Add(n.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := parse(b)
		if err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Errorf("%v, want %v", err, van.ErrMalformed)
			}
			return
		}
		again, err := parse(n.append(nil))
		if err != nil || !reflect.DeepEqual(again, n) {
			t.Errorf("%v, got\n%+v, want\n%+v", err, again, n)
		}
	})
}
