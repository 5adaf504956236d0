package policy

import (
	"context"
	"errors"
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

// TestShow: several answers of the scheduler about one policy are one line, and a word that is no id is not printed as
// a node.
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

// TestUnanswered: if nodes have not answered, the list is printed, and the status is not 0.
func TestUnanswered(t *testing.T) {
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	stopped, stop := context.WithCancelCause(t.Context())
	stop(errors.New("stopped by a signal"))
	for _, x := range []struct {
		ctx    context.Context
		err    error
		status int
		text   string
	}{
		{late, context.DeadlineExceeded, exit.Timeout, "not all have answered: --timeout has passed"},
		{stopped, context.Canceled, exit.Failure, "not all have answered: stopped by a signal"},
		{t.Context(), errors.New("no answer"), exit.Failure, "not all have answered: no answer"},
		{late, nil, 0, ""},
	} {
		var out strings.Builder
		err := finish(x.ctx, &out, []string{"peer=9,rate=5000 asked=8"}, x.err)
		if exit.Status(err) != x.status || err != nil && !strings.Contains(err.Error(), x.text) || !strings.Contains(out.String(), "server:0 (no answer yet)") {
			t.Errorf("status %d, want %d, %q in %v, and the list\n%s", exit.Status(err), x.status, x.text, err, out.String())
		}
	}
}

// TestRateOf: rates in the forms of the command line.
func TestRateOf(t *testing.T) {
	for in, want := range map[string]int64{"1000": 1000, "5k": 5000, "2K": 2000, "3M": 3_000_000, "7G": 7_000_000_000, "1000G": 1_000_000_000_000} {
		if got, err := rateOf(in); err != nil || got != want {
			t.Errorf("%s is %d, %v; want %d bytes in a second", in, got, err, want)
		}
	}
	for _, in := range []string{"", "k", "999", "0k", "-1M", "1kk", "1MG", "1T", "1.5M", "1001G", "9223372036854775807G", "1 M"} {
		if got, err := rateOf(in); err == nil || !strings.Contains(err.Error(), "bytes in a second") {
			t.Errorf("%q is %d, %v", in, got, err)
		}
	}
}
