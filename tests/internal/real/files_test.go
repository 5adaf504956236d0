package real

import (
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFilesLeft: a node that ends with more open descriptors of any kind than before it started
// is a violation. Descriptors that were open before are not.
func TestFilesLeft(t *testing.T) {
	before := filesBefore()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.MemfdCreate("ring", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open("/etc/passwd")
	if err != nil {
		t.Fatal(err)
	}
	c := &Cluster{o: Options{Log: func(string) {}}, present: map[string]*Process{}}
	p := &Process{Role: "worker", c: c, changed: make(chan struct{})}
	p.event(Event{Event: left, Before: before, After: openFiles()})
	const want = "1 of /etc/passwd, 1 of eventfd, 1 of eventpoll, 1 of memfd ring, 1 of socket"
	if got := strings.Join(c.Wrong(), "; "); !strings.Contains(got, "worker 0 (process 0) has left descriptors open: "+want+";") {
		t.Errorf("%q, want %q in it", got, want)
	}
	_, _, _, _, _ = l.Close(), unix.Close(mem), unix.Close(event), unix.Close(poll), file.Close()
	n := len(c.Wrong())
	p.event(Event{Event: left, Before: before, After: filesAfter(before)})
	if got := c.Wrong()[n:]; len(got) > 0 {
		t.Errorf("all are closed: %q", got)
	}
}
