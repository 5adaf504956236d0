package van

import "testing"

// FuzzDecodeMeta: a meta that decodes can be encoded, to the same length, and
// decodes to an equal meta; no input panics.
func FuzzDecodeMeta(f *testing.F) {
	for _, v := range loadVectors(f) {
		f.Add(v.packed)
	}
	seen := map[string]bool{}
	for _, s := range loadSessions(f) {
		for _, packed := range s.Metas() {
			if !seen[string(packed)] {
				seen[string(packed)] = true
				f.Add(packed)
			}
		}
	}
	// Used again and again, as transports do.
	var again Meta
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Meta
		if err := DecodeMeta(b, &m); err != nil {
			if err.Error() == "" {
				t.Error("an error that says nothing")
			}
			if DecodeMeta(b, &again) == nil {
				t.Errorf("decoded into a used Meta, though not into a new one: %v", err)
			}
			return
		}
		if n := cap(m.Body) + nodeSize*cap(m.Control.Nodes) + dataTypeSize*cap(m.DataTypes); n > 4*len(b) {
			t.Errorf("%d bytes of capacity for a frame of %d", n, len(b))
		}
		packed, err := m.AppendTo(nil)
		if err != nil {
			t.Fatalf("decoded but does not encode: %v", err)
		}
		if len(packed) != len(b) {
			t.Errorf("encodes to %d bytes, want %d", len(packed), len(b))
		}
		if err := DecodeMeta(packed, &again); err != nil {
			t.Fatalf("own encoding does not decode: %v", err)
		}
		if !sameMeta(&again, &m) {
			t.Errorf("decoded again:\n%+v\nwant\n%+v", again, m)
		}
	})
}
