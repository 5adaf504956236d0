package gpusync

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/simgpu"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestEnding: Await waits for all peers, for EndLimit, or for closeLimit after the node has begun to end.
func TestEnding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, begun := NewEnding(2), time.Now()
		e.Over(0)
		if late := e.Await(nil, nil); late != 1 || time.Since(begun) != EndLimit {
			t.Errorf("peer %d after %v, want 1 after %v", late, time.Since(begun), EndLimit)
		}
		closing, begun := make(chan struct{}), time.Now()
		close(closing)
		if late := e.Await(nil, closing); late != 1 || time.Since(begun) != closeLimit {
			t.Errorf("peer %d after %v, want 1 after %v", late, time.Since(begun), closeLimit)
		}
		begun = time.Now()
		if AwaitClose(nil) || !AwaitClose(closing) || time.Since(begun) != closeLimit {
			t.Errorf("AwaitClose has taken %v, want %v for a channel that is not closed", time.Since(begun), closeLimit)
		}
		if late := e.Await(closing, nil); late != -1 {
			t.Errorf("waits for peer %d, but the node has ended", late)
		}
		go func() {
			time.Sleep(time.Second)
			e.Over(1)
		}()
		begun = time.Now()
		if late := e.Await(nil, nil); late != -1 || time.Since(begun) != time.Second {
			t.Errorf("peer %d after %v, want none after a second", late, time.Since(begun))
		}
	})
}

// TestBegin: an exchange that has ended does not begin.
func TestBegin(t *testing.T) {
	var failed atomic.Pointer[error]
	e := NewEnding(1)
	if err := e.Begin(&failed); err != nil || !e.Begun() {
		t.Errorf("%v, begun %t", err, e.Begun())
	}
	e = NewEnding(1)
	failed.Store(&van.ErrClosed)
	if err := e.Begin(&failed); !errors.Is(err, van.ErrClosed) || e.Begun() {
		t.Errorf("%v, begun %t", err, e.Begun())
	}
}

// TestPage: parts of a page are consecutive; a page without a rest, or with too small a rest, is replaced.
func TestPage(t *testing.T) {
	var p Page
	pages, refuse := 0, false
	alloc := func(n int) (backend.Mem, error) {
		if refuse {
			return backend.Mem{}, backend.ErrNoMemory
		}
		pages++
		return backend.Bytes(make([]byte, n)), nil
	}
	take := func(n, want int) (m backend.Mem) {
		t.Helper()
		m, err := p.Take(n, 256, alloc)
		if err != nil || m.Len() != n || pages != want {
			t.Fatalf("%d bytes of page %d: %v, want %d of page %d", m.Len(), pages, err, n, want)
		}
		return m
	}
	if a, b := take(128, 1), take(128, 1); b.Addr() != a.Addr()+128 {
		t.Errorf("%#x follows %#x", b.Addr(), a.Addr())
	}
	take(200, 2)
	take(57, 3)
	refuse = true
	if _, err := p.Take(256, 256, alloc); !errors.Is(err, backend.ErrNoMemory) {
		t.Error(err)
	}
}

// waiting is a device whose streams may wait.
type waiting struct{ backend.StreamDevice }

func (waiting) MayBlock() bool { return true }

// TestMap: memory that is not the expected one does not stay mapped, unless streams of the device may wait.
func TestMap(t *testing.T) {
	far, near := simgpu.New(0), simgpu.New(1)
	m, err := far.Alloc(PageLen)
	if err != nil {
		t.Fatal(err)
	}
	token := NewToken()
	copy(simgpu.Raw(m), token[:])
	e, err := far.Export(m)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		d     backend.StreamDevice
		n     int
		token Token
		want  error
		left  int
	}{
		{"right", near, PageLen, token, nil, 1},
		{"another token", near, PageLen, NewToken(), van.ErrMalformed, 0},
		{"too short", near, PageLen + 1, token, van.ErrMalformed, 0},
		{"another token, streams may wait", waiting{near}, PageLen, NewToken(), van.ErrMalformed, 1},
	} {
		before := near.Imports()
		if _, err := Map(tt.d, e, tt.n, tt.token, "the peer's"); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if n := near.Imports() - before; n != tt.left {
			t.Errorf("%s: %d imports are open, want %d", tt.name, n, tt.left)
		}
	}
}
