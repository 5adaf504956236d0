package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/stepaf/stepaf-go/tools/internal/verbsprobe"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// The floor of RDMA is a write with immediate each way between the same two processes. It uses package verbs and
// nothing else of this library.

const (
	floorPatient = 10 * time.Second
	// floorSpin is the time for which an end polls before it sleeps.
	floorSpin = 5 * time.Millisecond
)

// verbsFloor is that floor, between ports of the address host.
type verbsFloor struct {
	floors
	host netip.Addr
}

func newVerbsEnd(out, in int) (*verbsprobe.End, error) {
	stack, err := verbs.Load(verbs.Options{})
	if err != nil {
		return nil, err
	}
	return verbsprobe.New(stack, verbsprobe.Options{Out: out, In: in, Depth: 256, Inline: 1024})
}

// serve starts a server that answers the rounds of one client.
func (x verbsFloor) serve() (*floorServer, error) {
	e, err := newVerbsEnd(x.pull, x.push)
	if err != nil {
		return nil, err
	}
	at, err := e.Listen(x.host)
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	return serving(at.String(), func() {
		if err := serveVerbsFloor(ctx, e); err != nil && ctx.Err() == nil && !errors.Is(err, verbsprobe.ErrEnded) {
			fmt.Fprintln(os.Stderr, "bench: floor:", err)
		}
	}, stop, func() { _ = e.Close() }), nil
}

func serveVerbsFloor(ctx context.Context, e *verbsprobe.End) error {
	if err := e.Accept(ctx); err != nil {
		return err
	}
	for ctx.Err() == nil {
		// The server sleeps while the library is measured.
		_, came, err := e.Arrival(floorSpin, time.Second)
		if err == nil && came {
			err = e.Write(0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// verbsClient measures rounds.
type verbsClient struct{ e *verbsprobe.End }

func (x verbsFloor) dial(addrs []string) (baseline, error) {
	dst, err := netip.ParseAddrPort(addrs[0])
	if err != nil {
		return nil, err
	}
	e, err := newVerbsEnd(x.push, x.pull)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), floorPatient)
	defer cancel()
	if err := e.Dial(ctx, x.host, dst); err != nil {
		return nil, errors.Join(fmt.Errorf("floor: %w", err), e.Close())
	}
	return &verbsClient{e}, nil
}

func (c *verbsClient) close() { _ = c.e.Close() }

// measure does n rounds and returns the nanoseconds of each.
func (c *verbsClient) measure(n int) ([]int64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return timed(n, func(int) error {
		start := time.Now()
		if err := c.e.Write(0); err != nil {
			return fmt.Errorf("floor: %w", err)
		}
		for {
			_, came, err := c.e.Arrival(floorPatient, 0)
			switch {
			case err != nil:
				return fmt.Errorf("floor: %w", err)
			case came:
				return nil
			case time.Since(start) > floorPatient:
				return fmt.Errorf("floor: no answer within %s", floorPatient)
			}
		}
	})
}
