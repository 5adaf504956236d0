package memfd

// Pages: files that other processes map by their name, which is the number of a process and of its file descriptor.

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Page is a mapping of a file of New. It ends when nobody refers to it any more: who gives its memory to others, as to a device
// that pins it, has them refer to it.
type Page struct{ Mem []byte }

// Map maps n bytes of the file fd, which stays open.
func Map(fd, n int) (*Page, error) { return mapPage(fd, n, unix.PROT_READ|unix.PROT_WRITE) }

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

// Name is what other processes map the file fd of this process by, for as long as it is open.
func Name(fd int) []byte {
	name := binary.NativeEndian.AppendUint64(nil, uint64(os.Getpid()))
	return binary.NativeEndian.AppendUint32(name, uint32(fd))
}

// MapNamed maps n bytes of the file that another process has named in NameLen bytes, to be read or to be written, too. It opens nothing
// whose opening may wait, or do anything: only a file in memory that cannot shrink and has that length. It
// fails where this process may not look at the files of the other one.
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

// open opens what lies where files in memory of this process do.
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
