package zmq_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/resend"
	"github.com/stepaf/stepaf-go/van/vantest"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// TestConformance runs the suite over TCP and over Unix sockets, plain and wrapped.
func TestConformance(t *testing.T) {
	for _, local := range []bool{false, true} {
		transport := "tcp"
		if local {
			transport = "ipc"
		}
		plain := func(t testing.TB) van.Van {
			cfg := env.Default()
			cfg.Local = local
			v, err := zmq.New(van.Options{Config: cfg})
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		for _, s := range []struct {
			name  string
			suite vantest.Suite
		}{
			{"plain", vantest.Suite{New: plain}},
			{"drop0", vantest.Suite{MaxAllocs: -1, New: func(t testing.TB) van.Van {
				d := drop.New(plain(t), 0, 1, nil)
				d.Enable()
				return d
			}}},
			{"resend", vantest.Suite{MaxAllocs: -1, New: func(t testing.TB) van.Van {
				r := resend.New(plain(t), resend.Options{})
				r.Enable()
				return r
			}}},
			{"resend-drop20", vantest.Suite{MaxAllocs: -1, Lossy: true, New: func(t testing.TB) van.Van {
				d := drop.New(plain(t), 20, 1, nil)
				d.Enable()
				r := resend.New(d, resend.Options{Timeout: 20e6, MaxTries: 100, CloseWait: 10 * 20e6}) // else what is dropped four times is lost by Close
				r.Enable()
				return r
			}}},
		} {
			if local {
				s.suite.Host, s.suite.BadHost = "127.0.0.1", ""
			}
			t.Run(transport+"/"+s.name, func(t *testing.T) { vantest.Run(t, s.suite) })
		}
	}
}
