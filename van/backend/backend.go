// Package backend owns device memory, and the events that say when its contents are
// ready: for ordinary host memory, for GPUs in builds with the tag cuda, and for other
// devices by Register. It knows nothing of messages.
package backend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/stepaf/stepaf-go/van/env"
)

// ErrUnavailable is wrapped by New's error when the named backend is not in this build
// or has no device on this machine.
var ErrUnavailable = errors.New("backend not available")

// Backend allocates the memory of one device and makes events on it.
// Implementations are safe for concurrent use.
type Backend interface {
	// Name is the registered name, upper case, such as "CPU".
	Name() string
	// Device is the device that Alloc serves.
	Device() Device
	// Alloc returns n bytes aligned to at least 64 bytes, with undefined contents.
	// The caller gives them back with Free. n may be 0.
	Alloc(n int) (Mem, error)
	// Free releases memory that Alloc returned. Nothing may use the bytes afterwards.
	Free(Mem) error
	// NewEvent makes an event that has not been recorded.
	NewEvent() (Event, error)
	// Copy copies src into dst; both may be on the host or on this device. The
	// lengths must be equal. It returns when the bytes have arrived.
	Copy(dst, src Mem) error
	// Close releases what the backend holds. Nothing may use it afterwards.
	Close() error
}

// Event marks a point in a device's stream of work.
type Event interface {
	// Record marks the present end of stream; 0 is the current one.
	Record(stream uintptr) error
	// Query reports whether the work before the mark is done.
	Query() (bool, error)
	// Sync waits until it is, or until ctx ends.
	Sync(ctx context.Context) error
	// Close releases the event.
	Close() error
}

// Factory makes a backend for device id.
type Factory func(id int) (Backend, error)

var registry = struct {
	sync.RWMutex
	m map[string]Factory
}{m: map[string]Factory{"CPU": func(int) (Backend, error) { return NewCPU(), nil }}}

// Register adds a backend under name (in any case). It is meant to be called from init
// functions and panics when the name is taken, as database/sql.Register does.
func Register(name string, f Factory) {
	registry.Lock()
	defer registry.Unlock()
	name = strings.ToUpper(name)
	if _, dup := registry.m[name]; dup {
		panic("backend: Register called twice for " + name)
	}
	registry.m[name] = f
}

// New makes the backend registered under name (in any case) for device id.
func New(name string, id int) (Backend, error) {
	registry.RLock()
	f := registry.m[strings.ToUpper(name)]
	registry.RUnlock()
	if f == nil {
		if why := missing[strings.ToUpper(name)]; why != "" {
			return nil, fmt.Errorf("backend %s: %w: %s", strings.ToUpper(name), ErrUnavailable, why)
		}
		have := Names()
		return nil, fmt.Errorf("backend %q: %w in this build (there is: %s)%s", name, ErrUnavailable, strings.Join(have, ", "),
			env.DidYouMean(name, append(have, "GPU")))
	}
	return f(id)
}

// Names lists the registered backends in order.
func Names() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(maps.Keys(registry.m))
}
