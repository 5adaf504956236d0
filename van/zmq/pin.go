package zmq

import (
	"runtime"
	"unsafe"

	"github.com/stepaf/stepaf-go/van/backend"
)

// pinned keeps the memory of one frame where it is, and its owner reachable.
type pinned struct {
	pin   runtime.Pinner
	ptr   unsafe.Pointer
	owner any
}

func (p *pinned) hold(m backend.Mem) {
	p.pin.Pin((*byte)(m.Ptr())) // does nothing for memory that is not Go's
	p.ptr, p.owner = m.Ptr(), m.Owner()
}

func (p *pinned) drop() {
	if p.ptr != nil {
		p.pin.Unpin()
		p.ptr, p.owner = nil, nil
	}
}
