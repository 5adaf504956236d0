package core

// Windows on devices as Python uses them.

import (
	"context"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/window"
)

// Window is a window.Window on this node's device, which may be used when the task that makes it has ended without
// an error.
type Window struct {
	w    *window.Window
	made *Task
}

// OpenWindow begins to open a window of size bytes on the ranks' devices. A negative limit is that of the communicator.
func (c *Comm) OpenWindow(size, signals int, limit time.Duration) (*Window, *Task) {
	w := &Window{}
	w.made = newTask(limit, func(ctx context.Context) (err error) {
		w.w, err = window.Open(ctx, c.comm, window.Options{Size: size, Signals: signals, Device: true})
		return err
	})
	return w, w.made
}

// Tensor is its memory here.
func (w *Window) Tensor() af.Tensor { return w.w.Tensor() }

// NoSignal says that a put has none.
const NoSignal = -1

// Put puts x, and a signal unless that is NoSignal.
func (w *Window) Put(stream af.Stream, rank, offset int, x af.Tensor, signal int) error {
	if signal == NoSignal {
		return w.w.Put(context.Background(), rank, offset, x, stream)
	}
	return w.w.PutSignal(context.Background(), rank, offset, x, signal, stream)
}

// Signal adds one to a signal.
func (w *Window) Signal(stream af.Stream, rank, signal int) error {
	return w.w.Signal(context.Background(), rank, signal, stream)
}

// WaitSignal makes the stream wait.
func (w *Window) WaitSignal(stream af.Stream, rank, signal int) error {
	return w.w.WaitSignal(context.Background(), rank, signal, stream)
}

// Flush makes the stream wait for what was put in others.
func (w *Window) Flush(stream af.Stream, rank int) error {
	return w.w.Flush(context.Background(), rank, stream)
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
