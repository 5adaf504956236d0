package tcp

// This file owns the detection of peers whose host acknowledges nothing. The kernel alone would retransmit for a quarter of an hour.
// TCP_USER_TIMEOUT cannot be used: it also ends the connection to a live peer that accepts no bytes because its handler is slow.
// While nothing is unacknowledged, the keep-alives that tune sets detect such a host.

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// watch waits until c or ctx has ended. It ends c if the peer's host has acknowledged nothing for limit although
// unacknowledged bytes were sent. If limit is 0, only the kernel decides.
func (c *outConn) watch(ctx context.Context, limit time.Duration) {
	var tick <-chan time.Time
	period := limit / silentSamples
	if period > 0 {
		t := time.NewTicker(period)
		defer t.Stop()
		tick = t.C
	}
	for silent := 0; ; {
		select {
		case <-c.broken:
			return
		case <-ctx.Done():
			return
		case <-tick:
		}
		if silent++; !c.silent(period) {
			silent = 0
		} else if silent > silentSamples {
			c.mu.Lock()
			c.fail(unix.ETIMEDOUT)
			c.mu.Unlock()
		}
	}
}

// silentSamples is the number of silent periods in a row after which a connection ends.
const silentSamples = 4

// silent reports whether the peer's host has acknowledged nothing for period, and has not answered bytes or window probes that were
// sent after its last acknowledgement. A host that answers each retransmission with a closed window is not silent. One unanswered
// probe does not count, since Linux does not answer the second of two probes within 500 ms.
func (c *outConn) silent(period time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return false
	}
	i, err := unix.GetsockoptTCPInfo(c.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || time.Duration(i.Last_ack_recv)*time.Millisecond < period {
		return false
	}
	return i.Probes > 1 || i.Unacked > 0 && i.Last_data_sent < i.Last_ack_recv
}
