package value

import (
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestCheck: every changed byte of a value is found, and every other length.
func TestCheck(t *testing.T) {
	o := Origin{Kind: Answered, Worker: 1, Process: 2, Server: 3, By: 4, Index: 5, Call: 6}
	for _, n := range []int{Head, Head + 1, 64, 75} {
		b := make([]byte, n)
		o.Fill(b)
		if got, err := Of(b); err != nil || got != o || o.Check(b) != nil {
			t.Errorf("%d bytes: %v, %v, %v", n, got, err, o.Check(b))
		}
		for i := range b {
			if b[i] ^= 1; o.Check(b) == nil {
				t.Errorf("%d bytes: byte %d was changed, and is not found", n, i)
			}
			b[i] ^= 1
		}
		if n > Head+1 && o.Check(b[:n-1]) == nil {
			t.Errorf("the first %d of %d bytes count as a value", n-1, n)
		}
	}
	for text, b := range map[string][]byte{"3 bytes, want at least 32": make([]byte, 3), "is no value of these tests": make([]byte, 64)} {
		if _, err := Of(b); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q", err, text)
		}
	}
}
