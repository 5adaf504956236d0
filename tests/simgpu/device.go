package simgpu

// A simulated GPU for tests.

import (
	"testing"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Device simulates a GPU: its memory is host memory with a device's address, its streams
// are queues of functions. The race detector finds code that reads memory before the
// stream that writes it is done.
type Device struct {
	state
	memory
	streams
	sharing
	segments
}

var _ interface {
	backend.Backend
	backend.HostPinner
	backend.PinTeller
	backend.Tunable
	backend.GraphFlagger
	backend.AsyncCopier
	backend.StreamIdler
	backend.HealthChecker
	backend.Sharer
} = (*Device)(nil)

// New returns a device with that id.
func New(id int) *Device {
	d := &Device{state: state{dev: backend.Device{Type: backend.GPU, ID: int32(id)}}}
	d.memory = memory{st: &d.state, held: map[uint64][]byte{}}
	d.streams = streams{st: &d.state, all: map[uintptr]*stream{}}
	d.sharing = sharing{st: &d.state, memory: &d.memory}
	d.segments = segments{st: &d.state, whole: &d.sharing}
	return d
}

// CloseImport implements backend.Exporter.
func (d *Device) CloseImport(m backend.Mem) error {
	if d.segments.unmap(m) {
		return nil
	}
	return d.sharing.closeImport()
}

// Close implements backend.Backend. It waits for the streams.
func (d *Device) Close() error {
	d.state.mu.Lock()
	d.closed = true
	d.state.mu.Unlock()
	d.streams.close()
	return nil
}

// NothingLent fails the test if memory of Mem is held.
func (d *Device) NothingLent(t testing.TB) {
	t.Helper()
	d.memory.lent.settle(t, 0)
}

// Leaks fails the test if anything is held.
func (d *Device) Leaks(t testing.TB) {
	t.Helper()
	d.memory.mu.Lock()
	pinned := len(d.pinned)
	d.memory.mu.Unlock()
	d.NothingLent(t)
	events, _ := d.Events()
	for what, n := range map[string]int{"buffers": d.Held(), "events": events, "imports": d.Imports(), "imported segments": len(d.SegmentImports()), "streams": d.Streams(), "registered buffers of the host": pinned} {
		if n != 0 {
			t.Errorf("%s: %d %s are held", d.dev, n, what)
		}
	}
}
