package membership

import (
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"strings"
	"testing"
)

const storiesPath = "testdata/stories.sum"

// TestStories: every message, event, warning and error of machines in random stories changes only on purpose. To
// change them, compare a story before and after (-run TestStories -story 17) and run this test with -update. The
// scripts say what is right; this test notices changes that no script covers.
func TestStories(t *testing.T) {
	if *story >= 0 {
		chaos(t, storyBytes(*story), func(line string) { t.Log(line) })
		return
	}
	var got strings.Builder
	for i := range 800 {
		h, lines := fnv.New64a(), 0
		chaos(t, storyBytes(i), func(line string) {
			_, _ = io.WriteString(h, line+"\n")
			lines++
		})
		fmt.Fprintf(&got, "%d: %d lines %016x\n", i, lines, h.Sum64())
		if t.Failed() {
			t.Fatalf("story %d", i)
		}
	}
	if *update {
		if err := os.WriteFile(storiesPath, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(storiesPath)
	if err != nil {
		t.Fatal(err)
	}
	gs, ws := strings.Split(got.String(), "\n"), strings.Split(string(want), "\n")
	differ := 0
	for i, g := range gs {
		if i >= len(ws) || g != ws[i] {
			if differ++; differ == 1 {
				t.Errorf("story %q is not as it was; see it with -run TestStories -story %d -v, here and before the change", g, i)
			}
		}
	}
	if differ > 0 || len(gs) != len(ws) {
		t.Errorf("%d of %d stories, of which there were %d, differ (run with -update to accept)", differ, len(gs)-1, len(ws)-1)
	}
}

func storyBytes(i int) []byte { return randomBytes(uint64(i)+1000, 100+i%6*120) }
