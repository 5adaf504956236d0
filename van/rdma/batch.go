package rdma

import (
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// This file owns batches between nodes of this library. A batch is one message in one slot:
//
//	meta with the directory | placement of each part | inline values | trailer
//
// Host values of up to inlineValue bytes are inline values. Each other value is written from where it lies: to the destination that the
// request names, to a receive buffer that the peer has announced, or to the slot's value memory. Each part of the layout and each value in
// the slot begins at a multiple of frameAlign. Other messages with values have the same layout without a directory: a placement for the
// value of their only key, or for each frame.

const (
	// A batch of more than maxBatchBytes, or more than 1/batchShare of this node's own STEPAF_RDMA_PEER_BUDGET, which the peer probably
	// has, too, is sent as the messages of ps-lite. The cost of a message does not matter then, and a slot for all values would need as
	// much memory at once.
	maxBatchBytes = 64 << 20
	batchShare    = 16
	// maxDestinations is the largest number of pull tensors of a batch. They are all registered when it is sent.
	maxDestinations = 1024
)

// assembles reports whether msg, a batch, can be sent to p as one message. p.mu is held.
func (p *peer) assembles(msg *van.Message) bool {
	if p.link != nil && !p.link.native || p.link == nil && p.incarnation == 0 {
		return false // a node of the C++ library, or it may be one
	}
	n := aligned(msg.EncodedLen()) + aligned(placementLen*len(msg.Parts)) + trailerLen
	total, writes, destinations, most := 0, 1, 0, maxBatchBytes
	if b := p.v.budget.perPeer; b > 0 {
		most = min(most, int(b)/batchShare)
	}
	if p.link != nil && p.link.maxBatch > 0 {
		most = min(most, p.link.maxBatch)
	}
	for i := range msg.Parts {
		x := &msg.Parts[i]
		if isInline(&x.Vals) {
			n += aligned(x.Vals.Len())
		} else {
			total += aligned(x.Vals.Len())
			writes++
		}
		if msg.Request && !x.Push && x.Into.Len() > 0 {
			destinations++
		}
	}
	return n <= maxMeta && n+total <= most && writes <= p.v.cm.SendDepth/2 && destinations <= maxDestinations
}

// message returns the message that o, a batch that was not sent, was made of.
func (o *outgoing) message() (*van.Message, error) {
	m := &van.Message{}
	m.Reset()
	if err := van.DecodeMeta(o.meta, &m.Meta); err != nil {
		return nil, err
	}
	if _, err := m.ReadDirectory(); err != nil {
		return nil, err
	}
	copies := slices.Clone(o.copies) // o may be used again before the message is sent
	for i := range o.parts {
		x, p := &o.parts[i], &m.Parts[i]
		if p.Vals = x.mem; x.mem.Len() == 0 && x.len > 0 {
			p.Vals, copies = backend.Bytes(copies[:x.len]), copies[x.len:]
		}
		if !m.Request {
			p.Addr, p.Option = x.addr, int32(x.rkey)
		} else if x.into.Len() > 0 {
			p.Into, p.Addr = x.into, x.into.Addr()
		}
	}
	return m, nil
}

// writes returns the number of work requests of o on one queue pair.
func (o *outgoing) writes() int {
	n := 1
	for i := range o.parts {
		if o.parts[i].mem.Len() > 0 {
			n++
		}
	}
	return n
}

// isBatch reports whether o is a batch.
func (o *outgoing) isBatch() bool { return o.form == formBatch }
