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
	w     *window.Window
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
		w.w, err = window.Open(ctx, c.comm, o)
		return err
	})
	return w, w.made
}

// OnDevice tells whether this node's tensors lie on a device.
func (c *Comm) OnDevice() bool { return c.of.node.Backend().Device() != backend.Host }

// Tensor is its memory here.
func (w *Window) Tensor() af.Tensor { return w.w.Tensor() }

// NoSignal says that a put has none.
const NoSignal = -1

// Put puts x, and a signal unless that is NoSignal.
func (w *Window) Put(ctx context.Context, stream af.Stream, rank, offset int, x af.Tensor, signal int) error {
	if signal == NoSignal {
		return w.w.Put(ctx, rank, offset, x, stream)
	}
	return w.w.PutSignal(ctx, rank, offset, x, signal, stream)
}

// Signal adds one to a signal.
func (w *Window) Signal(ctx context.Context, stream af.Stream, rank, signal int) error {
	return w.w.Signal(ctx, rank, signal, stream)
}

// WaitSignal makes the stream wait, or waits on the host.
func (w *Window) WaitSignal(ctx context.Context, stream af.Stream, rank, signal int) error {
	return w.w.WaitSignal(ctx, rank, signal, stream)
}

// Flush makes the stream wait for what was put in others, or waits on the host.
func (w *Window) Flush(ctx context.Context, stream af.Stream, rank int) error {
	return w.w.Flush(ctx, rank, stream)
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
	if !errors.Is(err, van.ErrTimeout) || w.w.Check() != nil { // the window may be over as somebody was too late
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

// Check is window.Window.Check.
func (w *Window) Check() error { return w.w.Check() }

// Close begins window.Window.Close.
func (w *Window) Close() *Task {
	return newTask(noLimit, func(context.Context) error { return w.w.Close() })
}

// Drop closes a window that Python has let go of, also one that is still being made.
func (w *Window) Drop() {
	w.made.Cancel()
	go func() {
		<-w.made.done
		if w.made.err == nil {
			_ = w.w.Close()
		}
	}()
}
