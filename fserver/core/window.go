package core

// Windows (af/window) for Python. On a device, calls are queued to its streams. On the host, calls that wait do so in
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

// Window is a window.Window. It may be used after the task that opens it has ended without an error.
type Window struct {
	*window.Window
	made  *Task
	limit time.Duration // of a call that waits on the host; negative means no limit
}

// OpenWindow begins to open a window of size bytes on the ranks' devices. A negative limit means the limit of the
// communicator.
func (c *Comm) OpenWindow(size, signals int, limit time.Duration) (*Window, *Task) {
	return c.openWindow(window.Options{Size: size, Signals: signals, Device: true}, limit)
}

// OpenHostWindow is OpenWindow in host memory. This rank's part is memory, or if memory is empty, new memory of size
// bytes.
func (c *Comm) OpenHostWindow(memory af.Tensor, size, signals int, limit time.Duration) (*Window, *Task) {
	if memory.Len() > 0 {
		size = 0
	}
	return c.openWindow(window.Options{Memory: memory, Size: size, Signals: signals}, limit)
}

func (c *Comm) openWindow(o window.Options, limit time.Duration) (*Window, *Task) {
	w := &Window{limit: c.limit}
	memory := o.Memory.Mem()
	memory.Retain() // until the window has its own reference
	w.made = newTask(limit, func(ctx context.Context) (err error) {
		defer memory.Release()
		w.Window, err = window.Open(ctx, c.Comm, o)
		return err
	})
	return w, w.made
}

// OnDevice reports whether this node's tensors are on a device.
func (c *Comm) OnDevice() bool { return c.of.node.Backend().Device() != backend.Host }

// NoSignal is the signal of a put that sends none.
const NoSignal = -1

// Put copies x into the window of rank, and sends a signal unless signal is NoSignal.
func (w *Window) Put(ctx context.Context, rank, offset int, x af.Tensor, signal int, stream af.Stream) error {
	if signal == NoSignal {
		return w.Window.Put(ctx, rank, offset, x, stream)
	}
	return w.PutSignal(ctx, rank, offset, x, signal, stream)
}

// InSlice runs a call of a window on the host, for slice at most. If it returns ErrPending, the call has done nothing,
// and is to be repeated. limit counts from begun; a negative limit means the limit of the communicator. After limit
// InSlice returns van.ErrTimeout.
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
	if !errors.Is(err, van.ErrTimeout) || w.Check() != nil { // the window may have failed because a rank was too late
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

// Drop closes a window that Python no longer uses. It may still be being opened.
func (w *Window) Drop() {
	w.made.discard(func() error { return w.Window.Close() })
}
