//go:build !linux || !cgo || nordma

package verbs

import (
	"fmt"
	"log/slog"
)

// Options configures Load. The zero value is usable.
type Options struct {
	Log *slog.Logger // for the results of loading; nil: no log
}

// Load reports that this program was built without RDMA.
func Load(Options) (Stack, error) {
	return nil, fmt.Errorf("%w: this program was built without it (USE_RDMA=0, build tag nordma, or not for Linux with cgo); "+
		"build it on Linux with USE_RDMA=1", ErrUnavailable)
}
