//go:build !linux || !cgo || nordma

package verbs

import (
	"fmt"
	"log/slog"
)

// Options says how Load is to work. The zero value is good.
type Options struct {
	Log *slog.Logger // what was found and what was not; nil: nobody wants to know
}

// Load reports that RDMA was left out of this program.
func Load(Options) (Stack, error) {
	return nil, fmt.Errorf("%w: this program was built without it (USE_RDMA=0, build tag nordma, or not for Linux with cgo); "+
		"build it on Linux with USE_RDMA=1", ErrUnavailable)
}
