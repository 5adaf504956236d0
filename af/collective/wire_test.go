package collective

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestBodies: every written body is parsed to the same values, and nonsense is refused with the name of the field.
func TestBodies(t *testing.T) {
	k := call{kind: broadcast, reduction: Max, dtype: af.BFloat16, root: 2, bytes: 1 << 40}
	if got, epoch, err := parseAsk(k.appendAsk(nil, 1<<50), 3); err != nil || got != k || epoch != 1<<50 {
		t.Errorf("ask: %+v, %v", got, err)
	}
	h := hello{1 << 61, 1 << 60, 99, 3}
	if got, err := parseHello(h.append(nil)); err != nil || got != h {
		t.Errorf("hello: %+v, %v", got, err)
	}
	for _, cause := range []error{ErrMismatch, van.ErrPeerLost, van.ErrTimeout, van.ErrClosed, errRebuild, errMisfit} {
		epoch, why, err := parseReason(appendReason(nil, verbAbort, 9, &van.Error{Op: "x", Err: cause}))
		if err != nil || epoch != 9 || !errors.Is(why, cause) || !strings.Contains(why.Error(), cause.Error()) {
			t.Errorf("reason %v: %d, %v, %v", cause, epoch, why, err)
		}
	}
	if _, why, err := parseReason(appendReason(nil, verbAbort, 9, errors.New(strings.Repeat("x", 5000)))); err != nil || !errors.Is(why, ErrAborted) {
		t.Errorf("a long reason: %v, %v", why, err)
	}
	if s, r := parseKey(partKey(0xFFFFFFFF, 0xFFFF)); s != 0xFFFFFFFF || r != 0xFFFF {
		t.Errorf("key: %x %x", s, r)
	}
	bad := func(at int, v byte) []byte {
		b := k.appendAsk(nil, 1)
		b[at] = v
		return b
	}
	for field, b := range map[string][]byte{
		"body_size":      k.appendAsk(nil, 1)[:askLen-1],
		"body kind":      bad(2, byte(lastKind)+1),
		"body reduction": bad(3, byte(lastReduction)+1),
		"body dtype":     bad(7, 0x7f),
		"body root":      bad(8, 3),
	} {
		if _, _, err := parseAsk(b, 3); !errors.Is(err, van.ErrMalformed) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// FuzzBodies: no body makes a parser panic, and every accepted body is written the same way.
func FuzzBodies(f *testing.F) {
	f.Add(call{kind: allGather, dtype: af.Float32, root: -1, bytes: 8}.appendAsk(nil, 5))
	f.Add(hello{1, 2, 3, 4}.append(nil))
	f.Add(appendReason(nil, verbRefused, 1, van.ErrClosed))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := verbOf(b)
		if err != nil {
			return
		}
		if k, epoch, err := parseAsk(b, 4); err == nil && v == verbAsk && !bytes.Equal(k.appendAsk(nil, epoch), b) {
			t.Errorf("ask %x becomes %x", b, k.appendAsk(nil, epoch))
		}
		if h, err := parseHello(b); err == nil && v == verbHello && !bytes.Equal(h.append(nil), b) {
			t.Errorf("hello %x becomes %x", b, h.append(nil))
		}
		if _, why, err := parseReason(b); err == nil && why == nil {
			t.Error("a reason without an error")
		}
	})
}

// TestHalves: 16-bit floats become float32 and back unchanged, and sums are rounded to the nearest.
func TestHalves(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		if nan := h&0x7c00 == 0x7c00 && h&0x3ff != 0; !nan && toHalf(fromHalf(h)) != h {
			t.Fatalf("float16 %04x becomes %04x", h, toHalf(fromHalf(h)))
		}
		if f := fromBrain(h); !math.IsNaN(float64(f)) && toBrain(f) != h {
			t.Fatalf("bfloat16 %04x becomes %04x", h, toBrain(f))
		}
	}
	for _, x := range []struct {
		f     float32
		half  uint16
		brain uint16
	}{
		{1 + 1.0/2048, 0x3c00, 0x3f80}, // a tie: to even
		{1 + 3.0/2048, 0x3c02, 0x3f80}, // a tie, upwards
		{1 + 1.0/256, 0x3c04, 0x3f80},  // a tie for bfloat16
		{1 + 3.0/256, 0x3c0c, 0x3f82},
		{65520, 0x7c00, 0x4780}, // rounds to infinity
		{65519, 0x7bff, 0x4780},
		{1e-8, 0x0000, 0x322c},
		{6e-8, 0x0001, 0x3381},
		{float32(math.Inf(-1)), 0xfc00, 0xff80},
	} {
		if got := toHalf(x.f); got != x.half {
			t.Errorf("float16 of %g: %04x, want %04x", x.f, got, x.half)
		}
		if got := toBrain(x.f); got != x.brain {
			t.Errorf("bfloat16 of %g: %04x, want %04x", x.f, got, x.brain)
		}
	}
	if n := toHalf(float32(math.NaN())); n&0x7c00 != 0x7c00 || n&0x3ff == 0 {
		t.Errorf("float16 of NaN: %04x", n)
	}
	if n := toBrain(float32(math.NaN())); !math.IsNaN(float64(fromBrain(n))) {
		t.Errorf("bfloat16 of NaN: %04x", n)
	}
}

// TestReductions: each reduction for each kind of element, and the refused combinations.
func TestReductions(t *testing.T) {
	half := func(f ...float32) []uint16 {
		var l []uint16
		for _, v := range f {
			l = append(l, toHalf(v))
		}
		return l
	}
	for _, x := range []struct {
		d         af.Dtype
		r         Reduction
		a, b, out backend.Mem
	}{
		{af.Float32, Sum, backend.Slice([]float32{1, 2}), backend.Slice([]float32{3, -5}), backend.Slice([]float32{4, -3})},
		{af.Float32, Product, backend.Slice([]float32{3, 2}), backend.Slice([]float32{3, -5}), backend.Slice([]float32{9, -10})},
		{af.Float64, Min, backend.Slice([]float64{1, 2}), backend.Slice([]float64{3, -5}), backend.Slice([]float64{1, -5})},
		{af.Float64, Max, backend.Slice([]float64{1, 2}), backend.Slice([]float64{3, -5}), backend.Slice([]float64{3, 2})},
		{af.Int8, Sum, backend.Slice([]int8{127}), backend.Slice([]int8{1}), backend.Slice([]int8{-128})},
		{af.Uint64, Max, backend.Slice([]uint64{1 << 63}), backend.Slice([]uint64{1}), backend.Slice([]uint64{1 << 63})},
		{af.Int64, Min, backend.Slice([]int64{-1 << 63}), backend.Slice([]int64{1}), backend.Slice([]int64{-1 << 63})},
		{af.Int32, Product, backend.Slice([]int32{-7}), backend.Slice([]int32{6}), backend.Slice([]int32{-42})},
		{af.Float16, Sum, backend.Slice(half(1.5, 100)), backend.Slice(half(2.25, -1)), backend.Slice(half(3.75, 99))},
		{af.Float16, Min, backend.Slice(half(1.5, 100)), backend.Slice(half(2.25, -1)), backend.Slice(half(1.5, -1))},
		{af.BFloat16, Product, backend.Slice([]uint16{toBrain(1.5)}), backend.Slice([]uint16{toBrain(-2)}), backend.Slice([]uint16{toBrain(-3)})},
	} {
		f, err := folderFor(x.d, x.r)
		if err != nil {
			t.Fatal(err)
		}
		if f(x.a, x.a, x.b); !bytes.Equal(x.a.Host(), x.out.Host()) {
			t.Errorf("%s of %s: %x, want %x", x.r, x.d, x.a.Host(), x.out.Host())
		}
	}
	for _, d := range []af.Dtype{af.Bool, af.Complex64, af.Float8E4M3FN} {
		if _, err := folderFor(d, Sum); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), d.String()) {
			t.Errorf("%s: %v, want ErrInvalid and its name", d, err)
		}
	}
	for _, r := range []Reduction{0, lastReduction + 1} {
		if _, err := folderFor(af.Float32, r); !errors.Is(err, van.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", r, err)
		}
	}
}

// TestArguments: invalid arguments are refused before anything is sent, and the error names the expected ones.
func TestArguments(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c := all[0]
	long := must(af.FromSlice(make([]int16, 3)))
	for want, f := range map[string]func() (Op, error){
		"out is uint8[7]":                           func() (Op, error) { return c.AllGather(zeros(7), zeros(4)) },
		"of different types":                        func() (Op, error) { return c.AllGather(long, zeros(4)) },
		"1 tensors out, want one for each":          func() (Op, error) { return c.AllGatherV([]af.Tensor{zeros(1)}, zeros(1)) },
		"in is uint8[2] on cpu, of 2 bytes, want 1": func() (Op, error) { return c.AllGatherV([]af.Tensor{zeros(1), zeros(1)}, zeros(2)) },
		"out for rank 1 is int16":                   func() (Op, error) { return c.AllGatherV([]af.Tensor{zeros(1), long}, zeros(1)) },
		"0 tensors in":                              func() (Op, error) { return c.AllToAll(nil, nil) },
		"sends itself 1 bytes and receives 2": func() (Op, error) {
			return c.AllToAll([]af.Tensor{zeros(2), zeros(1)}, []af.Tensor{zeros(1), zeros(1)})
		},
		"root 2, want 0 to 1": func() (Op, error) { return c.Broadcast(zeros(1), 2) },
		"root -1":             func() (Op, error) { return c.Gather(zeros(2), zeros(1), -1) },
		"out is uint8[3] on cpu, of 3 bytes, want 2": func() (Op, error) { return c.Gather(zeros(3), zeros(1), 0) },
		"in is uint8[5] on cpu, of 5 bytes, want 4":  func() (Op, error) { return c.Scatter(zeros(2), zeros(5), 0) },
		"in is uint8[3] on cpu, of 3 bytes, want 4":  func() (Op, error) { return c.ReduceScatter(zeros(2), zeros(3), Sum) },
		"reduction 9, want Sum":                      func() (Op, error) { return c.AllReduce(zeros(2), zeros(2), 9) },
		"no arithmetic for bool": func() (Op, error) {
			b := must(af.FromBytes(make([]byte, 2), af.Bool, 2))
			return c.AllReduce(b, b, Sum)
		},
		"want a multiple of 4": func() (Op, error) {
			odd := must(af.FromBytes(make([]byte, 16)[1:9], af.Float32, 2))
			return c.AllReduce(odd, odd, Sum)
		},
	} {
		if _, err := f(); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "worker 0") {
			t.Errorf("got %v, want ErrInvalid, %q and the node", err, want)
		}
	}
	if err := (Op{}).Wait(t.Context()); err == nil {
		t.Error("Wait of no Op has succeeded")
	}
	onAll(t, 2, func(r int) error { return all[r].Barrier(t.Context()) })
}
