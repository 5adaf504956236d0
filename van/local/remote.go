package local

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// remote is another process whose memory this process reads.
type remote struct {
	pid int
	fd  int // a pidfd, which detects the end of the process even if another process gets its pid
}

// openRemote opens process pid, which must be alive.
func openRemote(pid int) (*remote, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("pidfd_open: %w", err)
	}
	return &remote{pid, fd}, nil
}

func (r *remote) close() { _ = unix.Close(r.fd) }

// alive reports whether the process is running.
func (r *remote) alive() bool { return !exited(uintptr(r.fd)) }

// maxRead limits the bytes of one system call.
const maxRead = 256 << 20

// read copies len(dst) bytes at addr of the process to dst.
func (r *remote) read(dst []byte, addr uint64) error {
	for done := 0; done < len(dst); {
		n := min(len(dst)-done, maxRead)
		if addr > math.MaxUint64-uint64(len(dst)) {
			return fmt.Errorf("read %d bytes at %#x of process %d: %w", len(dst), addr, r.pid, unix.EFAULT)
		}
		to := [1]unix.Iovec{{Base: &dst[done], Len: uint64(n)}}
		from := [1]unix.RemoteIovec{{Base: uintptr(addr) + uintptr(done), Len: n}}
		got, err := unix.ProcessVMReadv(r.pid, to[:], from[:], 0)
		if err == nil && got <= 0 {
			err = unix.EFAULT
		}
		if err != nil {
			return fmt.Errorf("read %d bytes at %#x of process %d: process_vm_readv at byte %d: %w", len(dst), addr, r.pid, done, err)
		}
		done += got
	}
	written(dst)
	return nil
}

// canRead returns an error if the memory of the process cannot be read. It reads at addr the number nonce, which
// the process has written there.
func (r *remote) canRead(addr, nonce uint64) error {
	var got uint64
	if err := r.read(unsafe.Slice((*byte)(unsafe.Pointer(&got)), 8), addr); err != nil {
		return err
	}
	if got != nonce {
		return fmt.Errorf("process %d: %#x lies at %#x, not the number that the peer has put there", r.pid, got, addr)
	}
	return nil
}

// yamaScope is the setting of the Yama module that limits which processes may read others.
const yamaScope = "/proc/sys/kernel/yama/ptrace_scope"

// admitReaders permits processes of this user to read this process's memory if Yama
// requires that permission. It reports whether it did.
func admitReaders() (bool, error) {
	scope, err := os.ReadFile(yamaScope)
	if err != nil || string(bytes.TrimSpace(scope)) != "1" {
		return false, nil // no Yama, no permission needed, or none possible
	}
	const anyone = math.MaxUint64 // PR_SET_PTRACER_ANY: the alternative permits only one process
	if err := unix.Prctl(unix.PR_SET_PTRACER, anyone, 0, 0, 0); err != nil {
		return false, fmt.Errorf("prctl PR_SET_PTRACER: %w", err)
	}
	return true, nil
}
