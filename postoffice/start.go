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

// Config is the configuration of a node; docs/env.md describes its fields.
type Config = env.Config

// DefaultConfig returns a configuration with every setting at its default.
func DefaultConfig() *Config { return env.Default() }

// LoadConfig reads the environment. The error names every variable with an invalid value.
func LoadConfig() (*Config, error) { return env.LoadFrom(env.OS()) }

// LoadConfigFrom reads variables from another source: lookup returns a value and whether it is set; names, which may be nil,
// lists the names that are set.
func LoadConfigFrom(lookup func(name string) (string, bool), names func() []string) (*Config, error) {
	return env.LoadFrom(env.Source{Lookup: lookup, Names: names})
}

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
}

// Start joins the cluster that o.Config describes. It returns when every node has joined, or with an error when ctx ends,
// when the start-up deadline passes, or when the scheduler refuses the node. The error names the nodes that are missing.
//
// Config.Role must be worker, server or scheduler; for joint see StartJoint.
func Start(ctx context.Context, o Options) (*Node, error) {
	n, err := cluster.Start(ctx, cluster.Options(o))
	return (*Node)(n), err
}

// StartJoint starts a server and a worker in this process, each with its own id and sockets, as DMLC_ROLE=joint does.
func StartJoint(ctx context.Context, o Options) (server, worker *Node, err error) {
	s, w, err := cluster.StartJoint(ctx, cluster.Options(o))
	return (*Node)(s), (*Node)(w), err
}
