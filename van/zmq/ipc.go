package zmq

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/van"
)

// localPath returns the path of the Unix socket of a port. The original uses the same path.
func localPath(port int) string { return filepath.Join(localDir, strconv.Itoa(port)) }

// localDir is the directory of the sockets. Tests set their own.
var localDir = "/tmp"

// checkLocal returns an error unless path is a socket of this user. Every user can create a file at that
// path.
func checkLocal(path string) error {
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("%w: %s exists and is not a socket", syscall.EADDRINUSE, path)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != localUser() {
		return fmt.Errorf("%w: %s belongs to user %d, want %d, who runs this process: %w", syscall.EADDRINUSE, path, sys.Uid, localUser(), van.ErrInvalid)
	}
	return nil
}

// localUser returns the user id that must own the sockets.
var localUser = os.Geteuid

// bindLocal binds a Unix socket. Its name is a port number. A TCP listener reserves that port while the node
// lives, so that no other node of this host takes the same path.
func bindLocal(z *zmq4.Socket, self van.Node, rootPort int) (int, func(), error) {
	var l net.Listener
	port, err := freeport.Except(rootPort, func() (_ int, _ func(), err error) {
		if l, err = net.Listen("tcp", net.JoinHostPort(self.Hostname, "0")); err != nil {
			return 0, nil, err
		}
		first := l
		return l.Addr().(*net.TCPAddr).Port, func() { _ = first.Close() }, nil
	})
	if err != nil {
		return 0, nil, err
	}
	release := func() { _ = l.Close() }
	port = cmp.Or(self.Port, port)
	path := localPath(port)
	if err := makeLocal(z, path); err != nil {
		release()
		return 0, nil, err
	}
	return port, func() { _ = os.Remove(path); release() }, nil
}

// makeLocal binds z to path. Only this user may connect to it.
func makeLocal(z *zmq4.Socket, path string) error {
	switch err := checkLocal(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	default:
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			_ = c.Close()
			return fmt.Errorf("%w: a process answers at %s", syscall.EADDRINUSE, path)
		}
		if err := os.Remove(path); err != nil { // the socket of a dead process
			return err
		}
	}
	// The socket is created in a private directory, gets its permissions there, and is then linked to path.
	dir, err := os.MkdirTemp(localDir, ".stepaf-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	private := filepath.Join(dir, "s")
	if err := z.Bind("ipc://" + private); err != nil {
		return addressError(err)
	}
	if err := os.Chmod(private, 0o600); err != nil {
		return err
	}
	// Unlike Rename, Link does not replace another process's socket.
	if err := os.Link(private, path); err != nil {
		return fmt.Errorf("%w: %w", syscall.EADDRINUSE, err)
	}
	return nil
}
