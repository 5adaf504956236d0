//go:build linux && cgo && !nordma

package rdma

import "github.com/stepaf/stepaf-go/van"

// Without the verbs, this transport is not registered. Simulations and benchmarks still run the package on emulated devices.
func init() { van.Register("ibverbs", New) }
