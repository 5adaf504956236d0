// Package memfd creates memory that processes of one host share: files without a name in the file system. They
// disappear when their users end.
package memfd

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// seals keep the file at its length, so that an access to a mapping cannot fault.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// New creates a sealed file in memory with n bytes, all allocated: New returns an error if there is no memory for them;
// a later access does not raise a signal. The caller closes the file.
func New(n int) (fd int, err error) { return Part(n, n) }

// Part creates a sealed file of n bytes. Only the first have bytes are allocated. The caller accesses the other bytes
// only after Extend has allocated them, since an access to a byte without memory raises a signal. The caller closes the
// file.
func Part(n, have int) (fd int, err error) {
	const noexec = 0x8 // MFD_NOEXEC_SEAL, unknown before Linux 6.3
	fd, err = unix.MemfdCreate("stepaf", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|noexec)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate("stepaf", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Ftruncate(fd, int64(n)); err != nil {
		err = fmt.Errorf("no shared memory: ftruncate to %d bytes: %w", n, err)
	} else if err = Extend(fd, 0, have); err != nil {
	} else if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		err = fmt.Errorf("seal shared memory: %w", err)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// Extend allocates bytes from to to of a file of Part. It fails if there is no memory for them.
func Extend(fd, from, to int) error {
	for {
		err := unix.Fallocate(fd, 0, int64(from), int64(to-from))
		if errors.Is(err, unix.EINTR) { // the runtime's signals
			continue
		}
		if err != nil {
			return fmt.Errorf("no shared memory: fallocate of %d bytes: %w", to-from, err)
		}
		return nil
	}
}

// ErrMemory is the error of Check.
var ErrMemory = errors.New("not a sealed memory file of the agreed length")

// Check refuses a file of another process that can shrink or does not have n bytes.
func Check(fd, n int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("fstat: %w", err)
	}
	have, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || have&unix.F_SEAL_SHRINK == 0 || st.Size != int64(n) {
		return fmt.Errorf("%w: %d bytes, want %d, seals %#x", ErrMemory, st.Size, n, have)
	}
	return nil
}
