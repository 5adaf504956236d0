package tcp

// This file owns the detection of peers whose host acknowledges nothing. The kernel alone would retransmit for a quarter of an hour.
// TCP_USER_TIMEOUT cannot be used: it also ends the connection to a live peer that accepts no bytes because its handler is slow.
// While nothing is unacknowledged, the kernel's keep-alives detect such a host.

import (
	"context"
	"errors"
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

// idleLimit is how long the host of an idle connection may be silent if PS_HEARTBEAT_TIMEOUT is no limit.
const idleLimit = 20 * time.Second

// keepAlive makes the kernel end a connection without unacknowledged bytes whose peer's host has answered nothing for limit and a fourth
// more, in whole seconds. If limit is 0, idleLimit applies. A stopped process does not matter: its host answers.
func keepAlive(fd int, limit time.Duration) error {
	if limit <= 0 {
		limit = idleLimit
	}
	every := max(int((limit/4+time.Second-1)/time.Second), 1)
	count := max(int((limit+limit/4+time.Second-1)/time.Second)/every-1, 1)
	set := func(level, option, value int) error { return unix.SetsockoptInt(fd, level, option, value) }
	return errors.Join(set(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, every), set(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every),
		set(unix.IPPROTO_TCP, unix.TCP_KEEPCNT, count), set(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1))
}
