package rdma

import (
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// This file locates the values of received messages. batch.go describes their layout.

// frames locates the values of a message. behind holds the placements and the inline values.
func (d nativeIn) frames(rx *received, l *receiveSlot, t *trailer, behind []byte) error {
	m := &rx.msg
	batch := m.IsBatch()
	switch {
	case t.metaLen == 0 && (batch || t.frames > 0), batch && t.frames > 0:
		return &van.FieldError{Field: "trailer", Value: fmt.Sprintf("%d frames, %d bytes of meta", t.frames, t.metaLen), Want: "0 frames in a batch, and bytes of meta if values follow"}
	case t.metaLen == 0:
		return nil
	case batch:
		if _, err := m.ReadDirectory(); err != nil {
			return err
		}
		return d.values(rx, l, behind)
	case t.frames > 0:
		for _, n := range t.lens[:t.frames] {
			m.Parts = append(m.Parts, van.Part{Key: m.Key, Push: true, Len: int(n)})
		}
	default:
		if m.Parts = append(m.Parts, van.PartOf(&m.Meta)); m.HasValue(0) && m.ValLen < 0 {
			return &van.FieldError{Field: "val_len", Value: m.ValLen, Want: fmt.Sprintf("0 to %d", maxData)}
		}
	}
	err := d.values(rx, l, behind)
	if err == nil && t.frames > 0 {
		err = rx.takeFrames(t)
	} else if err == nil {
		rx.oneKey()
		m.Vals, m.Placed = m.Parts[0].Vals, m.Parts[0].Placed
	}
	clear(m.Parts)
	m.Parts = m.Parts[:0]
	return err
}

// values locates the values of the parts of rx. Each placement is read once: the peer may change it meanwhile.
func (d nativeIn) values(rx *received, l *receiveSlot, behind []byte) error {
	m := &rx.msg
	if n := placementLen * len(m.Parts); len(behind) < n {
		return &van.FieldError{Field: "placements", Value: fmt.Sprintf("%d bytes", len(behind)), Want: fmt.Sprint(n)}
	}
	inline := valueReader{mem: backend.Bytes(behind), used: placementLen * len(m.Parts)}
	slot := valueReader{mem: l.Memory.data.Sub(0, min(l.Data, l.Memory.data.Len()))}
	var p *peer
	if !m.Request && !m.Parts[0].Push {
		if p = (*d.v.tables.peers.Load())[d.handshake.node]; p != nil {
			p.mu.Lock()
			defer p.mu.Unlock()
		}
	}
	for i := range m.Parts {
		x := &m.Parts[i]
		var at placement
		at.get(behind[placementLen*i:])
		x.Addr, x.Option = at.addr, int32(at.rkey)
		var small []byte
		var err error
		switch {
		case !m.HasValue(i) || x.Len == 0:
		case at.where == valueInMeta && x.Len > inlineValue:
			err = &van.FieldError{Field: fmt.Sprintf("inline bytes of key %d", x.Key), Value: x.Len, Want: fmt.Sprintf("at most %d", inlineValue)}
		case at.where == valueInMeta:
			if x.Vals, err = inline.next(x); err == nil {
				small = x.Vals.Host()
			}
		case at.where == valueInSlot:
			x.Vals, err = slot.next(x)
		case at.where == valueInPlace && m.Request:
			x.Vals, err = d.announced(x.Key, x.Len, at.addr)
			x.Placed = true
		case at.where != valueInPlace || x.Push: // no request names a destination for a frame of an answer
			err = &van.FieldError{Field: fmt.Sprintf("placement of key %d", x.Key), Value: at.where, Want: "0 or 1; 2 only in pushes and answers to pulls"}
		}
		if err != nil {
			return err
		}
		if p != nil {
			into, copied := openPulls{p}.take(pullKey{x.Timestamp, int16(m.AppID), int16(m.CustomerID), x.Key}, x.Addr, x.Len, small)
			if copied || at.where == valueInPlace {
				x.Vals, x.Placed = into, into.Len() > 0 // otherwise the answer is late: no caller waits for it
			}
		}
		if x.Vals.Len() > 0 && !x.Placed {
			rx.slot = l
		}
	}
	return nil
}

// valueReader locates the values in memory that a peer has written.
type valueReader struct {
	mem  backend.Mem
	used int
}

// next returns the next value, that of x.
func (r *valueReader) next(x *van.Part) (v backend.Mem, err error) {
	r.used = aligned(r.used)
	if n := r.mem.Len() - r.used; x.Len > n {
		return v, &van.FieldError{Field: fmt.Sprintf("bytes of key %d", x.Key), Value: x.Len, Want: fmt.Sprintf("at most %d", max(n, 0))}
	}
	v = r.mem.Sub(r.used, x.Len)
	r.used += x.Len
	return v, nil
}
