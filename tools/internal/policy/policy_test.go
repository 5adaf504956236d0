package policy

import (
	"strings"
	"testing"
)

// TestShow: what the scheduler says about one policy in several answers is one line, and a word that
// is no id is not shown as another node.
func TestShow(t *testing.T) {
	var out strings.Builder
	err := show(&out, []string{"peer=9,rate=5000 in-force=8,10", "peer=9,rate=5000 in-force=12 asked=11,13", "peer=9,rate=5000 asked=15,1...", "app=7,rate=6000 dead=9"})
	if err != nil {
		t.Fatal(err)
	}
	const want = `TARGET    RATE      CLASS  ORDER  IN FORCE                    NOT IN FORCE
worker:0  5000 B/s  -      -      server:0 server:1 server:2  worker:1 worker:2 (no answer yet), worker:3 1... (no answer yet)
app 7     6000 B/s  -      -      -                           worker:0 (lost)
`
	if out.String() != want {
		t.Errorf("it shows\n%s\nwant\n%s", out.String(), want)
	}
}
