package rdma

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/fakeverbs"
)

// A connect request that comes during Close is rejected before Close returns.
func TestConnectRequestDuringClose(t *testing.T) {
	t.Run("at one address", func(t *testing.T) { testConnectRequestDuringClose(t, false) })
	t.Run("everywhere", func(t *testing.T) { testConnectRequestDuringClose(t, true) })
}

func testConnectRequestDuringClose(t *testing.T, everywhere bool) {
	p := newPair(t, nil)
	if everywhere { // as a scheduler in Kubernetes listens
		p.server.cm.Source = netip.Addr{}
	}
	p.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpReject {
			<-time.After(300 * time.Millisecond) // it takes long
		}
		return nil
	})
	p.connect(p.server, 11, p.worker)
	p.until("device", func() bool { return len(*p.server.devices.Load()) > 0 })
	end := p.rejectAll()
	p.connect(p.server, 13, p.worker)
	if err := p.server.Send(tensor(13, 1, 1, true, true, make([]byte, 10))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	closed := make(chan error)
	go func() { closed <- p.server.Close(ctx) }() // waits for the message
	p.until("begin of Close", p.server.closed.Load)
	p.connect(p.worker, serverID, p.server)
	end()
	if err := <-closed; err != nil {
		t.Errorf("Close: %v", err)
	}
}
