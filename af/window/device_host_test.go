package window

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestDeviceHostWord: a wait on the host does not need to poll the device.
func TestDeviceHostWord(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 3})
	a, b := r.windows[0], r.windows[1]
	m := &b.dev.memory
	for i := range byte(20) {
		src := bytes.Repeat([]byte{i}, 10)
		r.must(a.PutSignal(t.Context(), 1, 54, r.tensor(0, src), 2))
		vantest.Eventually(t, 20*time.Second, "the signal is in host memory", func() bool { return m.host.came(0, 2, uint64(i)+1) })
		m.reading.Lock() // a wait that polls the device never ends
		r.must(b.WaitSignal(t.Context(), 0, 2))
		m.reading.Unlock()
		if got := r.memory(1)[54:]; !bytes.Equal(got, src) {
			t.Fatalf("got %v, want %v", got, src)
		}
	}
	r.must(b.Signal(t.Context(), 1, 0), b.WaitSignal(t.Context(), 1, 0)) // to this rank itself
	r.all(func(i int) error { return r.windows[i].Close() })
}

// TestDeviceWithoutHostWord: if either end has no page in host memory, waits on the host poll the device.
func TestDeviceWithoutHostWord(t *testing.T) {
	for name, take := range map[string]func(from, to *Window){
		"not mapped": func(from, _ *Window) { from.dev.memory.host.far[1] = backend.Mem{} },
		"not made": func(from, to *Window) {
			from.dev.memory.host.far[1], to.dev.memory.host.own = backend.Mem{}, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newDeviceRig(t, 2, Options{Size: 64, Signals: 2})
			a, b := r.windows[0], r.windows[1]
			take(a, b)
			for range 3 {
				r.must(a.PutSignal(t.Context(), 1, 0, r.tensor(0, []byte{7}), 1), b.WaitSignal(t.Context(), 0, 1))
			}
			r.must(a.Check(), b.Check())
		})
	}
}

// TestDeviceHostPage: a page announced by a rank is used only if it is one, with the right length and token.
func TestDeviceHostPage(t *testing.T) {
	r := newDeviceRig(t, 2, Options{Size: 64, Signals: 1})
	m := &r.windows[0].dev.memory
	token := gpusync.Token(bytes.Repeat([]byte{5}, gpusync.TokenLen))
	size := m.host.size(2)
	file := func(n int) int {
		fd, err := memfd.New(n)
		r.must(err)
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	plain, err := unix.MemfdCreate("plain", unix.MFD_CLOEXEC)
	r.must(err, unix.Ftruncate(plain, int64(size)))
	defer unix.Close(plain)
	for what, c := range map[string]struct {
		fd   int
		want error
	}{
		"no file":         {1 << 20, unix.ENOENT},
		"another length":  {file(size + os.Getpagesize()), memfd.ErrMemory},
		"it could shrink": {plain, memfd.ErrMemory},
		"another page":    {file(size), van.ErrMalformed},
	} {
		if err := m.host.reach(m.d, 1, memfd.Name(c.fd), token); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	good := file(size)
	_, err = unix.Pwrite(good, token[:], 0)
	r.must(err, m.host.reach(m.d, 1, memfd.Name(good), token))
	if open := m.host.fd; open != -1 {
		t.Errorf("file %d of this rank's page is still open", open)
	}
}
