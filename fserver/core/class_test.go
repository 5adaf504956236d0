package core

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestWrongVariables: every invalid variable is a ValueError in Python. The table has an invalid value of each variable,
// or nil and the reason why there is none.
func TestWrongVariables(t *testing.T) {
	good := map[string]string{"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1",
		"DMLC_PS_ROOT_PORT": "9000", "DMLC_NODE_HOST": "127.0.0.1"}
	start := func(t *testing.T, set map[string]string) {
		t.Helper()
		v := map[string]string{}
		for _, m := range []map[string]string{good, set} {
			for name, value := range m {
				v[name] = value
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // a start that finds no invalid variable does not wait for a scheduler
		s, err := Start(ctx, func(name string) (string, bool) { x, ok := v[name]; return x, ok }, func() []string {
			var names []string
			for name := range v {
				names = append(names, name)
			}
			return names
		})
		if s != nil || ClassOf(err) != Value {
			t.Errorf("%v: session %t, error of class %d, want one of class %d: %v", set, s != nil, ClassOf(err), Value, err)
		}
	}
	special := map[string]map[string]string{
		"STEPAF_CLUSTER_ID": nil, // any text
		"DMLC_PS_ROOT_URI":  {"DMLC_PS_ROOT_URI": "10.0.0.1:80"},
		"DMLC_NODE_HOST":    {"DMLC_NODE_HOST": "192.0.2.250"},
		"DMLC_INTERFACE":    {"DMLC_INTERFACE": "nope", "DMLC_NODE_HOST": ""},
		"DMLC_ENABLE_RDMA":  {"DMLC_ENABLE_RDMA": "carrier-pigeon"},
		"DMLC_PS_VAN_TYPE":  {"DMLC_PS_VAN_TYPE": "carrier-pigeon"},
		"STEPMESH_BAKCEND":  {"STEPMESH_BAKCEND": "ABACUS"},
		"PROFILE_PATH":      {"PROFILE_PATH": filepath.Join(t.TempDir(), "none", "p"), "ENABLE_PROFILING": "1"},
	}
	for _, v := range env.Default().Table() {
		set, has := special[v.Name]
		switch {
		case has && set == nil:
			continue
		case !has:
			set = map[string]string{v.Name: "no such value"}
		}
		start(t, set)
	}
	for _, set := range []map[string]string{
		{"DMLC_ROLE": ""}, {"DMLC_NUM_SERVER": "", "DMLC_NUM_SERVERS": "1"}, {"DMLC_ROLE": "joint"},
		{"DMLC_NODE_RANK": "7"}, {"DMLC_NUM_PORTS": "4"}, {"PS_HEARTBEAT_INTERVAL": "10", "PS_HEARTBEAT_TIMEOUT": "5"},
		{"BYTEPS_ZMQ_MAX_SOCKET": "1"}, {"DMLC_ENABLE_UCX": "1"}, {"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": "192.0.2.250"},
		{"DMLC_NODE_HOST": "no-such-host.invalid"},
	} {
		start(t, set)
	}
}

// TestClasses: the class of each sentinel error.
func TestClasses(t *testing.T) {
	for _, x := range []struct {
		err  error
		want Class
	}{
		{van.ErrTimeout, Timeout}, {context.DeadlineExceeded, Timeout}, {van.TimedOut(context.DeadlineExceeded), Timeout},
		{van.ErrPeerLost, Connection}, {van.ErrUnknownPeer, Connection},
		{van.ErrInvalid, Value}, {van.ErrNoTransport, Value}, {ErrUnknownHandler, Value}, {&env.Error{Name: "X"}, Value},
		{errors.Join(&env.Error{Name: "X"}, errors.New("y")), Value},
		{ErrLoopOver, Finished}, {van.ErrFinished, Runtime},
		{van.ErrClosed, Runtime}, {van.ErrReplaced, Runtime}, {van.ErrQueueFull, Runtime}, {van.ErrMalformed, Runtime},
		{ErrMisuse, Runtime}, {postoffice.ErrRefused, Runtime}, {backend.ErrUnavailable, Runtime}, {context.Canceled, Runtime},
	} {
		for _, err := range []error{x.err, fmt.Errorf("more: %w", x.err), &van.Error{Op: "wait", Err: x.err}} {
			if got := ClassOf(err); got != x.want {
				t.Errorf("%v: class %d, want %d", err, got, x.want)
			}
		}
	}
}
