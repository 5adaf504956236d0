package backend

// What packages need of a device whose streams exchange memory with those of other processes by themselves.

import (
	"fmt"
)

// StreamDevice is a device whose streams reach into the memory of other processes' devices.
type StreamDevice struct {
	Backend
	Exporter
	AsyncCopier
	GraphFlagger
	HostPinner
}

// StreamDeviceOf is b as one. The error wraps ErrUnavailable if b cannot do that.
func StreamDeviceOf(b Backend) (*StreamDevice, error) {
	d := &StreamDevice{Backend: b}
	var can [4]bool
	d.Exporter, can[0] = b.(Exporter)
	d.AsyncCopier, can[1] = b.(AsyncCopier)
	d.GraphFlagger, can[2] = b.(GraphFlagger)
	d.HostPinner, can[3] = b.(HostPinner)
	if can != [...]bool{true, true, true, true} {
		return nil, fmt.Errorf("%w: this node's backend is %s (STEPMESH_BAKCEND), want one of a GPU", ErrUnavailable, b.Name())
	}
	return d, nil
}

// Map maps n bytes that e names. They stay mapped until the backend is closed: the driver unmaps nothing while
// streams may wait.
func (d *StreamDevice) Map(e Export, n int) (Mem, error) {
	m, err := d.Import(e)
	if err != nil {
		return m, err
	}
	if m.Len() < e.Offset || m.Len()-e.Offset < n {
		return m, fmt.Errorf("%d bytes at %d of an allocation of %d: %w", n, e.Offset, m.Len(), ErrNotExportable)
	}
	return m.Sub(e.Offset, n), nil
}
