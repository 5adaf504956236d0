package verbs

import (
	"errors"
	"syscall"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func TestErrorText(t *testing.T) {
	for _, c := range []struct {
		err  Error
		want string
	}{
		{Error{Op: "bind", What: "10.0.0.1:80", Errno: syscall.EADDRINUSE}, "rdma: bind 10.0.0.1:80: address already in use"},
		{Error{Op: "register", Device: "mlx5_0", Errno: syscall.ENOMEM, Hint: "more"}, "rdma: mlx5_0: register: cannot allocate memory (more)"},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
		if !errors.Is(&c.err, c.err.Errno) {
			t.Errorf("%v does not wrap its errno", &c.err)
		}
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		ConnectRequest.String():      "connect request",
		EventType(0).String():        "event 0",
		EventType(99).String():       "event 99",
		StatusRetryExceeded.String(): "transport retries exceeded (12)",
		Status(77).String():          "status 77",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
