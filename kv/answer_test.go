package kv

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestAnswerOutOfPlace: an answer is refused if its server was not asked, or if the transport placed it in less
// memory.
func TestAnswerOutOfPlace(t *testing.T) {
	msg := &van.Message{}
	msg.Reset()
	msg.Frames, msg.DataTypes = 2, []van.DataType{van.TypeUint64, typeOf[float32]()}
	msg.Keys = backend.Bytes(binary.LittleEndian.AppendUint64(nil, 7))
	c := &call[float32]{sized: true, keys: []Key{1, 7}, vals: make([]float32, 4)}
	c.parts = []part[float32]{{k0: 0, k1: 1, v0: 0, v1: 2}, {k0: 1, k1: 2, v0: 2, v1: 4}}
	c.missing.Store(2)
	c.asked.Store(1)
	answer := func(from, values int, placed bool) error {
		x := make([]float32, values)
		for i := range x {
			x[i] = 5
		}
		msg.Vals, msg.Placed = backend.Slice(x), placed
		return c.Answer(0, from, msg)
	}
	if err := answer(1, 2, false); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("an answer of a server that was not asked: %v", err)
	}
	c.asked.Store(2)
	for _, n := range []int{1, 3} {
		if err := answer(1, n, true); err == nil {
			t.Errorf("%d values were placed in room for 2", n)
		}
	}
	c.outLens = new([]int32) // the lengths are not known beforehand
	if err := answer(1, 3, true); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("3 values were placed in room for 2: %v", err)
	}
	if c.missing.Load() != 2 || c.vals[2] != 0 {
		t.Errorf("%d answers are missing, and values are %v", c.missing.Load(), c.vals)
	}
	c.outLens = nil
	if err := answer(1, 2, false); err != nil || c.missing.Load() != 1 || c.vals[2] != 5 || c.vals[1] != 0 {
		t.Errorf("the answer: %v; %d are missing, values are %v", err, c.missing.Load(), c.vals)
	}
}
