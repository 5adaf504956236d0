package memfd

// Pages: files that other processes map by name. A name is the numbers of a process and of its file descriptor.

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Page is a mapping of a file of New. It is unmapped when nothing refers to it any more. Code that passes its memory
// on, for example to a device that pins it, makes the receiver refer to the Page.
type Page struct{ Mem []byte }

// NewPage creates a file of n bytes, see New, and maps it. The caller closes the file.
func NewPage(n int) (fd int, p *Page, err error) {
	if fd, err = New(n); err != nil {
		return fd, nil, err
	}
	if p, err = mapPage(fd, n, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	return fd, p, nil
}

// mapPage maps n bytes of the file fd, which stays open.
func mapPage(fd, n, access int) (*Page, error) {
	mem, err := unix.Mmap(fd, 0, n, access, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	p := &Page{mem}
	runtime.AddCleanup(p, func(mem []byte) { _ = unix.Munmap(mem) }, mem)
	return p, nil
}

// NameLen is the length of a name in bytes.
const NameLen = 12

// Name returns the name by which other processes map the file fd of this process while it is open.
func Name(fd int) []byte {
	name := binary.NativeEndian.AppendUint64(nil, uint64(os.Getpid()))
	return binary.NativeEndian.AppendUint32(name, uint32(fd))
}

// MapNamed maps n bytes of the file that another process has named in NameLen bytes, for reading or also for writing.
// It opens only a file in memory that cannot shrink and has that length, so opening neither blocks nor has side
// effects. It fails if this process may not open the files of the other process.
func MapNamed(name []byte, n int, write bool) (*Page, error) {
	mode, access := unix.O_RDONLY, unix.PROT_READ
	if write {
		mode, access = unix.O_RDWR, access|unix.PROT_WRITE
	}
	fd, err := open(fmt.Sprintf("/proc/%d/fd/%d", binary.NativeEndian.Uint64(name), binary.NativeEndian.Uint32(name[8:])), mode)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	defer unix.Close(fd)
	if err := Check(fd, n); err != nil {
		return nil, err
	}
	return mapPage(fd, n, access)
}

// open opens a path only if it is on the file system of this process's files in memory.
func open(path string, mode int) (int, error) {
	at, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	var st, like unix.Stat_t
	own, err := unix.MemfdCreate("", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(own)
	if err := cmp.Or(unix.Fstat(at, &st), unix.Fstat(own, &like)); err != nil {
		return -1, err
	}
	if st.Dev != like.Dev || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return -1, ErrMemory
	}
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), mode|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}
