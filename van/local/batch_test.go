package local

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// batch makes a request to node to: a push of each value, under keys from 0 on.
func batch(to, ts int, vals ...[]byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Request, m.Push, m.AppID, m.CustomerID = to, int32(ts), true, true, 0, 0
	for i, v := range vals {
		p := van.Part{Key: uint64(i), Push: true, Len: len(v), Device: backend.Host, Dtype: 1, Dim: 1, Vals: backend.Bytes(v)}
		p.Shape[0] = int64(len(v))
		m.Parts = append(m.Parts, p)
	}
	m.WriteDirectory()
	return m
}

// values are one for each length.
func values(seed int, lens ...int) (all [][]byte) {
	for i, n := range lens {
		all = append(all, pattern(seed+i, n))
	}
	return all
}

// same reports whether m is a batch with these values.
func same(m *van.Message, vals [][]byte) error {
	if len(m.Parts) != len(vals) {
		return fmt.Errorf("%d parts, want %d", len(m.Parts), len(vals))
	}
	for i := range m.Parts {
		if got := m.Parts[i].Vals; !bytes.Equal(got.Host(), vals[i]) {
			return fmt.Errorf("part %d has %d bytes, want %d, or other values", i, got.Len(), len(vals[i]))
		}
	}
	return nil
}

// TestLongDirectory: a batch whose directory is longer than a record arrives, however little room the ring has when it is sent.
func TestLongDirectory(t *testing.T) {
	var lens []int
	for range 1500 {
		lens = append(lens, 1)
	}
	lens = append(lens, 100_000, 5, 200_000)
	vals := values(7, lens...)
	for _, mode := range readModes {
		for _, free := range []int{2 * recordHead, recordHead + chunkHead, 40 << 10, 100 << 10, 160 << 10} {
			t.Run(fmt.Sprintf("%s/%d", mode.name, free), func(t *testing.T) {
				worker, server := unread(t, nil, mode.set)
				l, before := worker.peers.link(8), 0
				for l.space() > free { // each message before the batch takes a record
					n := min(l.space()-free, 32<<10) &^ (recordAlign - 1)
					worker.must(data(8, before, make([]byte, max(n-1024, 0))))
					before++
					if n < 1024 {
						break
					}
				}
				worker.must(batch(8, before, vals...))
				server.start()
				for i := range before {
					m := server.next()
					if int(m.Timestamp) != i {
						t.Fatalf("message %d came when %d was due", m.Timestamp, i)
					}
					m.Release()
				}
				m := server.next()
				if err := same(m, vals); err != nil {
					t.Error(err)
				}
				m.Release()
				eventually(t, "everything pinned is given back", func() bool { return worker.Stats().LentValues == 0 })
			})
		}
	}
}
