// Package stack assembles the transports of a node from its configuration: the configured
// transport, shared memory with processes of the same host, and the wrappers around
// them. It links every transport of this build into the program, so that van.New finds
// them by name. The packages above it know no transport by name.
package stack

import (
	"cmp"
	"log/slog"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/local"
	"github.com/stepaf/stepaf-go/van/pace"
	"github.com/stepaf/stepaf-go/van/resend"
	"github.com/stepaf/stepaf-go/van/stage"
	"github.com/stepaf/stepaf-go/van/tcp"
	_ "github.com/stepaf/stepaf-go/van/zmq" // registers itself
)

// Options are the parameters of New.
type Options struct {
	van.Options // of the transports; Engine and Keys are made by New

	Role van.Role

	// Transport makes the transport; nil means the configured one, with shared memory
	// for peers of the same host.
	Transport van.Factory

	// OnFail is called with messages to peer that failed after the last resend. It must not block,
	// and may keep meta.
	OnFail func(peer int, meta *van.Meta, err error)
}

// Van combines a node's transports into one van. van.As finds the optional interfaces of the wrapped vans.
type Van struct {
	van.Van
	engine *engine.Engine
	enable []func()
	pace   *pace.Van
}

// Rates are the rate limits of data for peers and of applications.
type Rates = pace.Rates

// SetRates replaces all rates.
func (v *Van) SetRates(r Rates) { v.pace.SetRates(r) }

// Enable starts resending and dropping messages, if the configuration says so. Call it
// when start-up is complete.
func (v *Van) Enable() {
	for _, f := range v.enable {
		f()
	}
}

// Poll receives on the caller's goroutine, from all transports that support it, until done returns
// true or no message has arrived for a short time.
func (v *Van) Poll(done func() bool) { v.engine.Poll(done) }

// New makes a node's transports.
func New(o Options) (*Van, error) {
	v := &Van{engine: engine.New(o.Config.BusyPoll.Spin())}
	o.Engine = v.engine
	var err error
	if o.Keys, err = auth.Open(o.Config); err != nil {
		return nil, err
	}
	inner, err := transport(o)
	if err != nil {
		return nil, err
	}
	v.Van = staged(inner, o.Options)
	if o.Config.DropMsg > 0 {
		d := drop.New(v.Van, o.Config.DropMsg, 0, o.Log)
		v.enable, v.Van = append(v.enable, d.Enable), d
	}
	if o.Config.Resend {
		r := resend.New(v.Van, resend.Options{Timeout: o.Config.ResendTimeout, Log: o.Log, OnFail: o.OnFail, Expand: v.Type() == "ibverbs"})
		v.enable, v.Van = append(v.enable, r.Enable), r
	}
	v.pace = pace.New(v.Van, pace.Options{Budget: int64(o.Config.SendBudget), OnFail: o.OnFail})
	v.Van = v.pace
	return v, nil
}

func transport(o Options) (van.Van, error) {
	if o.Transport != nil {
		return o.Transport(o.Options)
	}
	return Configured(o.Options, o.Role)
}

// Configured makes the configured transport and, unless the configuration disables it, shared
// memory for peers of the same host. The choice is made for each peer when it connects, and is
// logged with the reason. The scheduler carries no data and shares no memory.
func Configured(o van.Options, role van.Role) (van.Van, error) {
	v, err := van.New(o)
	if err != nil || role == van.Scheduler {
		return v, err
	}
	log := cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	switch {
	case v.Type() != "zmq" || o.Config.Local || o.Incarnation == 0:
	case o.Config.Data == env.DataTCP:
		v = tcp.New(v, o)
	default:
		log.Info("no data goes over tcp", "why", "STEPAF_DATA="+o.Config.Data)
	}
	if o.Config.EnableIPC == 0 {
		log.Info("no shared memory with peers", "why", "BYTEPS_ENABLE_IPC=0")
		return v, nil
	}
	return local.New(v, o), nil
}

// staged sends values on the node's device through host memory to peers whose path
// cannot carry device values.
func staged(v van.Van, o van.Options) van.Van {
	so := stage.Options{Backend: o.Backend, Log: o.Log}
	if c, ok := van.As[van.PathChooser](v); ok {
		so.Direct = func(peer int) bool { return c.PathTo(peer, false).Device }
	}
	if _, several := v.(van.Wrapper); !several && so.Direct != nil && so.Direct(van.Empty) {
		return v // the only transport carries device values to every peer
	}
	return stage.New(v, so)
}
