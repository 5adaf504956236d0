//go:build !linux || !cgo || nordma

package doctor

import (
	"log/slog"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// loadVerbs is nil: this build has no RDMA.
func loadVerbs(*slog.Logger) func() (verbs.Stack, error) { return nil }
