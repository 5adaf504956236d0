//go:build linux && cgo && !nordma

package rdma

import "github.com/stepaf/stepaf-go/van"

// Where the verbs are not built in there is no such transport, though bench software runs this package on devices in
// memory.
func init() { van.Register("ibverbs", New) }
