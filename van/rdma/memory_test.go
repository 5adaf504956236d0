package rdma

import (
	"bytes"
	"context"
	"testing"
)

// A received message stays readable after Close for as long as it is held.
func TestHeldAfterClose(t *testing.T) {
	for _, n := range []int{100, 100 << 10} {
		p := newPair(t, nil)
		p.connect(p.worker, serverID, p.server)
		want := bytes.Repeat([]byte{7}, n)
		if err := p.worker.Send(tensor(serverID, 1, 5, true, true, want)); err != nil {
			t.Fatal(err)
		}
		m := p.next(p.atServer)
		p.close()
		if err := p.server.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(m.Vals.Host(), want) {
			t.Errorf("%d bytes have changed", n)
		}
		m.Release()
	}
}
