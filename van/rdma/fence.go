package rdma

import (
	"slices"

	"github.com/stepaf/stepaf-go/internal/failpoint"
)

// This file owns the history of processes: which ones were replaced, and which control messages they have sent.

// maxReplaced limits the number of replaced processes that a van remembers.
const maxReplaced = 4096

// fences is the history of processes. The van's mu guards it.
type fences struct {
	replaced    []uint32                 // incarnations of replaced processes, the latest last
	lastControl map[controlSource]uint32 // number of the last control message of each source
}

// isReplaced reports whether the process with this incarnation has been replaced.
func (v *rvan) isReplaced(incarnation uint32) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.fences.isReplacedLocked(incarnation)
}

func (f *fences) isReplacedLocked(incarnation uint32) bool {
	return incarnation != 0 && slices.Contains(f.replaced, incarnation) && !failpoint.On("fencing")
}

// controlSource is a sequence of control message numbers: those of one process on one of its connections to this node.
type controlSource struct{ incarnation, tag uint32 }

// maxControlSources limits the number of sources in fences.lastControl.
const maxControlSources = 1 << 14

// isRepeated reports whether a control message was received before. Its sender repeats it if the earlier connection broke before the
// sender knew that the message had arrived.
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
