package rdma

import (
	"testing"
)

// Messages that have arrived, and are not delivered because of Close, are released.
func TestStopReleasesWhatHasCome(t *testing.T) {
	p := newPair(t, nil)
	p.connect(p.worker, serverID, p.server)
	p.until("device", func() bool { return len(*p.worker.tables.devices.Load()) > 0 })
	d := newDevice(p.worker, (*p.worker.tables.devices.Load())[0].dev)
	for range 3 {
		d.ready.Put(d.pool.get())
	}
	d.stop()
	if n, free := d.ready.Len(), len(d.pool.free); n != 0 || free != 3 {
		t.Errorf("%d messages are in hand and %d have been released, want 0 and 3", n, free)
	}
}
