package rdma

import (
	"bytes"
	"testing"

	"github.com/stepaf/stepaf-go/van/env"
)

// The shortest queues that the configuration allows carry messages.
func TestShortestQueues(t *testing.T) {
	p := newPair(t, func(c *env.Config) { c.RDMAStartDepth, c.RDMARxDepth = 1, c.QPNum })
	p.both()
	for i := range 20 {
		vals := bytes.Repeat([]byte{byte(i)}, 4000)
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, vals)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		m := p.next(p.atServer)
		if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), bytes.Repeat([]byte{byte(i)}, 4000)) {
			t.Fatalf("message %d comes with timestamp %d, or changed", i, m.Timestamp)
		}
		m.Release()
	}
}

// A value that exceeds the device's longest write arrives in parts.
func TestLongWrites(t *testing.T) {
	p := newPair(t, nil)
	p.both()
	peer := (*p.worker.tables.peers.Load())[serverID]
	p.until("connection", func() bool {
		peer.mu.Lock()
		defer peer.mu.Unlock()
		if peer.link != nil {
			peer.link.queue.Longest = 64 << 10
		}
		return peer.link != nil
	})
	vals := bytes.Repeat([]byte("0123456789"), 12<<10)
	for i, n := range []int{64 << 10, 64<<10 + 1, len(vals)} {
		if err := p.worker.Send(tensor(serverID, i, 1, true, true, vals[:n])); err != nil {
			t.Fatal(err)
		}
		m := p.next(p.atServer)
		if !bytes.Equal(m.Vals.Host(), vals[:n]) {
			t.Errorf("%d bytes came changed", n)
		}
		m.Release()
	}
}
