package exit

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
)

// Interruptible returns a context within ctx. The first SIGINT or SIGTERM ends it, with *Stopped as the cause.
func Interruptible(ctx context.Context) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case s := <-signals:
			end(&Stopped{s.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		end(nil)
	}
}

// Stopped is the cause of a context that a signal has ended.
type Stopped struct{ Signal syscall.Signal }

func (s *Stopped) Error() string { return "stopped by signal: " + s.Signal.String() }

// BySignal gives err the exit status of the signal that ended ctx, if a signal did.
func BySignal(ctx context.Context, err error) error {
	if s, ok := errors.AsType[*Stopped](context.Cause(ctx)); ok {
		return With(128+int(s.Signal), s)
	}
	return err
}
