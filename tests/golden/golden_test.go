package golden

import (
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestDifferences: a change of any line is found, also of a line that the file covers by its checksum only.
func TestDifferences(t *testing.T) {
	text := func(changed int) []byte {
		var b strings.Builder
		for i := range 5000 {
			if i == changed {
				b.WriteString("changed\n")
			}
			b.WriteString("line " + strings.Repeat("x", i%7) + "\n")
		}
		return shorten(collapse([]byte(b.String())))
	}
	was := text(-1)
	if at, got, want := differ(text(-1), was); at != 0 {
		t.Errorf("line %d of the same text differs: %s, %s", at, got, want)
	}
	if at, got, _ := differ(text(41), was); at != 42 || string(got) != "changed" {
		t.Errorf("the first difference is line %d %q, want 42 and changed", at, got)
	}
	if at, got, _ := differ(text(4999), was); at == 0 || !strings.Contains(string(got), "checksum") {
		t.Errorf("the first difference is line %d %q, want that of the checksum", at, got)
	}
	if len(was) > shown+100 {
		t.Errorf("the file has %d bytes", len(was))
	}
}

// TestCollapse: repeated lines are counted.
func TestCollapse(t *testing.T) {
	if got := string(collapse([]byte("a\nb\nb\nb\na\na\n"))); got != "a\nb\n... and 2 more\na\n... and 1 more\n" {
		t.Errorf("%q", got)
	}
}
