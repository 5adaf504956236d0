package vantest

// What a Device is, how it is set, and whether it works.

import (
	"sync"

	"github.com/stepaf/stepaf-go/van/backend"
)

// state is what all parts of a Device look at.
type state struct {
	dev backend.Device

	mu      sync.Mutex
	options backend.Options
	failing error
	closed  bool
}

// Name implements backend.Backend.
func (s *state) Name() string { return "GPU" }

// Device implements backend.Backend.
func (s *state) Device() backend.Device { return s.dev }

// Configure implements backend.Tunable.
func (s *state) Configure(o backend.Options) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options = o
}

// Options returns what Configure was given last.
func (s *state) Options() backend.Options {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.options
}

// Fail makes all that follows fail with err, until it is nil again.
func (s *state) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = err
}

func (s *state) fails() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return backend.ErrClosed
	}
	return s.failing
}

// Health implements backend.HealthChecker.
func (s *state) Health() error { return s.fails() }
