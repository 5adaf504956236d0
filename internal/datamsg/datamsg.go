// Package datamsg is the common part of the key-value API and the tensor API: answers to requests, data frames, and
// buffers for pushes.
package datamsg

import (
	"fmt"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Reply has the fields of a request that an answer needs. It is a small value that may be kept after the request's
// message is released.
type Reply struct {
	Sender       int    // node id of the requesting instance
	ProcessEpoch uint32 // of its process, see van.Message
	AppID        int32
	CustomerID   int32
	Head         int32
	Timestamp    int32
	Push         bool
	Key          uint64
	Addr         uint64
	ValLen       int32
	Option       int32

	Trace van.Trace
}

// ReplyTo returns the Reply for msg.
func ReplyTo(msg *van.Message) Reply {
	return Reply{Sender: msg.Sender, ProcessEpoch: msg.ProcessEpoch, AppID: msg.AppID, CustomerID: msg.CustomerID, Head: msg.Head, Timestamp: msg.Timestamp,
		Push: msg.Push, Key: msg.Key, Addr: msg.Addr, ValLen: msg.ValLen, Option: msg.Option, Trace: msg.RequestTrace}
}

// Fill makes m an answer to r without data: the acknowledgment of a push.
func (r *Reply) Fill(m *van.Message) {
	m.Reset()
	m.Receiver, m.ProcessEpoch = r.Sender, r.ProcessEpoch
	m.Request, m.Push = false, r.Push
	m.AppID, m.CustomerID, m.Head, m.Timestamp = r.AppID, r.CustomerID, r.Head, r.Timestamp
	m.Key, m.Addr, m.ValLen, m.Option = r.Key, r.Addr, r.ValLen, r.Option
	m.RequestTrace = r.Trace
}

// SetData adds data frames to a message: keys, values of element type t, and if they are not empty, lengths.
func SetData(m *van.Message, keys, vals, lens backend.Mem, t van.DataType) {
	m.DataTypes = append(m.DataTypes[:0], van.TypeUint64, t)
	m.Keys, m.Vals, m.Lens, m.Frames = keys, vals, lens, 2
	if lens.Len() > 0 {
		m.DataTypes = append(m.DataTypes, van.TypeInt32)
		m.Frames = 3
	}
	dev := vals.Device()
	if dev.Type == backend.Unknown {
		dev = backend.Host
	}
	m.Src, m.Dst = dev, dev
	m.DataSize = int32(min(m.PayloadLen(), 1<<31-1))
}

// CheckSender refuses requests of nodes other than the workers of the cluster.
func CheckSender(n *cluster.Node, msg *van.Message) error {
	id := msg.Sender
	if id == van.Empty || van.RoleOf(id) != van.Worker || van.RankOf(id) >= n.Config().NumWorkers*n.Config().GroupSize {
		return fmt.Errorf("%w: data request from %s, want one of the %d workers", van.ErrMalformed, van.NodeName(id), n.Topology().NumWorkerInstances())
	}
	return nil
}
