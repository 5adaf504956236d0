package kv

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// FuzzParse feeds arbitrary frames to the check of requests and answers. Accepted frames must be consistent;
// refused ones must be malformed.
func FuzzParse(f *testing.F) {
	two := []byte{1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0}
	f.Add(two, []byte{1, 0, 2, 0}, []byte(nil), 2, int32(van.TypeInt16), true, true)
	f.Add(two, []byte{1, 0, 2, 0, 3, 0}, []byte{1, 0, 0, 0, 2, 0, 0, 0}, 3, int32(van.TypeInt16), true, true)
	f.Add(two, []byte{1, 0, 2, 0}, []byte{255, 255, 255, 255, 3, 0, 0, 0}, 3, int32(van.TypeOther), false, false)
	f.Add(two[:15], []byte{}, []byte{}, 2, int32(van.TypeInt16), false, true)
	f.Fuzz(func(t *testing.T, keys, vals, lens []byte, frames int, typ int32, push, request bool) {
		m := &van.Message{}
		m.Frames, m.Push, m.Request = frames&3, push, request
		m.DataTypes = []van.DataType{van.TypeUint64, van.DataType(typ), van.TypeInt32}[:m.Frames]
		m.Keys, m.Vals, m.Lens = backend.Bytes(keys), backend.Bytes(vals), backend.Bytes(lens)
		p, err := parse[int16](m)
		if err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Fatalf("error %v", err)
			}
			return
		}
		if len(p.keys)*8 != len(keys) || len(p.keys) == 0 || p.keys[0] != binary.LittleEndian.Uint64(keys) {
			t.Fatalf("keys %v of % x", p.keys, keys)
		}
		if request && !push {
			return
		}
		if len(p.vals)*2 != len(vals) {
			t.Fatalf("%d values of %d bytes", len(p.vals), len(vals))
		}
		sum := 0
		for _, l := range p.lens {
			if l < 0 {
				t.Fatalf("length %d", l)
			}
			sum += int(l)
		}
		if p.lens != nil && (sum != len(p.vals) || len(p.lens) != len(p.keys)) || p.lens == nil && len(p.vals)%len(p.keys) != 0 {
			t.Fatalf("%d keys, %d values, lengths %v", len(p.keys), len(p.vals), p.lens)
		}
	})
}
