//go:build !linux || !cgo || nordma

package beat

import (
	"errors"
	"net/netip"
)

// Answerer is the thread that answers for this process.
type Answerer struct{}

// Answer reports that this program has no such thread.
func Answer(netip.AddrPort, uint32) (*Answerer, error) {
	return nil, errors.New("this program was built without RDMA")
}

// Close ends the thread, once.
func (*Answerer) Close() {}
