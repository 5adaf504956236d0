package van

import (
	"reflect"
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
	var src, dst Meta
	src.Reset()
	src.Body = []byte("body")
	src.DataTypes = []DataType{TypeUint64, TypeOther}
	src.Control.Nodes = []Node{{Hostname: "a", Ports: []int32{1}, DevIDs: []int32{2}, DevTypes: []int32{3}, Endpoint: []byte{4}}, {Hostname: "b"}}
	dst.CopyFrom(&src)
	var again Meta
	again.CopyFrom(&src)
	src.Body[0], src.DataTypes[0], src.Control.Nodes[0].Ports[0], src.Control.Nodes[0].Endpoint[0] = 'x', 0, 9, 9
	if !reflect.DeepEqual(dst, again) || string(dst.Body) != "body" || dst.Control.Nodes[0].Ports[0] != 1 {
		t.Errorf("the copy shares memory with its source: %+v", dst)
	}
	if n := testing.AllocsPerRun(100, func() { dst.Reset(); dst.CopyFrom(&src) }); n != 0 {
		t.Errorf("%v allocations for a copy into used memory, want 0", n)
	}
}
