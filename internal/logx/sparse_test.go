package logx_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestSparse: of many events only the 1st, 2nd, 4th, ... are logged, for each cause.
func TestSparse(t *testing.T) {
	var c logx.Causes
	var s logx.Sparse
	lines, own := map[string]int{}, 0
	for range 1000 {
		for _, cause := range []string{"a", "b"} {
			if _, show := c.Next(cause); show {
				lines[cause]++
			}
		}
		if _, show := s.Next(); show {
			own++
		}
	}
	if lines["a"] != 10 || lines["b"] != 10 || own != 10 { // 1, 2, 4 ... 512
		t.Errorf("%v and %d lines, want 10 of each", lines, own)
	}
	if n := s.Count(); n != 1000 {
		t.Errorf("%d events are counted, want 1000", n)
	}
	many := 0
	for i := range 100000 {
		if _, show := c.Next(fmt.Sprint("cause ", i)); show {
			many++
		}
	}
	if many > 300 {
		t.Errorf("%d lines of 100000 causes", many)
	}
	if n := testing.AllocsPerRun(100, func() { c.Next("a"); s.Next() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestCausesLog: a written line has the count after its other attributes, and the source line of the caller.
func TestCausesLog(t *testing.T) {
	var b bytes.Buffer
	var c logx.Causes
	for i := range 5 {
		c.Log(logx.New(&b, env.Default()), "a").Warn("event", "i", i)
	}
	want := []string{`event i=0 "so far"=1`, `event i=1 "so far"=2`, `event i=3 "so far"=4`}
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), b.String())
	}
	for i, line := range lines {
		if !strings.HasSuffix(line, want[i]) || !strings.Contains(line, "sparse_test.go:") {
			t.Errorf("%q, want a line of this file that ends with %q", line, want[i])
		}
	}
}

// TestKind: errors that differ only in numbers are of one kind.
func TestKind(t *testing.T) {
	a, b := logx.Kind(errors.New("push 12 from 127.0.0.1:99")), logx.Kind(errors.New("push 7 from 10.0.0.100:1234"))
	if a != b || a != "push  from ...:" {
		t.Errorf("%q and %q, want them to be the same", a, b)
	}
	if n := len(logx.Kind(errors.New(strings.Repeat("x", 1000)))); n != 160 {
		t.Errorf("a long text has a kind of %d bytes, want 160", n)
	}
}

// TestPeerKind: text that a peer has chosen makes no kind of its own.
func TestPeerKind(t *testing.T) {
	for want, texts := range map[string][]string{
		"a hello that begins with , want ":   {`a hello that begins with "abcd", want "SAFT"`, `a hello that begins with "\"\\x", want "y z"`},
		"address = want control.node[]: bad": {"address = evil:1, want control.node[0]: bad", "address = other.host:77, want control.node[1]: bad"},
		"refused worker (rank ): full":       {"refused worker evil:9 (rank 1): full", "refused worker 10.0.0.1:10 (rank 12): full"},
		"ends with ":                         {`ends with "a`, `ends with "bc`},
	} {
		for _, text := range texts {
			if got := logx.PeerKind(errors.New(text)); strings.Join(strings.Fields(got), " ") != strings.Join(strings.Fields(want), " ") {
				t.Errorf("%s: kind %q, want %q", text, got, want)
			}
		}
	}
	if n := len(logx.PeerKind(errors.New(strings.Repeat("x", 1000)))); n != 160 {
		t.Errorf("%d bytes, want 160", n)
	}
}
