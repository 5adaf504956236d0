package kv

import (
	"fmt"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Key names a value. Keys up to the largest uint64 may be used.
type Key = uint64

// Value is what a value may be made of: Go's numbers of fixed size. All of them
// have a data type of their own on the wire.
type Value interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~float32 | ~float64
}

// typeOf is the data type that ps-lite gives frames of V.
func typeOf[V Value]() van.DataType {
	zero, one := V(0), V(1)
	switch size := unsafe.Sizeof(zero); {
	case one/2 != 0 && size == 4:
		return van.TypeFloat
	case one/2 != 0:
		return van.TypeDouble
	case zero-1 < zero:
		return [...]van.DataType{1: van.TypeInt8, 2: van.TypeInt16, 4: van.TypeInt32, 8: van.TypeInt64}[size]
	default:
		return [...]van.DataType{1: van.TypeUint8, 2: van.TypeUint16, 4: van.TypeUint32, 8: van.TypeUint64}[size]
	}
}

// sizeOf is the number of bytes of one V.
func sizeOf[V any]() int {
	var zero V
	return int(unsafe.Sizeof(zero))
}

// view is the whole elements in host memory m, which need not be aligned.
func view[T any](m backend.Mem) []T {
	b := m.Host()
	if len(b) < sizeOf[T]() {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), len(b)/sizeOf[T]())
}

// keysEqual reports whether a key frame holds exactly keys.
func keysEqual(frame backend.Mem, keys []Key) bool {
	return string(frame.Host()) == string(backend.Slice(keys).Host()) // compares, without conversion
}

// frames is what the data frames of a message hold.
type frames[V any] struct {
	keys []Key
	vals []V
	lens []int32 // nil when there is no such frame
}

// parse checks the data frames of a message with values of type V. The views are
// valid as long as msg is. Values of a pull request are ignored.
func parse[V Value](msg *van.Message) (f frames[V], err error) {
	switch {
	case msg.Frames < 2:
		return f, fmt.Errorf("%w: %d data frames, want keys, values and perhaps lengths", van.ErrMalformed, msg.Frames)
	case len(msg.DataTypes) != msg.Frames:
		return f, fmt.Errorf("%w: %d data types for %d data frames", van.ErrMalformed, len(msg.DataTypes), msg.Frames)
	case msg.Keys.Len() == 0 || msg.Keys.Len()%8 != 0:
		return f, fmt.Errorf("%w: %d key bytes, want a positive multiple of 8", van.ErrMalformed, msg.Keys.Len())
	}
	// C++'s char has the data type OTHER: only the sizes can be checked then.
	if t, want := msg.DataTypes[1], typeOf[V](); t != want && t != van.TypeOther && t != van.TypeChar {
		return f, fmt.Errorf("%w: values of data type %s, want %s", van.ErrMalformed, t, want)
	}
	if !msg.Vals.OnHost() {
		return f, fmt.Errorf("%w: values in memory of %s, want host memory", van.ErrInvalid, msg.Vals.Device())
	}
	f.keys = view[Key](msg.Keys)
	if msg.Frames == 3 && msg.Lens.Len() > 0 {
		if msg.Lens.Len() != 4*len(f.keys) {
			return f, fmt.Errorf("%w: %d bytes of lengths for %d keys, want 4 each", van.ErrMalformed, msg.Lens.Len(), len(f.keys))
		}
		f.lens = view[int32](msg.Lens)
	}
	if msg.Request && !msg.Push {
		return f, nil
	}
	if msg.Vals.Len()%sizeOf[V]() != 0 {
		return f, fmt.Errorf("%w: %d value bytes, want a multiple of %d", van.ErrMalformed, msg.Vals.Len(), sizeOf[V]())
	}
	f.vals = view[V](msg.Vals)
	return f, checkShape(van.ErrMalformed, f.keys, len(f.vals), f.lens)
}

// checkShape returns an error unless vals values belong to keys: by lens, or without lens evenly. The error wraps
// kind.
func checkShape(kind error, keys []Key, vals int, lens []int32) error {
	if len(lens) == 0 {
		if len(keys) == 0 && vals > 0 || len(keys) > 0 && vals%len(keys) != 0 {
			return fmt.Errorf("%w: %d values for %d keys, want the same number for each", kind, vals, len(keys))
		}
		return nil
	}
	if len(lens) != len(keys) {
		return fmt.Errorf("%w: %d lengths for %d keys", kind, len(lens), len(keys))
	}
	sum := 0
	for i, l := range lens {
		if l < 0 {
			return fmt.Errorf("%w: lens[%d] = %d (key %d) is negative", kind, i, l, keys[i])
		}
		sum += int(l)
	}
	if sum != vals {
		return fmt.Errorf("%w: the lengths add up to %d, there are %d values", kind, sum, vals)
	}
	return nil
}

// checkKeys returns an error unless keys ascend without repeats. The error wraps kind.
func checkKeys(kind error, keys []Key) error {
	for i := 1; i < len(keys); i++ {
		if keys[i] <= keys[i-1] {
			return fmt.Errorf("%w: keys[%d] = %d after keys[%d] = %d, want ascending keys without repeats", kind, i, keys[i], i-1, keys[i-1])
		}
	}
	return nil
}
