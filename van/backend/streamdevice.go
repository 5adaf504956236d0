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
}

// StreamDeviceOf is b as one. The error wraps ErrUnavailable if b cannot do that.
func StreamDeviceOf(b Backend) (StreamDevice, error) {
	d, can := b.(StreamDevice)
	if !can {
		return nil, fmt.Errorf("%w: this node's backend is %s (STEPMESH_BAKCEND), want one of a GPU", ErrUnavailable, b.Name())
	}
	return d, nil
}
