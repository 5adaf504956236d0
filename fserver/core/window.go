package core

// Windows as Python uses them: on a device calls are put into its streams, on the host those that wait do so in
// slices.

import (
	"context"
	"errors"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Window is a window.Window, which may be used when the task that makes it has ended without an error.
type Window struct {
	*window.Window
	made  *Task
	limit time.Duration // of a call that waits on the host; negative for none
}

// OpenWindow begins to open a window of size bytes on the ranks' devices. A negative limit is that of the communicator.
func (c *Comm) OpenWindow(size, signals int, limit time.Duration) (*Window, *Task) {
	return c.openWindow(window.Options{Size: size, Signals: signals, Device: true}, limit)
}

// OpenHostWindow is OpenWindow in memory of the hosts: here this one, or if it is empty size bytes.
func (c *Comm) OpenHostWindow(memory af.Tensor, size, signals int, limit time.Duration) (*Window, *Task) {
	if memory.Len() > 0 {
		size = 0
	}
	return c.openWindow(window.Options{Memory: memory, Size: size, Signals: signals}, limit)
}

func (c *Comm) openWindow(o window.Options, limit time.Duration) (*Window, *Task) {
	w := &Window{limit: c.limit}
	memory := o.Memory.Mem()
	memory.Retain() // until the window has
	w.made = newTask(limit, func(ctx context.Context) (err error) {
		defer memory.Release()
		w.Window, err = window.Open(ctx, c.Comm, o)
		return err
	})
	return w, w.made
}

// OnDevice tells whether this node's tensors lie on a device.
func (c *Comm) OnDevice() bool { return c.of.node.Backend().Device() != backend.Host }

// NoSignal says that a put has none.
const NoSignal = -1

// Put puts x, and a signal unless that is NoSignal.
func (w *Window) Put(ctx context.Context, rank, offset int, x af.Tensor, signal int, stream af.Stream) error {
	if signal == NoSignal {
		return w.Window.Put(ctx, rank, offset, x, stream)
	}
	return w.PutSignal(ctx, rank, offset, x, signal, stream)
}

// InSlice runs one of the calls above, of a window on the host, for slice at most. Then it returns ErrPending,
// nothing has been done, and the call is to be made again; with the limit counted from begun, negative for that of the
// communicator, its time is up.
func (w *Window) InSlice(slice, limit time.Duration, begun time.Time, call func(context.Context) error) error {
	if limit < 0 {
		limit = w.limit
	}
	now := time.Now()
	end := now.Add(slice)
	last := limit >= 0 && !begun.Add(limit).After(end)
	if last {
		end = begun.Add(limit)
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), end, van.ErrTimeout)
	defer cancel()
	err := call(ctx)
	if !errors.Is(err, van.ErrTimeout) || w.Check() != nil { // the window may be over as somebody was too late
		return err
	}
	if !last {
		return ErrPending
	}
	var e *van.Error
	if errors.As(err, &e) {
		whole := *e
		whole.Elapsed, whole.Limit = time.Since(begun), limit
		return &whole
	}
	return err
}

// Close begins window.Window.Close.
func (w *Window) Close() *Task {
	return newTask(noLimit, func(context.Context) error { return w.Window.Close() })
}

// Drop closes a window that Python has let go of, also one that is still being made.
func (w *Window) Drop() {
	w.made.abandon(func() error { return w.Window.Close() })
}
