package logx_test

import (
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/internal/logx"
)

// TestSparse: of a flood only the 1st, 2nd, 4th, ... is logged, for each cause.
func TestSparse(t *testing.T) {
	var c logx.Causes
	var s logx.Sparse
	lines, own := map[string]int{}, 0
	for range 1000 {
		for _, cause := range []string{"a", "b"} {
			if _, speak := c.Next(cause); speak {
				lines[cause]++
			}
		}
		if _, speak := s.Next(); speak {
			own++
		}
	}
	if lines["a"] != 10 || lines["b"] != 10 || own != 10 { // 1, 2, 4 ... 512
		t.Errorf("%v and %d lines, want 10 of each", lines, own)
	}
	many := 0
	for i := range 100000 {
		if _, speak := c.Next(fmt.Sprint("cause ", i)); speak {
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
