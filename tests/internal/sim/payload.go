package sim

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// Every tensor tells its maker, its call, and that all of it is of this call.
const (
	pushMagic   = 0x70757368 // "push"
	answerMagic = 0x616e7377 // "answ"
)

// callID is one call of one process.
type callID struct {
	worker, gen int // instance rank, number of the process
	call        int
}

func (c callID) String() string {
	return fmt.Sprintf("call %d of %s", c.call, procName(plan.NodeOf("worker", c.worker), c.gen))
}

// label is the first bytes of a tensor.
type label struct {
	magic        uint32
	id           callID
	index        int // of the tensor
	server, sgen int // of an answer: its maker
}

// write fills b: the label, a sum of it, and bytes that follow from it.
func (l label) write(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b, l.magic)
	le.PutUint32(b[4:], uint32(l.id.worker))
	le.PutUint32(b[8:], uint32(l.id.gen))
	le.PutUint32(b[12:], uint32(l.id.call))
	le.PutUint32(b[16:], uint32(l.index))
	le.PutUint32(b[20:], uint32(l.server))
	le.PutUint32(b[24:], uint32(l.sgen))
	le.PutUint32(b[28:], uint32(len(b)))
	h := sum(b)
	le.PutUint64(b[32:], h)
	rest := b[40:]
	for len(rest) >= 8 {
		h = mix(h)
		le.PutUint64(rest, h)
		rest = rest[8:]
	}
	for i := range rest {
		rest[i] = byte(h >> (8 * i))
	}
}

// sum is a hash of the first 32 bytes.
func sum(b []byte) uint64 {
	h := uint64(1)
	for i := 0; i < 32; i += 8 {
		h = mix(h ^ binary.LittleEndian.Uint64(b[i:]))
	}
	return h
}

// read reads a label and checks all bytes.
func read(b []byte, magic uint32) (l label, err error) {
	if len(b) < plan.MinSize {
		return l, fmt.Errorf("%d bytes, want at least %d", len(b), plan.MinSize)
	}
	le := binary.LittleEndian
	l = label{magic: le.Uint32(b), id: callID{int(le.Uint32(b[4:])), int(le.Uint32(b[8:])), int(le.Uint32(b[12:]))},
		index: int(le.Uint32(b[16:])), server: int(le.Uint32(b[20:])), sgen: int(le.Uint32(b[24:]))}
	h := sum(b)
	switch {
	case l.magic != magic:
		return l, fmt.Errorf("it begins with %x, want %x", b[:8], magic)
	case le.Uint32(b[28:]) != uint32(len(b)):
		return l, fmt.Errorf("it was made with %d bytes, and has %d", le.Uint32(b[28:]), len(b))
	case le.Uint64(b[32:]) != h:
		return l, fmt.Errorf("its label is damaged: %x", b[:40])
	}
	rest := b[40:]
	for len(rest) >= 8 {
		h = mix(h)
		if le.Uint64(rest) != h {
			return l, fmt.Errorf("byte %d of %d is not that of %s", len(b)-len(rest), len(b), l.id)
		}
		rest = rest[8:]
	}
	for i := range rest {
		if rest[i] != byte(h>>(8*i)) {
			return l, fmt.Errorf("byte %d of %d is not that of %s", len(b)-len(rest)+i, len(b), l.id)
		}
	}
	return l, nil
}

// procName names a process: its node and its number among those of the node, from 1.
func procName(n plan.Node, gen int) string { return fmt.Sprintf("%s.%d", n, gen) }
