// Package value makes the values that tests push and pull, and checks them. A value begins with its origin, and all of its
// bytes follow from the origin and the length. The simulation and the tests of real processes use it.
package value

import (
	"encoding/binary"
	"fmt"
)

// Kinds of values.
const (
	Pushed   = 0x50555348 // by a worker
	Answered = 0x414e5352 // by a server
)

// Origin names a value: of which call of which process it is, and its place there.
type Origin struct {
	Kind    uint32
	Worker  uint32 // the rank of the calling worker
	Process uint32 // the number of the worker's process
	Server  uint32 // the rank of the answering server; over kv also of the server that gets a pushed value
	By      uint32 // the number of the server's process
	Index   uint32 // of the tensor in its list
	Call    uint64 // counted by the worker's process
}

// Head is the number of bytes of an origin, and the smallest length of a value.
const Head = 32

// String describes the value.
func (o Origin) String() string {
	switch {
	case o.Kind == Pushed && o.Server != 0: // over kv
		return fmt.Sprintf("push tensor %d of call %d of worker %d, process %d, for server %d", o.Index, o.Call, o.Worker, o.Process, o.Server)
	case o.Kind == Pushed:
		return fmt.Sprintf("push tensor %d of call %d of worker %d, process %d", o.Index, o.Call, o.Worker, o.Process)
	}
	return fmt.Sprintf("answer %d of server %d, process %d, to call %d of worker %d, process %d", o.Index, o.Server, o.By, o.Call, o.Worker, o.Process)
}

// Of reads the origin of a value. Check checks the rest.
func Of(b []byte) (o Origin, err error) {
	if len(b) < Head {
		return o, fmt.Errorf("%d bytes, want at least %d", len(b), Head)
	}
	if _, err := binary.Decode(b, binary.LittleEndian, &o); err != nil {
		return o, err
	}
	if o.Kind != Pushed && o.Kind != Answered {
		return o, fmt.Errorf("% x is no value of these tests", b[:Head])
	}
	return o, nil
}

// bytes returns the source of the bytes after the origin of a value of that length.
func (o Origin) bytes(length int) random {
	x := uint64(o.Kind)<<32 | uint64(o.Worker)<<16 ^ uint64(o.Server)
	x = x*0x9e3779b97f4a7c15 + uint64(o.Process)<<32 + uint64(o.By)
	x = x*0x9e3779b97f4a7c15 + o.Call
	x = x*0x9e3779b97f4a7c15 + uint64(length)
	return random(x*0x9e3779b97f4a7c15 + uint64(o.Index))
}

// random is the state of SplitMix64.
type random uint64

func (x *random) next() uint64 {
	*x += 0x9e3779b97f4a7c15
	z := uint64(*x)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Fill makes b, of at least Head bytes, the value of o.
func (o Origin) Fill(b []byte) {
	if _, err := binary.Encode(b, binary.LittleEndian, o); err != nil {
		panic(err) // b is too short
	}
	x := o.bytes(len(b))
	i := Head
	for ; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], x.next())
	}
	for ; i < len(b); i++ {
		b[i] = byte(x.next())
	}
}

// Check returns an error that names the first bytes of b that are not those of the value of o.
func (o Origin) Check(b []byte) error {
	got, err := Of(b)
	if err != nil {
		return err
	}
	if got != o {
		return fmt.Errorf("has %s, want %s", got, o)
	}
	x := o.bytes(len(b))
	i := Head
	for ; i+8 <= len(b); i += 8 {
		if w, want := binary.LittleEndian.Uint64(b[i:]), x.next(); w != want {
			return fmt.Errorf("%s: bytes %d to %d of %d are %#x, want %#x", o, i, i+7, len(b), w, want)
		}
	}
	for ; i < len(b); i++ {
		if want := byte(x.next()); b[i] != want {
			return fmt.Errorf("%s: byte %d of %d is %#x, want %#x", o, i, len(b), b[i], want)
		}
	}
	return nil
}
