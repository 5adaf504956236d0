package local

import (
	"sync/atomic"
	"time"
)

// copies knows of the copies by devices, whose ends wake nobody.
type copies struct {
	running  atomic.Int32  // by this node's device
	exported atomic.Int32  // values of this node that a peer's device copies
	until    atomic.Uint64 // until when it pays to poll for their end without pause
}

// expect says that at time now n bytes have begun to be copied by a device, this node's
// or a peer's: their end, and what a peer answers then, is worth polling for without
// pause for as long as that takes over PCI Express.
func (c *copies) expect(now uint64, n int) {
	c.until.Store(max(c.until.Load(), now+uint64(copySpin+time.Duration(n/20))))
}

// copySpin is the least time that the end of a copy is polled for without pause.
const copySpin = 100 * time.Microsecond

// any tells whether there are copies.
func (c *copies) any() bool { return c.running.Load() > 0 || c.exported.Load() > 0 }

// soon tells whether to poll without pause because of copies.
func (c *copies) soon(now uint64) bool { return now < c.until.Load() && c.any() }

// copyPause is between two polls for the end of a copy that takes long.
const copyPause = 50 * time.Microsecond
