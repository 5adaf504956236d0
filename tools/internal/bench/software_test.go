package bench

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
)

func benchCommand(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	app := &cli.App{Name: "stepaf", Writer: &out, ErrWriter: io.Discard, Commands: []*cli.Command{Command()},
		ExitErrHandler: func(*cli.Context, error) {}}
	err := app.Run(append([]string{"stepaf", "bench"}, args...))
	return out.String(), err
}

// The cost of a push_pull without a network is measured over both transports, and over simulated devices the answers
// are the server's.
func TestSoftware(t *testing.T) {
	out, err := benchCommand(t, "software", "--json", "--iters", "300", "--warmup", "300")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 4 {
		t.Fatalf("%d lines, want 4:\n%s", len(lines), out)
	}
	for i, line := range lines {
		var r softwareReport
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		size := []payload{both(1024), attention}[i%2]
		if r.Van != softwareVans[i/2] || r.PushBytes != size.push || r.PullBytes != size.pull || r.Iters != 300 || r.Checked != (r.Van == "rdma") {
			t.Errorf("line %d: %s", i, line)
		}
		if r.P50 <= 0 || r.P90 < r.P50 || r.P99 < r.P90 || r.Max < r.P99 || r.Mean <= 0 || r.CPU < 0 {
			t.Errorf("times make no sense: %s", line)
		}
		if r.Locks != nil {
			t.Errorf("locks in a build that does not count them: %s", line)
		}
	}
	out, err = benchCommand(t, "software", "--van", "null", "--push", "10", "--pull", "20", "--iters", "5")
	if err != nil || !strings.Contains(out, "10 / 20") || strings.Count(out, "\n") != 3 {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestSoftwareUsage(t *testing.T) {
	for _, x := range []struct{ args, want string }{
		{"--van tcp", "--van tcp: want null or rdma"},
		{"--push 0 --pull 1", "--push 0 --pull 1: want 1 to"},
		{"--push 7", "--push 7 --pull 0: want 1 to"},
		{"--iters -1", "--iters and --warmup want positive numbers"},
	} {
		_, err := benchCommand(t, append([]string{"software"}, strings.Fields(x.args)...)...)
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.args, err, x.want)
		}
	}
}
