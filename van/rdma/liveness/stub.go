//go:build !linux || !cgo || nordma

package liveness

import (
	"errors"
	"net/netip"
)

// Responder is the thread that answers for this process.
type Responder struct{}

// StartResponder reports that this program has no such thread.
func StartResponder(netip.AddrPort, uint32) (*Responder, error) {
	return nil, errors.New("this program was built without RDMA")
}

// Close ends the thread. Call it once.
func (*Responder) Close() {}
