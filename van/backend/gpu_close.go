package backend

import (
	"errors"
	"fmt"
	"time"
)

// closeLimit is how long Close waits for streams.
const closeLimit = time.Second

// Close releases the device. It waits a moment for flags that streams have yet to write;
// memory that they would write later is left alone, and the error says so.
//
// Where streams may wait for the CPU and do not end in that time, nothing at all is freed:
// the driver would wait for them, perhaps for ever. The error wraps ErrInUse and says how
// much is left until the process ends.
func (g *gpu) Close() error {
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	defer func() { g.mems, g.hosts, g.imports, g.streams, g.events, g.idle = nil, nil, nil, nil, nil, nil }()
	if g.MayBlock() {
		if err := g.standStill(closeLimit); err != nil {
			return g.invalid("Close: %w: %w; nothing is freed, since the driver waits for streams first: %s", ErrInUse, err, g.holdings())
		}
	}
	g.flags.settle(closeLimit)
	var errs []error
	note := func(op string, err error) {
		if err != nil {
			errs = append(errs, g.failed(op, err))
		}
	}
	err := g.inContext(func() error {
		if g.signals.module != 0 {
			note("Close: unload kernels", g.d.moduleUnload(g.signals.module))
		}
		for e := range g.events {
			note("Close: free an event", g.d.eventDestroy(e))
		}
		for s := range g.streams {
			note("Close: free a stream", g.d.streamDestroy(s))
		}
		for _, s := range g.idle {
			note("Close: free a stream", g.d.streamDestroy(s))
		}
		for _, i := range g.imports {
			note("Close: end an import", g.d.ipcClose(i.addr))
		}
		for _, m := range g.mems {
			note("Close: free memory", g.d.memFree(m.addr))
		}
		for _, h := range g.hosts {
			note("Close: free host memory", g.freeHost(h))
		}
		if late := g.flags.settle(0); late > 0 { // the driver may have waited for them just now
			errs = append(errs, g.invalid("Close: %d events are recorded on streams that have not come so far; their flags are not freed", late))
			return nil
		}
		for _, p := range g.flags.pages {
			note("Close: free host memory", g.d.hostFree(p))
		}
		return nil
	})
	note("Close", err)
	note("Close: release the primary context", g.d.release(g.dev))
	return errors.Join(errs...)
}

// standStill waits until no stream of the device has anything to do, those of others in
// this process included, and tells why not.
func (g *gpu) standStill(limit time.Duration) error {
	done := make(chan error, 1)
	// At the limit this thread stays with the driver until the streams end: it has no
	// such wait with a limit, and the streams of others are not known here.
	go func() { done <- g.inContext(g.d.synchronize) }()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-late.C:
		return fmt.Errorf("streams of the device have not ended after %s, and may wait for the CPU", limit)
	case err := <-done:
		if err = g.failed("look whether streams wait", err); errors.Is(err, ErrDeviceLost) {
			return nil // nothing waits on it any more
		}
		return err
	}
}

// holdings says what Close leaves behind.
func (g *gpu) holdings() string {
	device, host := 0, len(g.flags.pages)*flagPage
	for _, m := range g.mems {
		device += m.n
	}
	for _, h := range g.hosts {
		host += h.n
	}
	return fmt.Sprintf("%d bytes of the device, %d bytes of host memory and %d mappings of other processes' memory are left", device, host, len(g.imports))
}
