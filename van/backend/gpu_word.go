package backend

// Words of callers that streams write and await.

// words does what StreamFlagger and GraphFlagger say.
type words struct {
	c *gpuContext
	d streamDriver
}

// WriteFlag makes stream write v into word.
func (w *words) WriteFlag(stream uintptr, word Mem, v uint32) error {
	return w.c.with("WriteFlag", func() error {
		addr, err := w.addr("WriteFlag", word, 4)
		if err != nil {
			return err
		}
		return w.d.writeValue32(stream, addr, v)
	})
}

// WaitFlag makes stream wait until word has reached v.
func (w *words) WaitFlag(stream uintptr, word Mem, v uint32) error {
	w.c.blocking.Store(true)
	return w.c.with("WaitFlag", func() error {
		addr, err := w.addr("WaitFlag", word, 4)
		if err != nil {
			return err
		}
		return w.d.waitValue32(stream, addr, v)
	})
}

// WaitBits makes stream wait until one of bits is set in word.
func (w *words) WaitBits(stream uintptr, word Mem, bits uint64) error {
	w.c.blocking.Store(true)
	return w.c.with("WaitBits", func() error {
		addr, err := w.addr("WaitBits", word, 8)
		if err != nil {
			return err
		}
		return w.d.waitBits64(stream, addr, bits)
	})
}

// WaitCount makes stream wait until the number in word is n or more.
func (w *words) WaitCount(stream uintptr, word Mem, n uint64) error {
	w.c.blocking.Store(true)
	return w.c.with("WaitCount", func() error {
		addr, err := w.addr("WaitCount", word, 8)
		if err != nil {
			return err
		}
		return w.d.waitValue64(stream, addr, n)
	})
}

// addr is the device's address of word, which has n bytes.
func (w *words) addr(op string, word Mem, n int) (uintptr, error) {
	if word.n < n || uintptr(word.ptr)%uintptr(n) != 0 {
		return 0, w.c.invalid("%s: %d bytes at %#x: want %d bytes, aligned to %d", op, word.n, uintptr(word.ptr), n, n)
	}
	if !w.c.info.StreamFlags {
		return 0, w.c.invalid("%s: %w: streams cannot write words (cuStreamWriteValue32_v2)", op, ErrUnsupported)
	}
	switch o := word.owner.(type) {
	case *hostMem:
		if o.c == w.c && word.OnHost() {
			return o.deviceAddr(word), nil
		}
	case *imported:
		if o.c == w.c {
			return uintptr(word.ptr), nil
		}
	}
	if word.dev == w.c.Device() {
		return uintptr(word.ptr), nil
	}
	return 0, w.c.invalid("%s: a word on %s that was neither pinned nor registered with this backend: %w", op, word.dev, ErrWrongDevice)
}
