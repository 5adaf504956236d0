//go:build linux && cgo && !nordma

package liveness

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// responder starts a responder at a free port.
func responder(t *testing.T, incarnation uint32) (*Responder, netip.AddrPort) {
	t.Helper()
	for {
		c, at := socket(t)
		_ = c.Close()
		switch a, err := StartResponder(at, incarnation); {
		case err == nil:
			return a, at
		case !errors.Is(err, syscall.EADDRINUSE):
			t.Fatal(err)
		}
	}
}

// threads returns the directories of responder threads in /proc.
func threads(t *testing.T) (all []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range tasks {
		if name, _ := os.ReadFile(dir + "/comm"); strings.TrimSpace(string(name)) == "stepaf-beat" {
			all = append(all, dir)
		}
	}
	return all
}

// TestResponder: each probe of this process is answered, and no other datagram is.
func TestResponder(t *testing.T) {
	a, at := responder(t, 0x01020304)
	c, _ := socket(t)
	other, _ := socket(t)
	const good = "SAFQ\x04\x03\x02\x01"
	for _, bad := range []string{"", "S", "SAFQ", good, good + "1234567", good + "123456789", good + strings.Repeat("x", 2000),
		"SAFA\x04\x03\x02\x0112345678", "SAFQ\x01\x02\x03\x0412345678", "SAFQ\x00\x00\x00\x0012345678", "garbage garbage!"} {
		write(t, c, at, bad)
		write(t, c, at, good+"question")
		write(t, other, at, good+"other...")
		if b, from := read(t, c); b != "SAFA\x04\x03\x02\x01question" || from != at {
			t.Fatalf("behind %q: %s sent %q", bad, from, b)
		}
		if b, _ := read(t, other); b != "SAFA\x04\x03\x02\x01other..." {
			t.Fatalf("the other one got %q", b)
		}
	}
	if _, err := StartResponder(at, 5); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("at an address that is in use: %v", err)
	}
	a.Close()
	a, err := StartResponder(at, 5) // the address is free again
	if err != nil {
		t.Fatal(err)
	}
	write(t, c, at, good+"question")
	write(t, c, at, "SAFQ\x05\x00\x00\x0012345678")
	if b, _ := read(t, c); b != "SAFA\x05\x00\x00\x0012345678" {
		t.Errorf("another process at the address has sent %q", b)
	}
	a.Close()
}

// TestResponderThread: the thread blocks signals, since their handlers are Go's, and ends with Close.
func TestResponderThread(t *testing.T) {
	a, at := responder(t, 7)
	c, _ := socket(t)
	write(t, c, at, "SAFQ\x07\x00\x00\x0012345678")
	read(t, c) // the thread runs
	all := threads(t)
	if len(all) != 1 {
		t.Errorf("%d threads, want one", len(all))
	}
	for _, dir := range all {
		status, err := os.ReadFile(dir + "/status")
		if err != nil {
			t.Fatal(err)
		}
		// All but SIGKILL, SIGSTOP, and the two of the C library.
		if _, blocked, _ := strings.Cut(string(status), "SigBlk:\t"); !strings.HasPrefix(blocked, "fffffffe7ffbfeff\n") && !strings.HasPrefix(blocked, "fffffffc7ffbfeff\n") {
			t.Errorf("it blocks the signals %.16s", blocked)
		}
	}
	a.Close()
	if left := threads(t); len(left) != 0 {
		t.Errorf("threads that have not ended: %v", left)
	}
}

// TestAlive: a process that answers is alive until its answers end.
func TestAlive(t *testing.T) {
	a, at := responder(t, 7)
	p, other := Process{at, 7}, Process{at, 8}
	k := asker(t, short, func() []Process { return []Process{p, other} })
	until(t, "answer", func() bool { return k.Alive(p) })
	if k.Alive(other) {
		t.Error("it answers for another process")
	}
	a.Close()
	until(t, "end of the answers", func() bool { return !k.Alive(p) })
}

// TestBindFails: a responder cannot use an address of another host, and leaves nothing open.
func TestBindFails(t *testing.T) {
	for _, addr := range []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:9"), netip.MustParseAddrPort("[2001:db8::1]:9"), netip.MustParseAddrPort("[fe80::1%1]:9"), {}} {
		before := files(t)
		if a, err := StartResponder(addr, 7); err == nil {
			a.Close()
			t.Errorf("answers at %s", addr)
		}
		if after := files(t); after > before {
			t.Errorf("%s: %d files were left open", addr, after-before)
		}
	}
}

func files(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestIPv6: a responder and a prober work with IPv6.
func TestIPv6(t *testing.T) {
	_, at := socket(t)
	at = netip.AddrPortFrom(netip.IPv6Loopback(), at.Port())
	a, err := StartResponder(at, 7)
	if err != nil {
		t.Skip(err) // without IPv6
	}
	defer a.Close()
	p := Process{at, 7}
	k, err := StartProber(netip.IPv6Loopback(), 0, short, func() []Process { return []Process{p} })
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	until(t, "answer", func() bool { return k.Alive(p) })
}
