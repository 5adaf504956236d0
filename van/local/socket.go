package local

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// The Unix socket of a link. Both ends use it for the handshake, to watch each other, and to announce device
// memory.

// listen opens the socket of t.
func listen(t *token) (*net.UnixListener, error) {
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: t.address(), Net: "unixpacket"})
}

// sameUser asks the kernel for the process at the other end. It returns the pid, or an error if the process belongs to
// another user.
func sameUser(c *net.UnixConn) (pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return 0, fmt.Errorf("SO_PEERCRED: %w", errors.Join(err, credErr))
	}
	if own := os.Geteuid(); int(cred.Uid) != own {
		return 0, fmt.Errorf("%w: process %d runs as user %d, want %d", van.ErrInvalid, cred.Pid, cred.Uid, own)
	}
	return int(cred.Pid), nil
}

// receive reads one message of at most most bytes and the files that were sent with it.
func receive(c *net.UnixConn, most int) (b []byte, fds []int, err error) {
	b = make([]byte, most)
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, k, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, nil, fmt.Errorf("no answer over the socket: %w", err)
	}
	if fds, err = filesIn(oob[:k]); err != nil {
		return nil, fds, err
	}
	if err := lacksFiles(flags, len(fds), maxFiles); err != nil {
		return nil, fds, err
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, fds, fmt.Errorf("%w: message longer than %d bytes or %d files", errProtocol, most, maxFiles)
	}
	return b[:n], fds, nil
}

// maxFiles is the maximum number of files in a message.
const maxFiles = 4

// lacksFiles returns an error if fewer files arrived with a message than were sent, although
// the buffer holds room files: this process has reached its limit of descriptors.
func lacksFiles(flags, came, room int) error {
	if flags&unix.MSG_CTRUNC == 0 || came >= room {
		return nil
	}
	return fmt.Errorf("process %d could take only %d of the files of a message: %w; the limit is its RLIMIT_NOFILE (ulimit -Hn)", os.Getpid(), came, unix.EMFILE)
}

// filesIn returns the files that were received with a message.
func filesIn(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds, err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

var errProtocol = errors.New("the peer does not keep to the protocol of the shared memory")

// awaitEnd returns when the connection or the process at its other end has ended.
func awaitEnd(c *net.UnixConn) {
	awaitEndOf(c, func() {
		var b [1]byte
		_, _ = c.Read(b[:]) // the peer never sends data
	})
}

// awaitEndOf is awaitEnd with read, which reads until the connection ends. The connection may outlast the
// process at its other end, if child processes have inherited it.
func awaitEndOf(c *net.UnixConn, read func()) {
	if pid, err := sameUser(c); err == nil {
		if fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK); err == nil {
			process := os.NewFile(uintptr(fd), "pidfd")
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				if raw, err := process.SyscallConn(); err == nil && raw.Read(exited) == nil {
					_ = c.Close()
				}
			}()
			defer func() {
				_ = process.SetReadDeadline(time.Unix(1, 0)) // ends the wait
				<-ended
				_ = process.Close()
			}()
		}
	}
	read()
}

// ended reports whether process pid has ended.
func ended(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	return exited(uintptr(fd))
}

// exited reports whether the process of a pidfd has ended.
func exited(fd uintptr) bool {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p[:], 0)
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}
