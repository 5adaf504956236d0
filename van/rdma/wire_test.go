package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// TestLayout compares offsets and sizes with those of the StepMesh structs.
func TestLayout(t *testing.T) {
	b := bytes.Repeat([]byte{0xee}, slotRequestLen)
	(&slotRequest{metaLen: 0x0102030405060708, dataNum: 2, data: [4]uint64{8, 0x1112131415161718, 3, 4}, origin: 0x2122232425262728,
		key: 0x3132333435363738}).put(b)
	want := "0807060504030201" + "0200000000000000" + "0800000000000000" + "1817161514131211" + "0300000000000000" +
		"0400000000000000" + "2827262524232221" + "3837363534333231"
	if got := fmt.Sprintf("%x", b); got != want {
		t.Errorf("RendezvousStart:\n got %s\nwant %s", got, want)
	}
	b = bytes.Repeat([]byte{0xee}, slotReplyLen)
	(&slotReply{meta: 0x0102030405060708, metaKey: 0x11121314, data: 0x2122232425262728, dataKey: 0x31323334, origin: 0x4142434445464748,
		index: 0x2345}).put(b)
	want = "0807060504030201" + "14131211" + "00000000" + "2827262524232221" + "34333231" + "00000000" + "4847464544434241" + "45230000" + "00000000"
	if got := fmt.Sprintf("%x", b); got != want {
		t.Errorf("RendezvousReply:\n got %s\nwant %s", got, want)
	}
	// RequestContext; StepMesh reads its first 24 bytes.
	h := handshake{node: 9, port: 0x1234, host: "a-host-name-that-is-long", native: true, epoch: 0x01020304, qp: 1, qpCount: 2}
	want = "09000000" + "3412" + fmt.Sprintf("%x", "a-host-name-tha") + "00" + "0000" + "53414631" + "04030201" + "0102" + "0600" + "00000000"
	if got := fmt.Sprintf("%x", h.encode()); got != want {
		t.Errorf("RequestContext:\n got %s\nwant %s", got, want)
	}
	b = make([]byte, trailerLen)
	tr := trailer{numbered: true, frames: 3, lens: [van.MaxFrames]uint32{8, 1000, 4}, epoch: 0x01020304, n: 2}
	tr.credits[0], tr.credits[1] = 7, 0x7fff
	tr.put(b)
	want = "53414631" + "0100" + "02" + "03" + "08000000" + "e8030000" + "04000000" + "04030201" + "0700" + "ff7f"
	if got := fmt.Sprintf("%x", b); !strings.HasPrefix(got, want) || strings.Trim(got[len(want):], "0") != "" {
		t.Errorf("trailer:\n got %s\nwant %s, then zeros", got, want)
	}
	if contextLen != 24 || len(h.encode()) > verbs.MaxConnectData || maxIndex != 0x8000 {
		t.Error("sizes have changed")
	}
}

func TestHandshake(t *testing.T) {
	for _, h := range []handshake{
		{node: 1, port: 65535, host: "10.0.0.1", native: true, epoch: math.MaxUint32, qp: 0, qpCount: 1},
		{node: van.Empty, host: "fifteen-letters", native: true, qp: 1, qpCount: 2},
	} {
		got, err := decodeHandshake(h.encode())
		if err != nil || got != h {
			t.Errorf("got %+v, error %v; want %+v", got, err, h)
		}
		// The connection manager delivers more bytes than were sent.
		padded := append(h.encode()[:contextLen:contextLen], make([]byte, verbs.MaxConnectData-contextLen)...)
		theirs := handshake{node: h.node, port: h.port, host: h.host}
		if got, err = decodeHandshake(padded); err != nil || got != theirs {
			t.Errorf("of StepMesh: got %+v, error %v; want %+v", got, err, theirs)
		}
	}
	for i := range contextLen {
		if _, err := decodeHandshake(make([]byte, i)); !errors.Is(err, van.ErrMalformed) {
			t.Errorf("%d bytes: %v, want %v", i, err, van.ErrMalformed)
		}
	}
}

func TestShort(t *testing.T) {
	var s slotRequest
	var r slotReply
	var tr trailer
	if err := s.get(make([]byte, slotRequestLen-1)); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("start: %v", err)
	}
	// The form of a build without GPUs, which is not compatible.
	if err := r.get(make([]byte, 32)); !errors.Is(err, van.ErrMalformed) || !strings.Contains(err.Error(), "GDR") {
		t.Errorf("reply: %v", err)
	}
	if err := tr.get(make([]byte, trailerLen)); !errors.Is(err, van.ErrMalformed) {
		t.Errorf("trailer: %v", err)
	}
}

func FuzzHandshake(f *testing.F) {
	f.Add((&handshake{node: 9, port: 1, host: "h", epoch: 5, qp: 1, qpCount: 2}).encode())
	f.Add(make([]byte, verbs.MaxConnectData))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHandshake(b)
		if err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Errorf("error %v", err)
			}
			return
		}
		if h.node < 1 || h.node > van.Empty || h.port < 0 || h.port > math.MaxUint16 || len(h.host) > hostField || strings.Contains(h.host, "\x00") ||
			h.native && (h.qp < 0 || h.qp >= h.qpCount) {
			t.Errorf("accepted %+v", h)
		}
		if h.native && len(h.host) < hostField {
			if again, err := decodeHandshake(h.encode()); err != nil || again != h {
				t.Errorf("again %+v, error %v; want %+v", again, err, h)
			}
		}
	})
}

func FuzzSlotRequest(f *testing.F) {
	b := make([]byte, slotRequestLen)
	(&slotRequest{metaLen: 300, dataNum: nativeSlotRequest, data: [4]uint64{1024, 3, 600}, origin: 1, key: 2}).put(b)
	f.Add(b, true)
	f.Add(bytes.Repeat([]byte{0xff}, slotRequestLen), false)
	f.Fuzz(func(t *testing.T, b []byte, ours bool) {
		var s slotRequest
		if s.get(b) != nil {
			return
		}
		n, err := s.need(ours)
		if err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Errorf("error %v", err)
			}
			return
		}
		if n.Meta < rawMeta || n.Meta > maxMeta || n.Data < 0 || n.Data > roundedData || !ours && n.OneShot {
			t.Errorf("accepted %+v", n)
		}
		again := make([]byte, slotRequestLen)
		if s.put(again); !bytes.Equal(again, b[:slotRequestLen]) {
			t.Errorf("again %x, want %x", again, b)
		}
	})
}

func FuzzSlotReply(f *testing.F) {
	b := make([]byte, slotReplyLen)
	(&slotReply{meta: 1, metaKey: 2, data: 3, dataKey: 4, origin: 5, index: 6, flags: replyBudget}).put(b)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var r, again slotReply
		if r.get(b) != nil {
			return
		}
		var c [slotReplyLen]byte
		r.put(c[:])
		if err := again.get(c[:]); err != nil || again != r {
			t.Errorf("again %+v, error %v; want %+v", again, err, r)
		}
	})
}

func FuzzTrailer(f *testing.F) {
	b := make([]byte, trailerLen)
	(&trailer{numbered: true, frames: 3, lens: [van.MaxFrames]uint32{8, 100, 4}, n: 3}).put(b)
	f.Add(b)
	(&trailer{metaLen: 300, frames: 2}).put(b)
	f.Add(bytes.Clone(b))
	(&trailer{frames: 2, metaLen: 1 << 20}).put(b)
	f.Add(bytes.Clone(b))
	f.Fuzz(func(t *testing.T, b []byte) {
		var x trailer
		if err := x.get(b); err != nil {
			if !errors.Is(err, van.ErrMalformed) {
				t.Errorf("error %v", err)
			}
			return
		}
		if x.n < 0 || x.n > maxCredits || x.frames < 0 || x.frames > van.MaxFrames || x.frames == 1 || x.metaLen < 0 {
			t.Errorf("accepted %+v", x)
		}
		for _, n := range x.lens {
			if n > maxData {
				t.Errorf("accepted %+v", x)
			}
		}
		var c [trailerLen]byte
		var again trailer
		x.put(c[:])
		if err := again.get(c[:]); err != nil || again != x {
			t.Errorf("again %+v, error %v; want %+v", again, err, x)
		}
	})
}
