package af_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

const notShared = "not over shared memory: the peer offers none: it is a C++ node, or has BYTEPS_ENABLE_IPC=0"

// TestExchangePath: Path and the log at PS_VERBOSE=2 name the path to each server: none before the first round, and then the transport, with
// the reason why it is not a faster one.
func TestExchangePath(t *testing.T) {
	var log vantest.Log
	all := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	c := testcluster.Start(t, testcluster.Options{Servers: 3, Over: testcluster.AsSet, Log: all, Set: func(c *postoffice.Config) {
		if c.EnableIPC = 1; c.Role == "server" && c.NodeRank == 1 {
			c.EnableIPC = 0
		}
	}})
	for _, n := range c.Servers {
		serve(t, n, func(b af.Batch) { _ = b.Respond(nil) })
	}
	w := newWorker(t, c.Workers[0])
	x := prepare(t, w, []af.KeyTensor{{Key: 1, Val: hostTensor(t, []byte{1})}}, nil)
	const none = "messages: server 0, server 2: none (the first data to the peer chooses it); server 1: none (" + notShared + "; the first data to the peer chooses it)"
	if got := x.Path(); got != none {
		t.Errorf("before the first round the path is %q, want %q", got, none)
	}
	if err := round(t, x); err != nil {
		t.Fatal(err)
	}
	const want = "messages: server 0, server 2: shared memory; server 1: tcp (" + notShared + ")"
	if got := x.Path(); got != want {
		t.Errorf("the path is %q, want %q", got, want)
	}
	y := prepare(t, w, []af.KeyTensor{{Key: 1, Val: hostTensor(t, []byte{1})}}, nil, af.To{2})
	if got, want := y.Path(), "messages: server 2: shared memory"; got != want {
		t.Errorf("the path of the second exchange is %q, want %q", got, want)
	}
	c.Finalize(t)
	if got := x.Path(); !strings.HasPrefix(got, "messages: server 0") {
		t.Errorf("after the end of the node the path is %q", got)
	}
	for _, line := range []string{
		`level=DEBUG msg="prepared an exchange" path="` + none + `" tensors="1 push and 0 pull tensors"`,
		`level=DEBUG msg="prepared an exchange" path="messages: server 2: shared memory" tensors="1 push and 0 pull tensors"`,
	} {
		if n := strings.Count(log.String(), line); n != 1 {
			t.Errorf("the log has %d lines %s, want 1:\n%s", n, line, log.String())
		}
	}
}

// TestExchangePathOfDevice: for tensors on a device, Path says whether their values go through host memory.
func TestExchangePathOfDevice(t *testing.T) {
	for over, want := range map[testcluster.Transport]string{
		testcluster.SHM: "messages: server 0: shared memory, directly from the device",
		testcluster.TCP: "messages: server 0: tcp, through host memory",
	} {
		d := startDevices(t, over)
		x := prepare(t, d.w, []af.KeyTensor{{Key: 1, Val: deviceTensor(t, d.wdev, []byte{1})}}, nil)
		if got := x.Path(); got != want {
			t.Errorf("over %s the path is %q, want %q", over, got, want)
		}
		y := prepare(t, d.w, []af.KeyTensor{{Key: 1, Val: hostTensor(t, []byte{1})}}, nil)
		if got, want := y.Path(), strings.Split(want, ",")[0]; got != want {
			t.Errorf("over %s the path of a host tensor is %q, want %q", over, got, want)
		}
		d.Finalize(t)
	}
}
