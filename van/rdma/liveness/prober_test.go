package liveness

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// patience is the time limit on a busy machine for steps that take milliseconds.
const patience = 20 * time.Second

// short is a limit within which an answer arrives even on a busy machine.
const short = 2 * time.Second

// socket opens a UDP socket on this host, and returns its address.
func socket(t *testing.T) (*net.UDPConn, netip.AddrPort) {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// read returns the next datagram and its source.
func read(t *testing.T, c *net.UDPConn) (string, netip.AddrPort) {
	t.Helper()
	var b [100]byte
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	n, from, err := c.ReadFromUDPAddrPort(b[:])
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n]), from
}

func write(t *testing.T, c *net.UDPConn, to netip.AddrPort, b string) {
	t.Helper()
	if _, err := c.WriteToUDPAddrPort([]byte(b), to); err != nil {
		t.Fatal(err)
	}
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !is(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("no %s within %s", what, patience)
		}
	}
}

func asker(t *testing.T, limit time.Duration, who func() []Process) *Prober {
	t.Helper()
	a, err := StartProber(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0, limit, who)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a
}

// TestProber: only an answer of the probed process, to one of the latest probes, counts, and only for a time.
func TestProber(t *testing.T) {
	t.Parallel()
	peer, at := socket(t)
	other, _ := socket(t)
	p := Process{at, 7}
	a := asker(t, short, func() []Process { return []Process{p} })
	answer := func(q string) string { return "SAFA" + q[4:] }
	q, from := read(t, peer)
	if len(q) != size || q[:8] != "SAFQ\x07\x00\x00\x00" {
		t.Fatalf("the question is %q", q)
	}
	if next, _ := read(t, peer); next == q {
		t.Errorf("asked twice with one number: %q", q)
	}
	wrong := map[string]string{
		"nothing":             "",
		"a truncated answer":  answer(q)[:size-1],
		"a longer answer":     answer(q) + "x",
		"the question itself": q,
		"another incarnation": "SAFA\x08\x00\x00\x00" + q[8:],
		"no incarnation":      "SAFA\x00\x00\x00\x00" + q[8:],
		"another number":      answer(q)[:size-1] + string(q[size-1]+1),
		"no number":           answer(q)[:8] + "\x00\x00\x00\x00\x00\x00\x00\x00",
	}
	for _, b := range wrong {
		write(t, peer, from, b)
	}
	write(t, other, from, answer(q))
	for range 3 { // by then all these datagrams have been handled
		read(t, peer)
	}
	if a.Alive(p) {
		t.Error("nonsense counts as an answer")
	}
	for tries := 1; ; tries++ {
		var asked time.Time
		until(t, "answer", func() bool { // a paused machine makes probes old
			q, from = read(t, peer)
			asked = time.Now()
			write(t, peer, from, answer(q))
			return a.Alive(p)
		})
		if a.Alive(Process{at, 8}) {
			t.Error("another process has answered")
		}
		until(t, "end of the answer", func() bool { return !a.Alive(p) })
		if d := time.Since(asked); d <= short {
			break
		} else if tries == 3 { // the test may see the end late
			t.Errorf("the answer counts for %s, want less than %s", d, short)
			break
		}
	}
	for range latest + 1 {
		read(t, peer)
	}
	write(t, peer, from, answer(q))
	for range 2 {
		read(t, peer)
	}
	if a.Alive(p) {
		t.Error("the answer to an old question counts")
	}
}

// TestProberForgets: a process that is no longer a target is removed.
func TestProberForgets(t *testing.T) {
	t.Parallel()
	peer, at := socket(t)
	p := Process{at, 7}
	var ends atomic.Bool
	a := asker(t, short, func() []Process {
		if ends.Load() {
			return nil
		}
		return []Process{p}
	})
	until(t, "answer", func() bool { // in time: a paused machine makes probes old
		q, from := read(t, peer)
		write(t, peer, from, "SAFA"+q[4:])
		return a.Alive(p)
	})
	ends.Store(true)
	until(t, "end", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.probed) == 0
	})
	if a.Alive(p) {
		t.Error("it is remembered")
	}
}

// TestProberNoAddress: a prober needs an address of this host.
func TestProberNoAddress(t *testing.T) {
	t.Parallel()
	a, err := StartProber(netip.MustParseAddr("192.0.2.1"), 0, short, func() []Process { return nil })
	if err == nil {
		a.Close()
		t.Error("asks from an address that is not this host's")
	}
}
