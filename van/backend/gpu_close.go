package backend

// Closing a GPU backend without blocking behind streams that wait for the CPU.

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// closeLimit is how long Close waits for streams.
const closeLimit = time.Second

// Close releases the device. It waits up to closeLimit for flags that streams have yet to
// write; flags that are still to be written then are not freed, and the error says so.
//
// If streams may wait for the CPU and do not end within closeLimit, nothing is freed: the
// driver would wait for them, perhaps for ever. The error wraps ErrInUse and says how much
// stays allocated until the process ends.
func (g *gpu) Close() error {
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	defer func() {
		g.mems, g.hosts, g.imports, g.mapped, g.streams, g.events, g.idle, g.late = nil, nil, nil, nil, nil, nil, nil, nil
	}()
	if g.MayBlock() {
		if err := g.awaitStreams(closeLimit); err != nil {
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
		for _, s := range slices.Concat(g.idle, g.late) {
			note("Close: free a stream", g.d.streamDestroy(s))
		}
		for _, i := range g.imports {
			note("Close: end an import", g.d.ipcClose(i.addr))
		}
		g.freeSegments(note)
		for _, m := range g.mems {
			note("Close: free memory", g.d.memFree(m.addr))
		}
		for _, h := range g.hosts {
			note("Close: free host memory", g.freeHost(h))
		}
		if late := g.flags.settle(0); late > 0 { // freeing may have waited for the streams
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

// awaitStreams waits until all streams of the device are idle, including those that other
// code of this process has made. It returns an error at the limit.
func (g *gpu) awaitStreams(limit time.Duration) error {
	done := make(chan error, 1)
	// The driver's wait has no limit, and other code's streams are not known here. After
	// the limit this goroutine's thread stays in the driver until the streams end.
	go func() { done <- g.inContext(g.d.synchronize) }()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-late.C:
		return fmt.Errorf("streams of the device have not ended after %s, and may wait for the CPU", limit)
	case err := <-done:
		if err = g.failed("wait for streams", err); errors.Is(err, ErrDeviceLost) {
			return nil // no stream runs on a failed device
		}
		return err
	}
}

// holdings describes what Close leaves allocated.
func (g *gpu) holdings() string {
	device, host := 0, len(g.flags.pages)*flagPage
	for _, m := range g.mems {
		device += m.n
	}
	for _, h := range g.hosts {
		host += h.n
	}
	return fmt.Sprintf("%d bytes of the device, %d bytes of host memory and %d mappings of other processes' memory are left", device, host, len(g.imports)+len(g.mapped))
}
