package session

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/van"
)

var requests = []struct {
	want int32
	q    request
}{
	{wantOpen, request{session: 1 << 63, ranks: 4, kills: []uint64{}}},
	{wantCall, request{session: 7, seq: 3, handle: 4, text: "f", kills: []uint64{1, 2}, values: []any{
		nil, true, int64(-1), 2.5, "s", []byte("b"), HandleID(3), Array{Type: "float32", Shape: []int{1, 2}, Data: make([]byte, 8)}, Array{Type: "int8", Shape: []int{}, Data: []byte{1}}}}},
	{wantSet, request{handle: 4, kills: []uint64{}, values: []any{"v"}}},
	{wantGet, request{handle: 4, kills: []uint64{}}},
	{wantList, request{kills: []uint64{}}},
	{wantNothing, request{kills: []uint64{9}}},
	{wantStop, request{kills: []uint64{}}},
	{wantAbort, request{text: "why", kills: []uint64{}}},
	{wantLeave, request{text: "why", kills: []uint64{}}},
	{wantForget, request{text: "why", kills: []uint64{}}},
}

// TestRequests: every written body is parsed to the same value, and a shorter or longer body is refused.
func TestRequests(t *testing.T) {
	for _, x := range requests {
		b, err := x.q.append(nil, x.want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parseRequest(x.want, b)
		if err != nil || !reflect.DeepEqual(got, x.q) {
			t.Errorf("request %d: %+v, %v, want %+v", x.want, got, err, x.q)
		}
		for n := range b {
			if _, err := parseRequest(x.want, b[:n]); !errors.Is(err, van.ErrMalformed) {
				t.Errorf("request %d, %d of %d bytes: %v", x.want, n, len(b), err)
			}
		}
		if _, err := parseRequest(x.want, append(b, 0)); !errors.Is(err, van.ErrMalformed) || !strings.Contains(err.Error(), "1 bytes too many") {
			t.Errorf("request %d and a byte more: %v", x.want, err)
		}
	}
	for _, a := range []struct {
		want int32
		answer
	}{
		{wantCall, answer{session: 1, seq: 2}}, {wantCall, answer{outcome: failed, text: "why"}}, {wantGet, answer{value: 3.5}},
		{wantList, answer{handles: []uint64{5}}}, {wantGet, answer{outcome: refused, text: "why"}},
	} {
		b, err := a.append(nil, a.want)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := parseAnswer(a.want, b); err != nil || !reflect.DeepEqual(got, a.answer) {
			t.Errorf("answer %+v, %v, want %+v", got, err, a.answer)
		}
		for n := range b {
			if _, err := parseAnswer(a.want, b[:n]); !errors.Is(err, van.ErrMalformed) {
				t.Errorf("answer to %d, %d of %d bytes: %v", a.want, n, len(b), err)
			}
		}
	}
}

// FuzzParse: for any body the parsers return a value or an error, without allocating much more than the body's
// length. Every accepted body is written the same way.
func FuzzParse(f *testing.F) {
	for _, x := range requests {
		b, err := x.q.append(nil, x.want)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(x.want, b)
	}
	f.Fuzz(func(t *testing.T, want int32, b []byte) {
		if q, err := parseRequest(want, b); err == nil {
			again, err := q.append(nil, want)
			if err != nil {
				t.Fatalf("%+v cannot be written: %v", q, err)
			}
			if len(again) != len(b) {
				t.Fatalf("%d bytes, want %d", len(again), len(b))
			}
			if got, err := parseRequest(want, again); err != nil {
				t.Fatalf("%+v is read as %+v: %v", q, got, err)
			}
		}
		if a, err := parseAnswer(want, b); err == nil {
			if again, err := a.append(nil, want); err != nil || len(again) != len(b) {
				t.Fatalf("%+v is written in %d bytes, want %d: %v", a, len(again), len(b), err)
			}
		}
		if l, err := Decode(b); err == nil {
			if again, err := Encode(l...); err != nil || len(again) != len(b) {
				t.Fatalf("%+v is written in %d bytes, want %d: %v", l, len(again), len(b), err)
			}
		}
	})
}

func TestElements(t *testing.T) {
	for _, shift := range []int{0, 1} {
		a, err := NewArray([]int64{1, -2, 3})
		if err != nil {
			t.Fatal(err)
		}
		a.Data = append(make([]byte, shift), a.Data...)[shift:] // aligned, or not
		got, err := Elements[int64](a)
		if err != nil || !reflect.DeepEqual(got, []int64{1, -2, 3}) {
			t.Errorf("shift %d: %v, %v", shift, got, err)
		}
		if _, err := Elements[float64](a); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "int64, want float64") {
			t.Errorf("as another type: %v", err)
		}
	}
	a := Array{Type: "float32", Shape: []int{3, 5}, Data: bytes.Repeat([]byte{1}, 60)}
	b, err := Encode("x", a)
	if err != nil {
		t.Fatal(err)
	}
	l, err := Decode(b)
	if err != nil || len(l) != 2 || !reflect.DeepEqual(l[1], a) {
		t.Errorf("%v, %v", l, err)
	}
}

// TestNothingRunsAfterTheEnd: calls that wait when the session ends are not run.
func TestNothingRunsAfterTheEnd(t *testing.T) {
	for range 100 {
		s := &serving{work: make(chan pendingCall, 1), values: map[uint64]any{}, funcs: map[string]Function{
			"f": func(context.Context, []any) (any, error) {
				t.Error("it was run")
				return nil, nil
			},
		}}
		s.ctx, s.cancel = context.WithCancelCause(t.Context())
		s.cancel(van.ErrClosed)
		s.work <- pendingCall{kv.SimpleMessage{Head: wantCall}, request{text: "f"}}
		s.run()
	}
}
