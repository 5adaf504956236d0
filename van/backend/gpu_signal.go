package backend

// Kernels, written in PTX: the 64-bit counters by which streams and the CPU synchronise, and a copy.

import (
	_ "embed"
	"fmt"
	"sync"
)

// signalText is the kernels.
//
//go:embed gpu_signal.ptx
var signalText string

// signals puts the kernels into streams.
type signals struct {
	c *gpuContext
	d streamDriver

	mu     sync.Mutex
	loaded signalKernels
}

// signalKernels is the loaded kernels, 0 before they are first used.
type signalKernels struct {
	module           uintptr
	write, wait, add uintptr
	copy             uintptr
}

// load returns the kernels, loaded at the first call. The context is current.
func (k *signals) load() (signalKernels, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.loaded.module != 0 {
		return k.loaded, nil
	}
	var s signalKernels
	var err error
	if s.module, err = k.d.moduleLoad(signalText); err != nil {
		return s, err
	}
	for name, f := range map[string]*uintptr{"stepaf_write": &s.write, "stepaf_wait": &s.wait, "stepaf_add": &s.add, "stepaf_copy": &s.copy} {
		if *f, err = k.d.moduleFunction(s.module, name); err != nil {
			_ = k.d.moduleUnload(s.module) // the first error tells more
			return s, err
		}
	}
	k.loaded = s
	return s, nil
}

// signal launches one of the kernels.
func (k *signals) signal(op string, stream uintptr, which func(*signalKernels) uintptr, words ...Mem) error {
	var addr [2]uintptr
	for i, m := range words {
		if m.Len() != 8 || uintptr(m.ptr)%8 != 0 {
			return k.c.invalid("%s on %d bytes at %#x: want 8, aligned", op, m.Len(), uintptr(m.ptr))
		}
		if m.Device() != k.c.Device() {
			return fmt.Errorf("%s: %w", op, k.c.wrongDevice(m))
		}
		addr[i] = uintptr(m.ptr)
	}
	return k.c.with(op, func() error {
		s, err := k.load()
		if err != nil {
			return err
		}
		return k.d.launch(which(&s), stream, addr[0], addr[1])
	})
}

// WriteSeq implements Signaller.
func (k *signals) WriteSeq(stream uintptr, flag, seq Mem) error {
	return k.signal("WriteSeq", stream, func(s *signalKernels) uintptr { return s.write }, flag, seq)
}

// WaitSeq implements Signaller.
func (k *signals) WaitSeq(stream uintptr, flag, seq Mem) error {
	k.c.blocking.Store(true)
	return k.signal("WaitSeq", stream, func(s *signalKernels) uintptr { return s.wait }, flag, seq)
}

// AddSeq implements Signaller.
func (k *signals) AddSeq(stream uintptr, seq Mem) error {
	return k.signal("AddSeq", stream, func(s *signalKernels) uintptr { return s.add }, seq)
}

// The kernel has a thread for each copyEach bytes of a copy, in blocks of copyThreads. The limit is fewBlocks, or manyBlocks from
// manyBytes on. More blocks make copies of less than a few MB no faster, and take multiprocessors from other kernels.
const (
	copyThreads = 512
	copyEach    = 64
	fewBlocks   = 14
	manyBlocks  = 64
	manyBytes   = 8 << 20
)

// copyGrid returns the grid of n copies, the longest of which has most bytes.
func copyGrid(n, most int) grid {
	limit := fewBlocks
	if most >= manyBytes {
		limit = manyBlocks
	}
	return grid{min((most+copyThreads*copyEach-1)/(copyThreads*copyEach), limit), n, copyThreads}
}

// CopyGated implements GatedCopier.
func (k *signals) CopyGated(copies []GatedCopy, stream uintptr) error {
	const op = "CopyGated"
	for i := range copies {
		c := &copies[i]
		if c.Dst.Len() != c.Src.Len() || c.Gate.Len() != 8 || uintptr(c.Gate.ptr)%8 != 0 {
			return k.c.invalid("%s of %d bytes to %d, gate of %d bytes at %#x: want equal lengths, and 8 aligned bytes", op, c.Src.Len(), c.Dst.Len(), c.Gate.Len(), uintptr(c.Gate.ptr))
		}
		for _, m := range [...]*Mem{&c.Dst, &c.Src, &c.Gate} {
			if m.Len() > 0 && m.Device() != k.c.Device() {
				return fmt.Errorf("%s: %w", op, k.c.wrongDevice(*m))
			}
		}
	}
	k.c.blocking.Store(true)
	return k.c.with(op, func() error {
		s, err := k.load()
		for err == nil && len(copies) > 0 {
			var list kernelCopies
			n := min(len(copies), len(list))
			most := 1
			for i, c := range copies[:n] {
				list[i] = kernelCopy{uintptr(c.Dst.ptr), uintptr(c.Src.ptr), uintptr(c.Src.Len()), uintptr(c.Gate.ptr)}
				most = max(most, c.Src.Len())
			}
			err = k.d.launchCopies(s.copy, stream, copyGrid(n, most), list)
			copies = copies[n:]
		}
		return err
	})
}

// close unloads the kernels. The context is current.
func (k *signals) close(note func(op string, err error)) {
	if k.loaded.module != 0 {
		note("Close: unload kernels", k.d.moduleUnload(k.loaded.module))
	}
}
