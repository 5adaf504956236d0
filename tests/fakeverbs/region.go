package fakeverbs

import (
	"syscall"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// region implements verbs.MR. net.mu guards it.
type region struct {
	dev        *device
	base       unsafe.Pointer
	start      uint64 // the address of base for peers
	size       int
	access     verbs.Access
	lkey, rkey uint32
}

// bytes returns n bytes at addr; false if the region does not contain them all.
func (m *region) bytes(addr uint64, n uint32) ([]byte, bool) {
	size := uint64(m.size)
	if addr < m.start || uint64(n) > size || addr-m.start > size-uint64(n) {
		return nil, false
	}
	return unsafe.Slice((*byte)(unsafe.Add(m.base, addr-m.start)), n), true
}

// at returns n bytes at addr, which belong to no region.
func at(addr uint64, n uint32) []byte {
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr))
	return unsafe.Slice((*byte)(p), n)
}

func (m *region) LKey() uint32 { return m.lkey }
func (m *region) RKey() uint32 { return m.rkey }

func (m *region) Deregister() error {
	d := m.dev
	if err := d.stack.hook(Op{Kind: OpDeregister, Local: d.addr(), Size: m.size}); err != nil {
		return err
	}
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if d.stack.ended() {
		return nil
	}
	if d.lkeys[m.lkey] != m {
		err := fault("deregister", verbs.ErrClosed, "%s: region of %d bytes at %#x", d.stack.name, m.size, m.start)
		d.net.misuse.report(err)
		return err
	}
	delete(d.lkeys, m.lkey)
	delete(d.rkeys, m.rkey)
	d.stack.registered -= m.size
	d.stack.counters.Deregistrations++
	return nil
}

func (d *device) Register(p unsafe.Pointer, n int, a verbs.Access) (verbs.MR, error) {
	return d.register(p, n, uint64(uintptr(p)), a)
}

func (d *device) RegisterDMABuf(fd int, offset, length, iova uint64, a verbs.Access) (verbs.MR, error) {
	d.net.mu.Lock()
	mem, ok := d.stack.buffers[fd]
	d.net.mu.Unlock()
	if !ok {
		return nil, fault("register dma-buf", syscall.EOPNOTSUPP, "%s: fd %d, want one given to DMABuf", d.stack.name, fd)
	}
	size := uint64(len(mem))
	if length == 0 || length > size || offset > size-length {
		return nil, fault("register dma-buf", syscall.EINVAL, "%s: %d bytes at %d of %d", d.stack.name, length, offset, size)
	}
	return d.register(unsafe.Pointer(&mem[offset]), int(length), iova, a)
}

func (d *device) register(p unsafe.Pointer, size int, start uint64, a verbs.Access) (verbs.MR, error) {
	s, n := d.stack, d.net
	err := s.begin(Op{Kind: OpRegister, Local: d.addr(), Size: size}, d.ended)
	defer n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	switch {
	case p == nil || size <= 0:
		return nil, fault("register", syscall.EINVAL, "%s: %d bytes at %p, want memory", s.name, size, p)
	case a&^(verbs.LocalWrite|verbs.RemoteWrite) != 0 || a&verbs.RemoteWrite != 0 && a&verbs.LocalWrite == 0:
		return nil, fault("register", syscall.EINVAL, "%s: access %#x, want RemoteWrite only with LocalWrite", s.name, int(a))
	case s.limited && s.registered+size > s.limit:
		return nil, fault("register", syscall.ENOMEM, "%s: %d bytes besides %d, want up to %d", s.name, size, s.registered, s.limit)
	case len(d.lkeys) >= n.cfg.MaxMR:
		return nil, fault("register", syscall.ENOMEM, "%s: region %d, want up to %d", s.name, len(d.lkeys)+1, n.cfg.MaxMR)
	}
	n.lastKey++
	// The two keys of a region differ, and no other region has them.
	m := &region{dev: d, base: p, start: start, size: size, access: a, lkey: n.lastKey<<8 | 1, rkey: n.lastKey<<8 | 2}
	d.lkeys[m.lkey] = m
	d.rkeys[m.rkey] = m
	s.registered += size
	s.counters.Registrations++
	return m, nil
}
