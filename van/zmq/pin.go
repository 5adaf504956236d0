package zmq

import (
	"runtime"

	"github.com/stepaf/stepaf-go/van/backend"
)

// pinned pins the memory of one frame and keeps its owner reachable.
type pinned struct {
	pin runtime.Pinner
	mem backend.Mem
}

func (p *pinned) hold(m backend.Mem) {
	p.pin.Pin((*byte)(m.Ptr())) // has no effect on memory outside of Go's heap
	m.Retain()
	p.mem = m
}

func (p *pinned) drop() {
	if p.mem.Len() == 0 {
		return
	}
	p.pin.Unpin()
	m := p.mem
	p.mem = backend.Mem{}
	m.Release()
}
