package real

import (
	"encoding/binary"
	"fmt"
)

// Kinds of values.
const (
	pushed   = 0x50555348 // by a worker
	answered = 0x414e5352 // by a server
)

// origin says which value of which request of which process something is. Every byte of
// the value follows from it.
type origin struct {
	kind   uint32
	rank   uint32 // of the worker that asked
	serial uint32 // of the worker's process
	server uint32 // that answered, by rank; over kv also the one that a value is pushed to
	by     uint32 // the server's process
	index  uint32 // of the tensor in its list
	call   uint64 // counted by the worker's process
}

// headSize is the least size of a value.
const headSize = 32

func (o origin) String() string {
	switch {
	case o.kind == pushed && o.server != 0: // over kv
		return fmt.Sprintf("push tensor %d of call %d of worker %d, process %d, for server %d", o.index, o.call, o.rank, o.serial, o.server)
	case o.kind == pushed:
		return fmt.Sprintf("push tensor %d of call %d of worker %d, process %d", o.index, o.call, o.rank, o.serial)
	}
	return fmt.Sprintf("answer %d of server %d, process %d, to call %d of worker %d, process %d", o.index, o.server, o.by, o.call, o.rank, o.serial)
}

func (o origin) head(b []byte) {
	binary.LittleEndian.PutUint32(b, o.kind)
	binary.LittleEndian.PutUint32(b[4:], o.rank)
	binary.LittleEndian.PutUint32(b[8:], o.serial)
	binary.LittleEndian.PutUint32(b[12:], o.server)
	binary.LittleEndian.PutUint32(b[16:], o.by)
	binary.LittleEndian.PutUint32(b[20:], o.index)
	binary.LittleEndian.PutUint64(b[24:], o.call)
}

// originOf reads the head of a value.
func originOf(b []byte) (o origin, err error) {
	if len(b) < headSize {
		return o, fmt.Errorf("%d bytes, want at least %d", len(b), headSize)
	}
	o = origin{kind: binary.LittleEndian.Uint32(b), rank: binary.LittleEndian.Uint32(b[4:]), serial: binary.LittleEndian.Uint32(b[8:]),
		server: binary.LittleEndian.Uint32(b[12:]), by: binary.LittleEndian.Uint32(b[16:]), index: binary.LittleEndian.Uint32(b[20:]),
		call: binary.LittleEndian.Uint64(b[24:])}
	if o.kind != pushed && o.kind != answered {
		return o, fmt.Errorf("% x is no value of these tests", b[:headSize])
	}
	return o, nil
}

// seed is where the bytes after the head begin.
func (o origin) seed() uint64 {
	x := uint64(o.kind)<<32 | uint64(o.rank)<<16 ^ uint64(o.server)
	x = x*0x9e3779b97f4a7c15 + uint64(o.serial)<<32 + uint64(o.by)
	x = x*0x9e3779b97f4a7c15 + o.call
	return x*0x9e3779b97f4a7c15 + uint64(o.index)
}

// next is splitmix64.
func next(x *uint64) uint64 {
	*x += 0x9e3779b97f4a7c15
	z := *x
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// fill makes b, of at least headSize bytes, the value of o.
func (o origin) fill(b []byte) {
	o.head(b)
	x := o.seed()
	i := headSize
	for ; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], next(&x))
	}
	for ; i < len(b); i++ {
		b[i] = byte(next(&x))
	}
}

// check says where b is not the value of o.
func (o origin) check(b []byte) error {
	got, err := originOf(b)
	if err != nil {
		return err
	}
	if got != o {
		return fmt.Errorf("has %s, want %s", got, o)
	}
	x := o.seed()
	i := headSize
	for ; i+8 <= len(b); i += 8 {
		if w, want := binary.LittleEndian.Uint64(b[i:]), next(&x); w != want {
			return fmt.Errorf("%s: bytes %d to %d of %d are %#x, want %#x", o, i, i+7, len(b), w, want)
		}
	}
	for ; i < len(b); i++ {
		if want := byte(next(&x)); b[i] != want {
			return fmt.Errorf("%s: byte %d of %d is %#x, want %#x", o, i, len(b), b[i], want)
		}
	}
	return nil
}
