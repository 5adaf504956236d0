package core

import (
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
)

// TestFilesOfANode: a forked child closes the node's own sockets, and no others.
func TestFilesOfANode(t *testing.T) {
	close := func(c io.Closer) { t.Cleanup(func() { _ = c.Close() }) }
	listen := func(network, addr string) net.Listener {
		l, err := net.Listen(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		close(l)
		return l
	}
	// connect returns both ends of a connection to l.
	connect := func(l net.Listener) (near, far net.Conn) {
		near, err := net.Dial(l.Addr().Network(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		close(near)
		if far, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
		close(far)
		return near, far
	}
	own, peer, stranger := listen("tcp", "127.0.0.1:0"), listen("tcp", "127.0.0.1:0"), listen("tcp", "127.0.0.1:0")
	name := fmt.Sprint("test-of-forks-", os.Getpid()) // this test may run twice on a machine
	memory, other := listen("unix", "@stepaf-"+name), listen("unix", "@"+name)
	_, accepted := connect(own)
	toPeer, _ := connect(peer)
	toStranger, fromStranger := connect(stranger)
	inMemory, _ := connect(memory)
	inOther, _ := connect(other)

	port := own.Addr().(*net.TCPAddr).Port
	peers := []string{fmt.Sprintf("localhost:%d", peer.Addr().(*net.TCPAddr).Port), "nonsense", "127.0.0.1:99999"}
	is := ownSockets(port, peers)
	for _, c := range []struct {
		name string
		c    any
		want bool
	}{
		{"its listener", own, true}, {"an accepted connection", accepted, true}, {"a connection to a peer", toPeer, true},
		{"another's listener", stranger, false}, {"a connection to another", toStranger, false}, {"of another", fromStranger, false},
		{"its listener within the host", memory, true}, {"a connection within the host", inMemory, true},
		{"another's listener within the host", other, false}, {"another's connection within the host", inOther, false},
	} {
		if got := is(descriptor(t, c.c)); got != c.want {
			t.Errorf("%s: %t, want %t", c.name, got, c.want)
		}
	}
	files := filesOf(is)
	for _, c := range []any{own, accepted, toPeer, memory, inMemory} {
		if fd := descriptor(t, c); !slices.ContainsFunc(files, func(f File) bool { return f.FD == fd && f.Num != 0 }) {
			t.Errorf("descriptor %d is not in %v", fd, files)
		}
	}
}

func descriptor(t *testing.T, c any) (fd int) {
	t.Helper()
	raw, err := c.(interface {
		SyscallConn() (syscall.RawConn, error)
	}).SyscallConn()
	if err == nil {
		err = raw.Control(func(n uintptr) { fd = int(n) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}
