package postoffice

// Configuration and start of a node.

import (
	"context"
	"log/slog"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// Config is the configuration of a node. "go doc github.com/stepaf/stepaf-go/van/env Config" lists its fields, docs/env.md describes them.
type Config = env.Config

// DefaultConfig returns a configuration with every setting at its default.
func DefaultConfig() *Config { return env.Default() }

// LoadConfig reads the environment. The error names every variable with an invalid value.
func LoadConfig() (*Config, error) { return env.LoadFrom(env.OS()) }

// Options of Start.
type Options struct {
	Config *Config // required

	// Log receives the node's log; nil means standard error at the level of PS_VERBOSE. Each line has the attributes role,
	// rank and id, and gpu if STEPMESH_GPU is set; rank and id are "-" until they are known.
	Log *slog.Logger

	// Van makes the transport; nil means the one that Config.VanType names.
	Van van.Factory

	// Backend is the device's memory; nil means the one that Config.Backend names.
	// The node neither configures nor closes it.
	Backend backend.Backend

	// KeepBackend leaves the backend that Config names open after the node has left, for
	// programs that still use received tensors in its memory.
	KeepBackend bool

	// NoRank lets the scheduler choose the rank instead of computing it from
	// Config (only with a GroupSize of 1).
	NoRank bool

	// Rand is the source of random numbers: the incarnation, first timestamps. nil means
	// the kernel's. Reproducible tests set it.
	Rand func() uint64

	// NoBarrier makes Start return as soon as this node knows all others, without the
	// barrier over all nodes that C++ StepMesh programs begin with.
	NoBarrier bool

	// OnTrace, if not nil, is called for each timestamp of a call of af or kv that a server has answered, with the server, the
	// timestamp (see Call.Traces), and the times of its message. It exports latencies to a tracing system. It runs on the
	// goroutine that has received the answer, before Call.Wait returns, and must neither block nor send.
	OnTrace func(server NodeID, timestamp int32, t Trace)
}

// core is the options as the packages of this library use them.
func (o Options) core() cluster.Options {
	c := cluster.Options{Config: o.Config, Log: o.Log, Van: o.Van, Backend: o.Backend, KeepBackend: o.KeepBackend, NoRank: o.NoRank, Rand: o.Rand, NoBarrier: o.NoBarrier}
	if f := o.OnTrace; f != nil {
		c.OnTrace = func(id int, timestamp int32, t cluster.Trace) { f(NodeID(id), timestamp, Trace(t)) }
	}
	return c
}

// Start joins the cluster that o.Config describes. It returns when every node has joined, or with an error when ctx ends,
// when the start-up deadline passes, or when the scheduler refuses the node. The error names the nodes that are missing.
//
// Config.Role must be worker, server or scheduler; for joint see StartJoint.
func Start(ctx context.Context, o Options) (*Node, error) {
	n, err := cluster.Start(ctx, o.core())
	return (*Node)(n), err
}

// StartJoint starts a server and a worker in this process, each with its own id and sockets, as DMLC_ROLE=joint does.
func StartJoint(ctx context.Context, o Options) (server, worker *Node, err error) {
	s, w, err := cluster.StartJoint(ctx, o.core())
	return (*Node)(s), (*Node)(w), err
}
