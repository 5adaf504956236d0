// Package foreign makes nodes of this library behave like those of the original towards others,
// for tests: in the simulation and on real processes.
package foreign

import (
	"bytes"
	"context"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// Factory wraps the vans of f such that their nodes behave so: the node's record has no extension,
// its messages carry no incarnations, it ignores other nodes' incarnations, and it does not read
// notices.
func Factory(f van.Factory) van.Factory {
	return func(o van.Options) (van.Van, error) {
		o.Incarnation = 0
		v, err := f(o)
		if err != nil {
			return nil, err
		}
		return &foreignVan{Van: v}, nil
	}
}

type foreignVan struct {
	van.Van
	self van.Node
	own  atomic.Pointer[[]byte] // the extension of its own record
}

// Bind implements van.Van.
func (f *foreignVan) Bind(ctx context.Context, self van.Node) (int, error) {
	port, err := f.Van.Bind(ctx, self)
	f.self = self
	f.self.Port = port
	return port, err
}

// Unwrap implements van.Wrapper.
func (f *foreignVan) Unwrap() van.Van { return f.Van }

// Send implements van.Van.
func (f *foreignVan) Send(msg *van.Message) error {
	msg.RequestTrace.PreStart = 0
	for i := range msg.Control.Nodes { // a scheduler of the original passes on what others say of themselves
		if n := &msg.Control.Nodes[i]; n.Hostname == f.self.Hostname && n.Port == f.self.Port {
			if n.Endpoint != nil {
				own := append([]byte(nil), n.Endpoint...)
				f.own.Store(&own)
			}
			n.Endpoint = nil
		}
	}
	return f.Van.Send(msg)
}

// strip takes away what the original does not know.
func (f *foreignVan) strip(m *van.Meta) {
	m.RequestTrace.PreStart = 0
	for i := range m.Control.Nodes {
		n := &m.Control.Nodes[i]
		n.Endpoint = nil
		if own := f.own.Load(); own != nil && n.Hostname == f.self.Hostname && n.Port == f.self.Port {
			n.Endpoint = *own // the node knows itself by it
		}
	}
}

// Start implements van.Van.
func (f *foreignVan) Start(recv van.Receiver) {
	f.Van.Start(func(m *van.Message) {
		if m.Control.Cmd == van.Heartbeat && bytes.HasPrefix(m.Body, []byte("stepaf/1")) {
			m.Body = nil // and acknowledged, with PS_RESEND, as any other message
		}
		f.strip(&m.Meta)
		recv(m)
	})
}
