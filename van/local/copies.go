package local

import (
	"sync/atomic"
	"time"
)

// copies counts the running copies between devices. The end of a copy wakes no goroutine, so it must be polled.
type copies struct {
	running  atomic.Int32  // copies by this node's device
	exported atomic.Int32  // values of this node that a peer's device copies
	until    atomic.Uint64 // poll without a pause until this time
}

// expect records that this node's or a peer's device has started to copy n bytes at time now. Until that
// copy should have ended over PCI Express, the loop polls without a pause, since the peer answers as soon
// as the copy has ended.
func (c *copies) expect(now uint64, n int) {
	c.until.Store(max(c.until.Load(), now+uint64(copySpin+time.Duration(n/20))))
}

// copySpin is the minimum time of polling without a pause for the end of a copy.
const copySpin = 100 * time.Microsecond

// any reports whether copies are running.
func (c *copies) any() bool { return c.running.Load() > 0 || c.exported.Load() > 0 }

// soon reports whether the loop should poll without a pause because of copies.
func (c *copies) soon(now uint64) bool { return now < c.until.Load() && c.any() }

// copyPause is the pause between two polls for the end of a long copy.
const copyPause = 50 * time.Microsecond
