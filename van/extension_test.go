package van_test

import (
	"bytes"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

func TestExtension(t *testing.T) {
	for _, id := range []van.NodeExtension{
		{Incarnation: 1},
		{Incarnation: 0xfedcba98, Cluster: 0x01020304},
		{Incarnation: 3, Settings: van.Settings{Known: true}},
		{Incarnation: 3, Settings: van.Settings{Known: true, Resend: true}},
		{Incarnation: 3, Settings: van.Settings{Known: true, TLS: true}},
		{Incarnation: 3, Settings: van.Settings{Known: true}, Local: []byte("x")},
		{Incarnation: 3, DataPort: 65535},
		{Incarnation: 3, Settings: van.Settings{Known: true}},
		{Incarnation: 3, Settings: van.Settings{Known: true, Resend: true, Workers: van.MaxCount, Servers: 1}},
		{Incarnation: 3, Settings: van.Settings{Known: true, Workers: 1, Servers: van.MaxCount}},
		{Incarnation: 7, Cluster: 9, Local: []byte("shared memory")},
		{Incarnation: 7, Local: bytes.Repeat([]byte{0xff}, van.MaxLocalLen)},
	} {
		b := id.Encode()
		got, ok := van.ParseExtension(b)
		if !ok || got.Incarnation != id.Incarnation || got.Cluster != id.Cluster || got.Settings != id.Settings || got.DataPort != id.DataPort || !bytes.Equal(got.Local, id.Local) {
			t.Errorf("%+v came back as %+v, %t", id, got, ok)
		}
		if (got.Local == nil) != (id.Local == nil) {
			t.Errorf("%+v: Local came back as %#v", id, got.Local)
		}
		if len(b) > van.MaxEndpointName {
			t.Errorf("%+v takes %d bytes", id, len(b))
		}
	}
	want := []byte("SAFN\x06\x00\x00\x00\x98\xba\xdc\xfe\x04\x03\x02\x01\x00\x00\x00\x00\x00\x00\x00\x00ab")
	if b := (&van.NodeExtension{Incarnation: 0xfedcba98, Cluster: 0x01020304, Local: []byte("ab")}).Encode(); !bytes.Equal(b, want) {
		t.Errorf("encoded as %q, want %q", b, want)
	}
	tests := []struct {
		s    van.Settings
		want string // bytes 16 to 19
	}{
		{van.Settings{Resend: true}, "\x00\x00\x00\x00"}, // not known
		{van.Settings{Known: true}, "\x01\x00\x00\x00"},
		{van.Settings{Known: true, Resend: true}, "\x03\x00\x00\x00"},
		{van.Settings{Known: true, TLS: true}, "\x09\x00\x00\x00"},
		{van.Settings{TLS: true}, "\x00\x00\x00\x00"},
		{van.Settings{Known: true, Workers: 1, Servers: 2}, "\x11\x00\x08\x00"},
		{van.Settings{Known: true, Workers: van.MaxCount + 1, Servers: 2}, "\x01\x00\x00\x00"}, // too many to tell
		{van.Settings{Workers: 1}, "\x00\x00\x00\x00"},
	}
	for _, tt := range tests {
		if b := (&van.NodeExtension{Incarnation: 1, Settings: tt.s}).Encode(); string(b[16:20]) != tt.want {
			t.Errorf("%+v: bytes 16 to 19 are % x, want % x", tt.s, b[16:20], tt.want)
		}
	}
	for _, tt := range []struct {
		b    []byte
		want uint32
		ok   bool
	}{
		{want, van.ExtensionVersion, true},
		{[]byte("SAFN\x07\x00\x00\x00 and what we do not know"), 7, true},
		{want[:8], van.ExtensionVersion, true},
		{want[:7], 0, false},
		{append([]byte("SAFL"), want[4:]...), 0, false},
		{make([]byte, 64), 0, false},
		{nil, 0, false},
	} {
		if v, ok := van.ExtensionVersionOf(tt.b); v != tt.want || ok != tt.ok {
			t.Errorf("%q: version %d, %t, want %d, %t", tt.b, v, ok, tt.want, tt.ok)
		}
	}
	for what, b := range map[string][]byte{
		"nothing":         nil,
		"cut":             want[:23],
		"other magic":     append([]byte("SAFL"), want[4:]...),
		"other version":   append([]byte("SAFN\x07\x00\x00\x00"), want[8:]...),
		"incarnation 0":   append([]byte("SAFN\x06\x00\x00\x00\x00\x00\x00\x00"), want[12:]...),
		"more than fits":  append(bytes.Clone(want), make([]byte, 64)...),
		"of the original": make([]byte, 64),
	} {
		if id, ok := van.ParseExtension(b); ok {
			t.Errorf("%s: parsed as %+v", what, id)
		}
	}
}

// TestIncarnations: incarnations survive the codec at the bytes that nodes of the original read
// and do not use.
func TestIncarnations(t *testing.T) {
	var m van.Meta
	m.Reset()
	m.SetIncarnations(0x11223344, 0x55667788)
	b, err := m.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := []byte{0x44, 0x33, 0x22, 0x11, 0x88, 0x77, 0x66, 0x55}; !bytes.Equal(b[184:192], want) {
		t.Errorf("bytes 184 to 191 are % x, want % x", b[184:192], want)
	}
	var d van.Meta
	if err := van.DecodeMeta(b, &d); err != nil {
		t.Fatal(err)
	}
	if from, to := d.Incarnations(); from != 0x11223344 || to != 0x55667788 {
		t.Errorf("decoded as %#x, %#x", from, to)
	}
}
