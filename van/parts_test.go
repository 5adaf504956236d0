package van_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// batch makes a batch of two pushes and a pull, or of two answers.
func batch(request bool) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Request, m.Timestamp, m.AppID, m.CustomerID, m.Receiver = request, 50, 3, 4, 8
	m.Parts = []van.Part{
		{Key: 1 << 60, Push: request, Len: 6, Device: backend.Host, Dtype: 5, Dim: 2, Shape: [van.MaxDims]int64{2, 3}, Vals: backend.Bytes([]byte("values"))},
		{Key: 2, Push: request, Len: 0, Device: backend.Device{Type: backend.GPU, ID: 3}, Dim: 1, Timestamp: 51},
	}
	if request {
		m.Parts = append(m.Parts, van.Part{Key: 2, Len: 40, Device: backend.Host, Dim: 8, Shape: [van.MaxDims]int64{1, 1, 1, 1, 1, 1, 1, 40}})
	}
	m.WriteDirectory()
	return m
}

// received is m as a transport receives it that carries only frames.
func received(t testing.TB, m *van.Message) *van.Message {
	t.Helper()
	r := &van.Message{}
	if b, err := m.AppendTo(nil); err != nil {
		t.Fatal(err)
	} else if err := van.DecodeMeta(b, &r.Meta); err != nil {
		t.Fatal(err)
	}
	flat := &van.Message{Parts: m.Parts}
	flat.Pack(nil)
	r.Frames, r.Vals = flat.Frames, flat.Vals
	return r
}

// TestDirectory: a batch arrives as it was sent. Answers have no shapes.
func TestDirectory(t *testing.T) {
	for _, request := range []bool{true, false} {
		m := batch(request)
		r := received(t, m)
		if err := r.Unpack(); err != nil {
			t.Fatal(err)
		}
		if len(r.Parts) != len(m.Parts) || !r.IsBatch() || r.AcksBatch() || r.Frames != 0 || r.Vals.Len() != 0 {
			t.Fatalf("%+v, want %+v", r, m)
		}
		for i := range r.Parts {
			got, want := r.Parts[i], m.Parts[i]
			if string(got.Vals.Host()) != string(want.Vals.Host()) || int(got.Timestamp) != 50+i {
				t.Errorf("part %d has %q, timestamp %d, want %q", i, got.Vals.Host(), got.Timestamp, want.Vals.Host())
			}
			got.Vals, want.Vals, want.Timestamp = backend.Mem{}, backend.Mem{}, got.Timestamp
			if !request {
				want.Dim, want.Shape = 0, [van.MaxDims]int64{}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("part %d is %+v, want %+v", i, got, want)
			}
		}
	}
}

// TestInvalidDirectory: a directory that does not match its values, or breaks a limit, is an error that names the part, its key and the
// limit. The message has no parts then.
func TestInvalidDirectory(t *testing.T) {
	const entry = 24
	for _, x := range []struct {
		name    string
		request bool
		change  func(m *van.Message)
		want    []string
	}{
		{"no entry", true, func(m *van.Message) { m.Body = nil }, []string{"at least one entry"}},
		{"a cut entry", true, func(m *van.Message) { m.Body = m.Body[:len(m.Body)-1] }, []string{"directory[2] (key 2) dimensions = 8"}},
		{"a byte more", true, func(m *van.Message) { m.Body = append(m.Body, 0) }, []string{"directory[2]", "length = 1, want at least 24 bytes"}},
		{"a long value", true, func(m *van.Message) { binary.LittleEndian.PutUint32(m.Body[8:], math.MaxInt32+1) }, []string{"directory[0] (key 1152921504606846976) bytes = 2147483648", "at most 2147483647"}},
		{"another length", true, func(m *van.Message) { m.Body[8]++ }, []string{"0 6 0", "0, 7 and 0, as the directory says"}},
		{"a value more", true, func(m *van.Message) { m.Vals = backend.Bytes([]byte("valuesX")) }, []string{"0 7 0", "0, 6 and 0, as the directory says"}},
		{"values missing", true, func(m *van.Message) { m.Vals = backend.Mem{} }, []string{"0, 6 and 0, as the directory says"}},
		{"keys", true, func(m *van.Message) { m.Keys = backend.Bytes(make([]byte, 8)) }, []string{"0, 6 and 0"}},
		{"an unknown kind", true, func(m *van.Message) { m.Body[12] = 2 }, []string{"directory[0] (key 1152921504606846976) kind"}},
		{"a push after a pull", true, func(m *van.Message) { m.Body[12] = 0; m.Body[8] = 0; m.Vals = backend.Mem{} }, []string{"directory[1] (key 2) kind", "before all its pulls"}},
		{"a push in an answer", false, func(m *van.Message) { m.Body[12] = 1 }, []string{"kind"}},
		{"9 dimensions", true, func(m *van.Message) { m.Body[13] = 9 }, []string{"dimensions = 9, want at most 8"}},
		{"a negative dimension", true, func(m *van.Message) { m.Body[entry+7] = 0x80 }, []string{"shape = -"}},
		{"an unknown device", true, func(m *van.Message) { m.Body[14] = 7 }, []string{"device"}},
		{"a late timestamp", true, func(m *van.Message) { m.Timestamp = math.MaxInt32 - 1 }, []string{"timestamp = 2147483648, want 0 to 2147483647"}},
		{"a negative timestamp", true, func(m *van.Message) { m.Timestamp = -1 }, []string{"timestamp = -1"}},
		{"too many entries", false, func(m *van.Message) { m.Body = bytes.Repeat(make([]byte, entry), van.MaxParts+1) }, []string{"further bytes = 24, want none after 16384 entries"}},
		{"too many bytes", false, func(m *van.Message) {
			m.Body = bytes.Repeat(binary.LittleEndian.AppendUint32(make([]byte, 8, entry), math.MaxInt32)[:entry], 40)
		}, []string{"bytes of all values = ", fmt.Sprintf("at most %d", van.MaxValues)}},
	} {
		r := received(t, batch(x.request))
		x.change(r)
		err := r.Unpack()
		if !errors.Is(err, van.ErrMalformed) || len(r.Parts) > 0 {
			t.Errorf("%s: %v, %d parts", x.name, err, len(r.Parts))
			continue
		}
		for _, w := range x.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %q", x.name, err, w)
			}
		}
	}
}

// TestLastTimestamps: a batch may have the largest timestamps.
func TestLastTimestamps(t *testing.T) {
	r := received(t, batch(true))
	r.Timestamp = math.MaxInt32 - 2
	if err := r.Unpack(); err != nil {
		t.Fatal(err)
	}
	if ts := r.Parts[2].Timestamp; ts != math.MaxInt32 {
		t.Errorf("the last part has timestamp %d, want %d", ts, math.MaxInt32)
	}
}

// holder counts the users of memory.
type holder struct{ n int }

func (h *holder) Retain()  { h.n++ }
func (h *holder) Release() { h.n-- }

// TestKeepParts: a copy of a batch retains the memory of its values until Drop, and its directory does not change with the original's.
func TestKeepParts(t *testing.T) {
	var h holder
	value := []byte("a value that is longer than short frames, which are copied")
	src, kept, short := batch(true), &van.Message{}, [van.MaxFrames][van.CopyBelow]byte{}
	for i := range src.Parts[:2] {
		src.Parts[i].Vals = backend.At(unsafe.Pointer(&value[0]), len(value), backend.Host, &h)
	}
	kept.CloneFrom(src, &short)
	if src.Parts[0].Key = 99; h.n != 2 || len(kept.Parts) != 3 || kept.Parts[0].Key == 99 || !bytes.Equal(kept.Parts[0].Vals.Host(), value) {
		t.Errorf("kept with %d users of its memory, want 2: %+v", h.n, kept.Parts)
	}
	if kept.ReleaseClone(); h.n != 0 {
		t.Errorf("%d users of the memory are left after Drop", h.n)
	}
}

// TestCheckOnHost: a frame or a value of a batch on a device is an error that names it.
func TestCheckOnHost(t *testing.T) {
	gpu := backend.At(unsafe.Pointer(new([6]byte)), 6, backend.Device{Type: backend.GPU, ID: 3}, nil)
	inBatch, inFrame := batch(false), &van.Message{Frames: 2, Vals: gpu}
	inBatch.Parts[1].Vals = gpu
	for _, x := range []struct {
		m    *van.Message
		want string
	}{{batch(true), ""}, {inBatch, "the value of key 2 lies on gpu:3"}, {inFrame, "frame 1 lies on gpu:3"}} {
		if err := x.m.CheckOnHost(); x.want == "" && err != nil || x.want != "" && (!errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), x.want)) {
			t.Errorf("%v, want %q", err, x.want)
		}
	}
}

// sentOnce is a completion that counts.
type sentOnce struct{ n int }

func (s *sentOnce) Sent() { s.n++ }

// TestExpand: the messages for the parts of a batch are those of ps-lite. Done is called once: when all were sent, or, if a later message
// fails, when those before it were sent. If the first one fails, it is not called.
func TestExpand(t *testing.T) {
	heads := map[int][]van.BatchFlag{1: {van.Single}, 2: {van.BatchStart, van.BatchEnd}, 3: {van.BatchStart, van.BatchMiddle, van.BatchEnd}}
	for fail := -1; fail < 3; fail++ {
		for n := 1; n <= 3; n++ {
			m, d := batch(true), &sentOnce{}
			m.Parts, m.Done = m.Parts[:n], d
			refused, i := errors.New("refused"), 0
			var dones []van.Completion
			err := m.Expand(func(x *van.Message) error {
				p := &m.Parts[i]
				if x.Head != heads[n][i] || x.Key != p.Key || x.Push != p.Push || int(x.ValLen) != p.Len || x.Timestamp != p.Timestamp || x.Dim != p.Dim || x.Shape != p.Shape ||
					!x.Request || !x.IsTensor || x.Frames != 2 || binary.LittleEndian.Uint64(x.Keys.Host()) != p.Key || !bytes.Equal(x.Vals.Host(), p.Vals.Host()) || len(x.Parts) > 0 || x.IsBatch() {
					t.Errorf("message %d of %d is %+v", i, n, x)
				}
				if i++; i == fail+1 {
					return refused
				}
				dones = append(dones, x.Done)
				return nil
			})
			if want := fail == 0; (err != nil) != want {
				t.Errorf("message %d of %d fails: %v", fail, n, err)
			}
			if d.n != 0 && len(dones) > 0 {
				t.Error("Done was called before the messages were sent")
			}
			for _, x := range dones {
				x.Sent()
			}
			if want := min(len(dones), 1); d.n != want {
				t.Errorf("message %d of %d fails: Done was called %d times, want %d", fail, n, d.n, want)
			}
		}
	}
	m := batch(true)
	if err := m.Expand(func(x *van.Message) error { return map[int32]error{51: van.ErrPeerLost}[x.Timestamp] }); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("a request without Done, whose second message fails: %v", err)
	}
}

// FuzzDirectory: parts of any directory are within the limits and the values, or there are none.
func FuzzDirectory(f *testing.F) {
	for _, request := range []bool{true, false} {
		m := batch(request)
		f.Add(m.Body, 6, request, m.Timestamp)
	}
	f.Add([]byte{}, 0, true, int32(0))
	f.Fuzz(func(t *testing.T, body []byte, values int, request bool, ts int32) {
		m := &van.Message{}
		m.Reset()
		m.Body, m.Request, m.Timestamp, m.Head, m.IsTensor = body, request, ts, van.WholeBatch, true
		m.Frames, m.Vals = 2, backend.Bytes(make([]byte, min(max(values, 0), 1<<20)))
		err := m.Unpack()
		if err != nil {
			if !errors.Is(err, van.ErrMalformed) || len(m.Parts) > 0 {
				t.Errorf("%v, %d parts", err, len(m.Parts))
			}
			return
		}
		sum := 0
		for i := range m.Parts {
			p := &m.Parts[i]
			if sum += p.Vals.Len(); p.Len < 0 || p.Dim < 0 || p.Dim > van.MaxDims || m.HasValue(i) && p.Vals.Len() != p.Len || !m.HasValue(i) && p.Vals.Len() > 0 {
				t.Errorf("part %d: %+v", i, p)
			}
		}
		if len(m.Parts) == 0 || len(m.Parts) > van.MaxParts || sum != min(max(values, 0), 1<<20) {
			t.Errorf("%d parts with %d bytes of %d", len(m.Parts), sum, values)
		}
	})
}
