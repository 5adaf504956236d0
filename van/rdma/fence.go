package rdma

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// errReplaced is what a process learns that has been replaced.
var errReplaced = errors.New("another process has taken the place of this one")

// maxReplaced bounds what is remembered of processes that were replaced.
const maxReplaced = 4096

// isReplaced tells whether the process with this incarnation has been replaced.
func (v *rvan) isReplaced(incarnation uint32) bool {
	if incarnation == 0 || failpoint.On("fencing") {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Contains(v.replaced, incarnation)
}

// fenceLocked ends what the process of old has opened to this node: now that of p has its
// id. What the old one writes from now on fails, and its slots come back. v.mu is held.
func (v *rvan) fenceLocked(id int, old, p *peer) {
	if failpoint.On("fencing") {
		return
	}
	if x := old.incarnation; x != 0 && p.incarnation != x {
		if p.incarnation != 0 && !slices.Contains(v.replaced, x) {
			if len(v.replaced) >= maxReplaced {
				v.replaced = slices.Delete(v.replaced, 0, maxReplaced/2)
			}
			v.replaced = append(v.replaced, x)
		}
	}
	// It may have come back, under another id even.
	v.replaced = slices.DeleteFunc(v.replaced, func(x uint32) bool { return x == p.incarnation })
	for _, in := range v.inbounds {
		h := &in.hello
		var gone bool
		if h.incarnation != 0 {
			gone = slices.Contains(v.replaced, h.incarnation)
		} else {
			gone = h.node == id && old.addr != p.addr && h.port == old.node.Port && (h.port != p.node.Port || in.from.Addr() != p.addr.Addr())
		}
		if gone {
			in.fail(fmt.Errorf("%w: %s is another process by now", van.ErrPeerLost, van.NodeName(id)))
		}
	}
}

// markUnlistedLocked finds out which connections are of processes that the table does not name.
// They may say control messages, by which a newcomer becomes known; data has to wait.
// v.mu is held.
func (v *rvan) markUnlistedLocked() {
	for _, in := range v.inbounds {
		p := (*v.peers.Load())[in.hello.node]
		in.unlisted.Store(p != nil && p.incarnation != 0 && in.hello.incarnation != 0 && p.incarnation != in.hello.incarnation && !failpoint.On("fencing"))
	}
}

// controlSource is who numbers control messages: a process, and one of its ways to this node.
type controlSource struct{ incarnation, tag uint32 }

// maxControlSources bounds what is remembered of them.
const maxControlSources = 1 << 14

// isRepeated tells whether a control message has come before, on a connection that broke
// before its sender knew that it has arrived.
func (v *rvan) isRepeated(in *inbound, t *trailer) bool {
	if in.hello.incarnation == 0 || failpoint.On("duplicate") {
		return false
	}
	k, n := controlSource{in.hello.incarnation, t.lens[1]}, t.lens[0]
	v.mu.Lock()
	defer v.mu.Unlock()
	last, known := v.lastControl[k]
	if known && (n-last-1)&maxData >= maxData/2 {
		return true
	}
	if !known && len(v.lastControl) >= maxControlSources {
		clear(v.lastControl)
	}
	v.lastControl[k] = n
	return false
}
