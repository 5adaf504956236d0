//go:build linux && cgo && !nordma

package doctor

import (
	"log/slog"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// loadVerbs returns the function with which this build loads RDMA.
func loadVerbs(log *slog.Logger) func() (verbs.Stack, error) {
	return func() (verbs.Stack, error) { return verbs.Load(verbs.Options{Log: log}) }
}
