package rdma

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// Send refuses a message for which no slot would be granted, and later messages do not wait for it.
func TestTooLongMeta(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	text := func(ts, n int) *van.Message {
		m := control(s, ts)
		m.Control, m.SimpleApp, m.Request = van.Control{}, true, true
		m.Body = make([]byte, n)
		return m
	}
	empty := text(0, 0)
	most := maxMeta - trailerLen - empty.EncodedLen()
	err := w.Send(text(1, most+1))
	if want := fmt.Sprint(maxMeta - trailerLen); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), want) {
		t.Errorf("Send of a meta that is too long: %v, want %v that names %s", err, van.ErrInvalid, want)
	}
	w.must(text(2, most))
	w.must(control(s, 3))
	for i, size := range []int{most, 0} {
		m := s.next()
		if int(m.Timestamp) != 2+i || len(m.Body) != size {
			t.Errorf("timestamp %d with a body of %d bytes, want %d with %d", m.Timestamp, len(m.Body), 2+i, size)
		}
		m.Release()
	}
}

// A message with more than one key or length is packed, and only the padding may make it exceed the limit.
func TestTooLongPacked(t *testing.T) {
	r := newRig(t)
	w, s := r.pair()
	b, err := unix.Mmap(-1, 0, maxData, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	}()
	m := push(s, 1, 1, nil)
	m.Keys, m.Vals = backend.Bytes(make([]byte, 16)), backend.Bytes(b[:maxData-16])
	if err := w.Send(m); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), fmt.Sprint(maxData)) {
		t.Errorf("Send of %d bytes that are more when packed: %v, want %v that names the limit", m.PayloadLen(), err, van.ErrInvalid)
	}
	w.must(control(s, 2))
	m = s.next()
	if m.Timestamp != 2 {
		t.Errorf("timestamp %d, want 2", m.Timestamp)
	}
	m.Release()
}

// TestFramesFitACell: a message of several keys needs no longer memory for its meta than others, and short frames are copied.
func TestFramesFitACell(t *testing.T) {
	to := &testNode{who: van.Node{ID: 8}}
	for _, n := range [][3]int{{1344, 1344, 1344}, {1344, 16, 8}, {16, 1344, 8}, {800, 3000, 400}, {1344, 1, van.CopyBelow - 2}, {16, 100, 8}} {
		m := push(to, 1, 1, value(n[1], 1))
		m.Frames, m.Keys, m.Lens = 3, backend.Bytes(make([]byte, n[0])), backend.Bytes(make([]byte, n[2]))
		m.DataTypes = append(m.DataTypes, van.TypeInt32)
		var o outgoing
		if err := o.fill(m, m.PayloadLen()); err != nil {
			t.Fatal(err)
		}
		if got := (&nativeOut{}).layout(&o); o.form != formFrames || got > conn.CellSize {
			t.Errorf("frames of %v bytes: meta and inline values have %d bytes, want at most %d", n, got, conn.CellSize)
		}
		for i := range o.parts {
			if x := &o.parts[i]; x.len < van.CopyBelow && x.mem.Len() > 0 {
				t.Errorf("frames of %v bytes: frame %d is not copied", n, i)
			}
		}
	}
}
