package rdma

import (
	"slices"

	"github.com/stepaf/stepaf-go/internal/failpoint"
)

// This file owns what is remembered of processes: those that were replaced, and the
// control messages that have come.

// maxReplaced bounds what is remembered of processes that were replaced.
const maxReplaced = 4096

// fences is what a van remembers of processes, guarded by its mu.
type fences struct {
	replaced    []uint32                 // incarnations of processes that others have replaced, the latest last
	lastControl map[controlSource]uint32 // number of the last control message
}

// isReplaced tells whether the process with this incarnation has been replaced.
func (v *rvan) isReplaced(incarnation uint32) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.fences.isReplacedLocked(incarnation)
}

func (f *fences) isReplacedLocked(incarnation uint32) bool {
	return incarnation != 0 && slices.Contains(f.replaced, incarnation) && !failpoint.On("fencing")
}

// controlSource numbers control messages: a process, and one of its connections to this
// node.
type controlSource struct{ incarnation, tag uint32 }

// maxControlSources bounds what is remembered of them.
const maxControlSources = 1 << 14

// isRepeated tells whether a control message has come before, on a connection that broke
// before its sender knew that it has arrived.
func (v *rvan) isRepeated(in *inbound, t *trailer) bool {
	if in.handshake.incarnation == 0 || failpoint.On("duplicate") {
		return false
	}
	k, n := controlSource{in.handshake.incarnation, t.lens[1]}, t.lens[0]
	v.mu.Lock()
	defer v.mu.Unlock()
	last, known := v.fences.lastControl[k]
	if known && (n-last-1)&maxData >= maxData/2 {
		return true
	}
	if !known && len(v.fences.lastControl) >= maxControlSources {
		clear(v.fences.lastControl)
	}
	v.fences.lastControl[k] = n
	return false
}
