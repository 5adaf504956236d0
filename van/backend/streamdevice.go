package backend

// The methods of a device whose streams exchange memory with streams of other processes without the CPU.

import "fmt"

// StreamDevice is a device whose streams reach into the memory of other processes' devices.
type StreamDevice interface {
	Backend
	Exporter
	AsyncCopier
	GraphFlagger
	GatedCopier
	HostPinner
	StreamIdler
}

// StreamDeviceOf returns b as a StreamDevice. The error wraps ErrUnavailable if b cannot do that.
func StreamDeviceOf(b Backend) (StreamDevice, error) {
	return withAbilities[StreamDevice](b)
}

// FlagDevice is a device whose streams write and await flags in pinned host memory, also in captured graphs.
type FlagDevice interface {
	Backend
	GraphFlagger
	HostPinner
}

// FlagDeviceOf returns b as a FlagDevice. The error wraps ErrUnavailable if b cannot do that.
func FlagDeviceOf(b Backend) (FlagDevice, error) { return withAbilities[FlagDevice](b) }

func withAbilities[T any](b Backend) (T, error) {
	d, can := b.(T)
	if !can {
		return d, fmt.Errorf("%w: this node's backend is %s (STEPMESH_BAKCEND), want one of a GPU", ErrUnavailable, b.Name())
	}
	return d, nil
}
