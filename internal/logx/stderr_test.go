package logx

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inherited returns a descriptor that, like standard error, exec does not close.
func inherited(t *testing.T, fd int) int {
	t.Helper()
	own, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(own) })
	return own
}

// pipe returns a pipe with a descriptor of its own for the writer.
func pipe(t *testing.T) (r *os.File, w int) {
	t.Helper()
	r, own, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	w = inherited(t, int(own.Fd()))
	_ = own.Close()
	t.Cleanup(func() { _ = r.Close() })
	return r, w
}

// write writes a line, which must always succeed.
func write(t *testing.T, l *lossy, line string) {
	t.Helper()
	if n, err := l.Write([]byte(line)); n != len(line) || err != nil {
		t.Errorf("Write: %d bytes, %v; want %d, nil", n, err, len(line))
	}
}

// TestStderrWithoutReader: a write to a pipe without a reader neither fails nor ends the process.
func TestStderrWithoutReader(t *testing.T) {
	r, w := pipe(t)
	l := &lossy{fd: w}
	_ = r.Close()
	write(t, l, "a line\n")
}

// TestStderrFull: a reader that does not read delays one line. When it reads again, the number of lost lines is reported.
func TestStderrFull(t *testing.T) {
	r, w := pipe(t)
	l := &lossy{fd: w}
	long := strings.Repeat("x", 10_000) + "\n"
	began := time.Now()
	const lines = 200
	for range lines { // 2 MB; a pipe has 64 KiB
		write(t, l, long)
	}
	if took := time.Since(began); took < stderrPatience || took > 50*stderrPatience {
		t.Errorf("%d lines took %v, want one wait of %v", lines, took, stderrPatience)
	}
	dropped := l.dropped
	if dropped < lines-10 || !l.stuck {
		t.Errorf("%d lines were dropped (stuck: %t), want nearly all of %d", dropped, l.stuck, lines)
	}
	b := make([]byte, 1<<20)
	if _, err := r.Read(b); err != nil {
		t.Fatal(err)
	}
	write(t, l, "again\n")
	n, err := r.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%d lines of the log were dropped: nobody read standard error\nagain\n", dropped); !bytes.HasSuffix(b[:n], []byte(want)) {
		t.Errorf("got %q, want %q at the end", b[max(0, n-200):n], want)
	}
}

// TestStderrOfAnother: Stderr does not write to a file that got the number of a closed standard error.
func TestStderrOfAnother(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "data")) // Go opens files to be closed by exec, as Python does
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	write(t, &lossy{fd: int(f.Fd())}, "not for this file\n")
	write(t, &lossy{fd: 1 << 20}, "for no file\n")
	write(t, &lossy{fd: inherited(t, int(f.Fd()))}, "for this file\n")
	if got, err := os.ReadFile(f.Name()); err != nil || string(got) != "for this file\n" {
		t.Errorf("the file has %q, %v", got, err)
	}
}
