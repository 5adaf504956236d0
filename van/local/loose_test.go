package local

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// looseEnd is a connection whose other end is closed with the test.
func looseEnd(t testing.TB) *net.UnixConn {
	t.Helper()
	near, _ := looseEnds(t)
	return near
}

// looseEnds are the ends of a connection, which are closed with the test.
func looseEnds(t testing.TB) (near, far *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(file)
		if err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = c.Close() })
	}
	return conns[0], conns[1]
}
