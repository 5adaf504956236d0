package rdma

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
)

// A connect request that arrives during Close is rejected before Close returns.
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
	p.until("device", func() bool { return len(*p.server.tables.devices.Load()) > 0 })
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

// A message that was sent right before Disconnect is delivered, although connecting takes longer than drainTime.
func TestDisconnectBeforeConnected(t *testing.T) {
	r := newRig(t)
	a, b := r.node(1), r.node(9)
	began, goOn := make(chan struct{}, 1), make(chan struct{})
	r.net.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpConnect && op.Stack == a.stack {
			began <- struct{}{}
			<-goOn
		}
		return nil
	})
	a.connect(b)
	a.must(control(b, 1))
	<-began
	a.Disconnect(b.who.ID)
	<-time.After(drainTime + 100*time.Millisecond)
	r.net.Fail(nil)
	close(goOn)
	m := b.next()
	if m.Timestamp != 1 {
		t.Errorf("message %d, want 1", m.Timestamp)
	}
	m.Release()
}

// Close does not exceed its time limit for a peer that is closing and has no connection.
func TestCloseWhileDraining(t *testing.T) {
	p := newPair(t, nil)
	p.connect(p.worker, serverID, p.server)
	end := p.rejectAll()
	defer end()
	p.connect(p.worker, 10, p.server)
	if err := p.worker.Send(tensor(10, 1, 1, true, true, make([]byte, 10))); err != nil {
		t.Fatal(err)
	}
	p.worker.Disconnect(10)
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := p.worker.Close(ctx); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > p.worker.times.connect {
		t.Errorf("Close took %s", took)
	}
}
