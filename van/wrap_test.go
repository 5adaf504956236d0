package van

import (
	"fmt"
	"testing"
)

type plain struct{ Van }

type able struct {
	Van
	Meter
}

type wrapping struct{ Van }

func (w wrapping) Unwrap() Van { return w.Van }

func TestAs(t *testing.T) {
	inner := &able{}
	for _, c := range []struct {
		name string
		v    Van
		want Meter
	}{
		{"itself", inner, inner},
		{"wrapped twice", wrapping{wrapping{inner}}, inner},
		{"nobody", wrapping{plain{}}, nil},
		{"hidden", plain{inner}, nil},
		{"nil", nil, nil},
	} {
		if got, ok := As[Meter](c.v); got != c.want || ok != (c.want != nil) {
			t.Errorf("%s: As = %v, %t; want %v", c.name, got, ok, c.want)
		}
	}
}

func TestCopyFrom(t *testing.T) {
	made := func() (m Meta) {
		m.Reset()
		m.Body = []byte("body")
		m.DataTypes = []DataType{TypeUint64, TypeOther}
		m.Control.Nodes = []Node{{Hostname: "a", Ports: []int32{1}, DevIDs: []int32{2}, DevTypes: []int32{3}, Endpoint: []byte{4}}, {Hostname: "b"}}
		return m
	}
	src, want := made(), made()
	var dst Meta
	dst.CopyFrom(&src)
	for range 2 { // the second time into used memory
		n := &src.Control.Nodes[0]
		src.Body[0], src.DataTypes[0], n.Ports[0], n.DevIDs[0], n.DevTypes[0], n.Endpoint[0] = 'x', 0, 9, 9, 9, 9
		// Compared as text: an empty slice may be nil or not.
		if got, want := fmt.Sprintf("%+v", dst), fmt.Sprintf("%+v", want); got != want {
			t.Errorf("the copy shares memory with its source: %s\nwant %s", got, want)
		}
		src = made()
		dst.CopyFrom(&src)
	}
	if n := testing.AllocsPerRun(100, func() { dst.Reset(); dst.CopyFrom(&src) }); n != 0 {
		t.Errorf("%v allocations for a copy into used memory, want 0", n)
	}
}
