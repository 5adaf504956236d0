package streams_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// TestPath: Path and the log name the way of an exchange, the devices' ends, and the tensors that are copied first. The log has the first, second,
// fourth, ... exchange of each path. Path stays after Close.
func TestPath(t *testing.T) {
	for _, c := range []struct {
		how  string
		opts []streams.Option
	}{{"streams", nil}, {"hosts", []streams.Option{streams.ByHost{}}}} {
		t.Run(c.how, func(t *testing.T) {
			var log vantest.Log
			s := start(t, testcluster.Options{Workers: 2, Servers: 2, Log: log.Logger()})
			s.workers[1].dev.PrivateMem(true)
			pairs := s.prepare(t, 10, 10, c.opts...)
			for range 2 {
				s.prepare(t, 10, 10, c.opts...)
			}
			const first = "; copied on the device first: 2 of the tensors to send, whose memory other processes cannot map"
			for i, copied := range []string{"", first} {
				x, y := pairs[i].x, pairs[0].ys[i]
				_ = x.Close()
				for e, want := range map[*streams.Exchange]string{
					x: c.how + ": " + s.workers[i].dev.Device().String() + " with server 0, server 1" + copied,
					y: c.how + ": " + s.servers[i].dev.Device().String() + " with worker 0, worker 1",
				} {
					if got := e.Path(); got != want {
						t.Errorf("the path is %q, want %q", got, want)
					}
					line := fmt.Sprintf(`msg="prepared an exchange" path=%q exchange="exchange `, want)
					if n := strings.Count(log.String(), line); n != 2 {
						t.Errorf("the log has %d lines %s of 3 exchanges, want those of the first and second:\n%s", n, line, log.String())
					}
				}
			}
		})
	}
}
