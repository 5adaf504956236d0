package vansession

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func TestSent(t *testing.T) {
	files, err := filepath.Glob("../../van/testdata/sessions/*.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatalf("no sessions: %v", err)
	}
	for _, path := range files {
		s, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		sent, err := s.Sent()
		if err != nil {
			t.Fatal(err)
		}
		used := map[int]bool{}
		for i := range s.Events {
			recv := &s.Events[i]
			if recv.Type != Recv {
				continue
			}
			k, ok := sent[i]
			if !ok || used[k] {
				t.Fatalf("%s: event %d is paired: %t, with a message received before: %t", s.Name, recv.Seq, ok, used[k])
			}
			used[k] = true
			send := &s.Events[k]
			lens := func(e *Event) (n []int) {
				for _, f := range e.Frames {
					if f.Kind == "meta" || strings.HasPrefix(f.Kind, "data") {
						n = append(n, f.Len)
					}
				}
				return n
			}
			if k >= i || send.Type != Send || send.To != recv.To || !slices.Equal(lens(send), lens(recv)) {
				t.Errorf("%s: event %d (frames %v) is paired with event %d (frames %v)", s.Name, recv.Seq, lens(recv), send.Seq, lens(send))
			}
		}
	}
}

func TestSentError(t *testing.T) {
	s := &Session{Name: "x", Events: []Event{{Seq: 1, Type: Recv, From: 8, To: 1}}}
	if _, err := s.Sent(); err == nil || !strings.Contains(err.Error(), "x: event 1: nothing") {
		t.Errorf("error %v, want one about event 1", err)
	}
}

func TestFull(t *testing.T) {
	for _, tc := range []struct {
		f    Frame
		want string
	}{
		{Frame{Len: 3, Bytes: []byte("abc")}, "abc"},
		{Frame{Len: 5, Bytes: []byte("ab"), Truncated: true}, "ababa"},
		{Frame{}, ""},
	} {
		if got := tc.f.Full(); !bytes.Equal(got, []byte(tc.want)) {
			t.Errorf("%+v: %q, want %q", tc.f, got, tc.want)
		}
	}
}
