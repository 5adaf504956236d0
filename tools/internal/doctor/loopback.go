package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stepaf/stepaf-go/tools/internal/verbsprobe"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

const (
	loopbackRounds = 300
	warmupRounds   = 20
	portTime       = 5 * time.Second // for the connection and all rounds of one port

	pollSpin  = 200 * time.Microsecond
	pollBlock = 20 * time.Millisecond
)

// trips are the round trips of one port.
type trips struct {
	device   string
	rounds   int
	p50, p99 time.Duration
}

// loopback connects addr with itself, sends a write with immediate in both directions, and releases all resources.
func loopback(ctx context.Context, stack verbs.Stack, addr netip.Addr, rounds int) (t trips, err error) {
	var ends [2]*verbsprobe.End // the listener, and the dialer
	for i := range ends {
		if ends[i], err = verbsprobe.New(stack, verbsprobe.Options{Out: 8, In: 8, Depth: 16}); err != nil {
			return t, err
		}
		defer func() { err = errors.Join(err, ends[i].Close()) }()
	}
	if err := join(ctx, addr, ends[0], ends[1]); err != nil {
		return t, err
	}
	took := make([]time.Duration, 0, rounds)
	for i := range warmupRounds + rounds {
		start := time.Now()
		for _, way := range [][2]*verbsprobe.End{{ends[1], ends[0]}, {ends[0], ends[1]}} {
			if err := write(ctx, way[0], way[1], uint32(i)); err != nil {
				return t, fmt.Errorf("round %d: %w", i+1, err)
			}
		}
		if i >= warmupRounds {
			took = append(took, time.Since(start))
		}
	}
	slices.Sort(took)
	return trips{device: ends[1].Device(), rounds: rounds, p50: took[len(took)/2], p99: took[len(took)*99/100]}, nil
}

// join connects two ends at addr. The error is that of the end that failed first.
func join(ctx context.Context, addr netip.Addr, listener, dialer *verbsprobe.End) error {
	at, err := listener.Listen(addr)
	if err != nil {
		return err
	}
	both, each := errgroup.WithContext(ctx)
	both.Go(func() error { return listener.Accept(each) })
	both.Go(func() error { return dialer.Dial(each, addr, at) })
	err = both.Wait()
	return cmp.Or(context.Cause(ctx), err)
}

// write sends a byte from one end to the other and waits for it.
func write(ctx context.Context, from, to *verbsprobe.End, n uint32) error {
	mark := from.Out()[0] + 1
	from.Out()[0] = mark
	if err := from.Write(n); err != nil {
		return err
	}
	for {
		imm, came, err := to.Arrival(pollSpin, pollBlock)
		if !came { // the sender has the cause
			if _, _, failed := from.Arrival(0, 0); failed != nil {
				return failed
			}
		}
		switch {
		case err != nil:
			return err
		case came && (imm != n || to.In()[0] != mark):
			return fmt.Errorf("immediate %d and byte %d arrived, want %d and %d", imm, to.In()[0], n, mark)
		case came:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("a write does not arrive: %w", context.Cause(ctx))
		}
	}
}

// remedyFor returns the remedy for an error of loopback.
func remedyFor(err error) string {
	if e, ok := errors.AsType[*verbsprobe.EventError](err); ok {
		switch e.Event {
		case verbs.AddrError, verbs.RouteError:
			return "see that the interface is up and has a route to itself (ip addr, ip route get); InfiniBand needs a subnet manager"
		case verbs.Rejected:
			return "another network namespace or program may have taken the port; run it again"
		}
		return "see dmesg, and try rping -s and rping -c on this machine"
	}
	if e, ok := errors.AsType[*verbsprobe.StatusError](err); ok {
		if e.Status == verbs.StatusRetryExceeded {
			return "packets are lost: see the cable, the switch, and that no firewall drops UDP port 4791"
		}
		return "see dmesg, and compare with ib_write_lat on this machine"
	}
	_, memory := errors.AsType[*verbsprobe.MemoryError](err)
	switch {
	case errors.Is(err, syscall.ENOMEM), memory && errors.Is(err, syscall.EPERM): // a limit of 0 is EPERM
		return "ulimit -l unlimited (docker: --ulimit memlock=-1)"
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return "give this user access to /dev/infiniband (docker: --device=/dev/infiniband)"
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.ENODEV):
		return "see that the address is that of an RDMA interface in this network namespace (rdma link, ip addr)"
	case errors.Is(err, context.DeadlineExceeded):
		return "see that no firewall drops UDP port 4791 on the interface, and dmesg"
	}
	return "see dmesg, and try rping -s and rping -c on this machine"
}
