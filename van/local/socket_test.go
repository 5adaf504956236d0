package local

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// socketPair is two ends of a Unix socket.
func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// allow lets this process have n more descriptors, until the test ends.
func allow(t *testing.T, n int) {
	t.Helper()
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		t.Fatal(err)
	}
	next, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(next)
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l) })
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next + n), Max: l.Max}); err != nil {
		t.Fatal(err)
	}
}

// TestFilesLack: a message whose files this process cannot take is no fault of the peer, and the
// error names the limit. A message with more files than the buffer holds is.
func TestFilesLack(t *testing.T) {
	for _, x := range []struct {
		name        string
		sent, allow int
		is          error
		text        string
	}{
		{"none left", 2, 0, unix.EMFILE, "could take only 0 of the files of a message: too many open files; the limit is its RLIMIT_NOFILE"},
		{"one left", 2, 1, unix.EMFILE, "could take only 1 of the files"},
		{"too many", maxFiles + 1, 100, errProtocol, "message longer than 10 bytes or 4 files"},
	} {
		t.Run(x.name, func(t *testing.T) {
			from, to := socketPair(t)
			files := make([]int, x.sent)
			if _, _, err := from.WriteMsgUnix([]byte("hello"), unix.UnixRights(files...), nil); err != nil {
				t.Fatal(err)
			}
			allow(t, x.allow)
			_, fds, err := receive(to, 10)
			closeAll(fds)
			if !errors.Is(err, x.is) || !strings.Contains(err.Error(), x.text) {
				t.Errorf("%v, want %q", err, x.text)
			}
		})
	}
}
