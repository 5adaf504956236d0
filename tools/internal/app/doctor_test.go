package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tools/internal/doctor"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// patient is this machine with another environment.
func patient(environ ...string) *doctor.Machine {
	m := doctor.Host("test", nil)
	m.Env = env.FromList(environ)
	return m
}

func TestDoctor(t *testing.T) {
	var b bytes.Buffer
	if err := examine(t.Context(), &b, patient(), doctorOptions{timeout: time.Minute}); err != nil || !strings.Contains(b.String(), "\nno check failed: a node with transport zmq should work") {
		t.Errorf("%v\n%s", err, b.String())
	}
	b.Reset()
	err := examine(t.Context(), &b, patient("PS_VERBOSE=yes"), doctorOptions{json: true, timeout: time.Minute})
	if exit.Status(err) != exit.Failure || !errors.Is(err, errSilent) {
		t.Errorf("%v, want a silent failure", err)
	}
	var r doctor.Report
	if err := json.Unmarshal(b.Bytes(), &r); err != nil || r.Healthy || r.Failed != 1 || r.Van != "zmq" {
		t.Errorf("%v\n%s", err, b.String())
	}
}

// TestDoctorInterrupted: a signal ends doctor and sets the exit status; the findings so far are printed.
func TestDoctorInterrupted(t *testing.T) {
	for _, j := range []bool{false, true} {
		ctx, cancel := context.WithCancelCause(t.Context())
		m := patient()
		m.ZMQ = func(van.Options) (van.Van, error) {
			cancel(&exit.Stopped{Signal: syscall.SIGINT})
			return nil, errors.New("interrupted")
		}
		var b bytes.Buffer
		err := exit.BySignal(ctx, examine(ctx, &b, m, doctorOptions{json: j, timeout: time.Minute}))
		if exit.Status(err) != 130 || err.Error() != "stopped by signal: interrupt" {
			t.Errorf("%v, status %d; want status 130", err, exit.Status(err))
		}
		if !strings.Contains(b.String(), "not checked: stopped by signal: interrupt") || j != json.Valid(b.Bytes()) {
			t.Errorf("%s", b.String())
		}
	}
}
