package replay

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stepaf/stepaf-go/tests/vansession"
)

func TestReplay(t *testing.T) {
	files, err := filepath.Glob("../../van/testdata/sessions/*.jsonl")
	must(t, err)
	if len(files) != len(scripts) {
		t.Fatalf("%d sessions, %d scripts", len(files), len(scripts))
	}
	for _, path := range files {
		s, err := vansession.Load(path)
		must(t, err)
		for _, n := range s.Nodes {
			t.Run(fmt.Sprintf("%s/%s%d", s.Name, n.Role, n.Rank), func(t *testing.T) {
				t.Parallel()
				r := newRun(t, s, n)
				must(t, r.play())
				must(t, r.end())
			})
		}
	}
}
