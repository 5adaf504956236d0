package backend

// The 64-bit counters by which streams and the CPU synchronise, written in PTX.

import (
	_ "embed"
	"fmt"
)

// signals are the kernels of gpu_signal.ptx.
//
//go:embed gpu_signal.ptx
var signals string

// signalling is the loaded kernels, 0 before they are first used.
type signalling struct {
	module           uintptr
	write, wait, add uintptr
}

// loadSignals returns the kernels, loaded at the first call. The context is current.
func (g *gpu) loadSignals() (signalling, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.signals.module != 0 {
		return g.signals, nil
	}
	var s signalling
	var err error
	if s.module, err = g.d.moduleLoad(signals); err != nil {
		return s, err
	}
	for name, f := range map[string]*uintptr{"stepaf_write": &s.write, "stepaf_wait": &s.wait, "stepaf_add": &s.add} {
		if *f, err = g.d.moduleFunction(s.module, name); err != nil {
			_ = g.d.moduleUnload(s.module) // the first error tells more
			return s, err
		}
	}
	g.signals = s
	return s, nil
}

// signal launches one of the kernels.
func (g *gpu) signal(op string, stream uintptr, which func(*signalling) uintptr, words ...Mem) error {
	var addr [2]uintptr
	for i, m := range words {
		if m.n != 8 || uintptr(m.ptr)%8 != 0 {
			return g.invalid("%s on %d bytes at %#x: want 8, aligned", op, m.n, uintptr(m.ptr))
		}
		if m.dev != g.Device() {
			return fmt.Errorf("%s: %w", op, g.wrongDevice(m))
		}
		addr[i] = uintptr(m.ptr)
	}
	return g.with(op, func() error {
		s, err := g.loadSignals()
		if err != nil {
			return err
		}
		return g.d.launch(which(&s), stream, addr[0], addr[1])
	})
}

// wrongDevice is the error of memory that is not the device's.
func (g *gpu) wrongDevice(m Mem) error {
	if m.OnHost() {
		return g.invalid("memory of the host: %w; MapHost makes pinned memory the device's", ErrWrongDevice)
	}
	return CheckDevice(g, m)
}

// WriteSeq implements Signaller.
func (g *gpu) WriteSeq(stream uintptr, flag, seq Mem) error {
	return g.signal("WriteSeq", stream, func(s *signalling) uintptr { return s.write }, flag, seq)
}

// WaitSeq implements Signaller.
func (g *gpu) WaitSeq(stream uintptr, flag, seq Mem) error {
	g.blocking.Store(true)
	return g.signal("WaitSeq", stream, func(s *signalling) uintptr { return s.wait }, flag, seq)
}

// AddSeq implements Signaller.
func (g *gpu) AddSeq(stream uintptr, seq Mem) error {
	return g.signal("AddSeq", stream, func(s *signalling) uintptr { return s.add }, seq)
}

// MapHost implements Signaller.
func (g *gpu) MapHost(m Mem) (Mem, error) {
	if !m.OnHost() || m.n == 0 {
		return Mem{}, g.invalid("MapHost of %d bytes on %s: want pinned host memory", m.n, m.dev)
	}
	var addr uintptr
	err := g.enter(func() (err error) {
		addr, err = g.d.hostDeviceAddr(m.ptr)
		return err
	})
	if err != nil {
		return Mem{}, g.failedAs(fmt.Sprintf("MapHost of %d bytes at %#x", m.n, uintptr(m.ptr)), "is the memory pinned?", err, nil)
	}
	return At(pointer(addr), m.n, g.Device(), m.owner), nil
}
