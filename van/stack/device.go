package stack

// The choice of the device whose memory a node uses.

import (
	"fmt"
	"log/slog"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// OpenDevice opens the memory of the configured device. By default that is the GPU, or
// ordinary memory if there is no GPU, and on the scheduler, which carries no tensors. The
// caller closes it.
func OpenDevice(cfg *env.Config, role van.Role, log *slog.Logger) (backend.Backend, error) {
	name := cfg.Backend
	if name == "" {
		name = "CPU"
		if role != van.Scheduler {
			gpu, err := backend.New("GPU", cfg.GPU)
			if err == nil {
				return tuned(gpu, cfg), nil
			}
			log.Info("no GPU in this build or on this machine: using backend CPU", "why", err)
		}
	}
	b, err := backend.New(name, cfg.GPU)
	if err != nil {
		return nil, fmt.Errorf("STEPMESH_BAKCEND=%s: %w: %w", name, van.ErrInvalid, err)
	}
	return tuned(b, cfg), nil
}

// tuned sets b's wait options from the configuration.
func tuned(b backend.Backend, cfg *env.Config) backend.Backend {
	if t, ok := b.(backend.Tunable); ok {
		o := backend.DefaultOptions()
		o.DriverEvents, o.Spin = !cfg.MemSync, cfg.BusyPoll.Spin()
		t.Configure(o)
	}
	return b
}
