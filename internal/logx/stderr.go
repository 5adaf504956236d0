package logx

// Standard error, for a library. A library must not rely on it: standard error may be closed, may be
// a pipe without a reader, or its number may belong to another file of the program.

import (
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Stderr writes to standard error and never fails. A line is dropped
//   - if the other end of the pipe or socket is closed. An os.File would end the process by SIGPIPE,
//     also if the process ignores that signal and Go is a library in it;
//   - if it cannot be written within stderrPatience, since the reader does not read. Later lines
//     are then dropped at once, until there is space again;
//   - if descriptor 2 is closed, or has the close-on-exec flag. Standard error has no such flag, since
//     child processes inherit it: the number then belongs to a file that was opened later.
//
// It is safe for concurrent use.
var Stderr io.Writer = &lossy{fd: 2}

const (
	stderrPatience = 100 * time.Millisecond

	// stderrPiece is the number of bytes that a pipe takes without blocking if poll reports it as writable.
	stderrPiece = 4096
)

// lossy writes lines to a descriptor; see Stderr.
type lossy struct {
	fd int

	mu      sync.Mutex
	stuck   bool // the last line could not be written in time
	dropped int  // lines since the reader stopped reading
}

// Write implements io.Writer. It always reports success.
func (l *lossy) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	flags, err := unix.FcntlInt(uintptr(l.fd), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC != 0 {
		return len(line), nil
	}
	text := line
	if l.dropped > 0 {
		text = fmt.Appendf(nil, "%d lines of the log were dropped: nobody read standard error\n%s", l.dropped, line)
	}
	switch whole, stuck := l.put(text); {
	case whole:
		l.dropped = 0
	case stuck:
		l.dropped++
	}
	return len(line), nil
}

// put writes text in pieces. It reports whether it has written everything, and if not, whether the reader does not
// read.
func (l *lossy) put(text []byte) (whole, stuck bool) {
	for len(text) > 0 {
		if writable, gone := l.wait(); gone || !writable {
			l.stuck = !gone
			return false, !gone
		}
		n, err := unix.Write(l.fd, text[:min(len(text), stderrPiece)])
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN: // another writer has filled the pipe
			l.stuck = true
			return false, true
		case err != nil:
			return false, false
		default:
			text = text[n:]
		}
	}
	l.stuck = false
	return true, false
}

// wait waits until the descriptor is writable, or reports that the reader has closed its end.
func (l *lossy) wait() (writable, gone bool) {
	end := time.Now().Add(stderrPatience)
	if l.stuck {
		end = time.Now()
	}
	for {
		p := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLOUT}}
		_, err := unix.Poll(p, int(max(time.Until(end), 0).Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if err != nil || p[0].Revents&(unix.POLLERR|unix.POLLHUP|unix.POLLNVAL) != 0 {
			return false, true
		}
		return p[0].Revents&unix.POLLOUT != 0, false
	}
}
