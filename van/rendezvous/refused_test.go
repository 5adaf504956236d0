package rendezvous

import "testing"

// refusing is a model whose receiver has memory for a few slots only.
func refusing(t *testing.T, places int) (m *model, submit func(key uint64, data int) *item) {
	m = newModel(t, 1, false)
	m.connect()
	m.memory = places
	n := 0
	return m, func(key uint64, data int) *item {
		n++
		o := &item{seq: n, key: key, request: true, push: true, meta: 300, data: data}
		m.submit(o)
		return o
	}
}

// A burst that needs more slots than there is memory for uses the existing slots.
func TestRefusedBurst(t *testing.T) {
	m, submit := refusing(t, 2)
	for i := range 40 {
		submit(uint64(i%2), 1000)
	}
	m.settle()
	for m.step() {
	}
	if m.arrived != 40 {
		t.Errorf("%d of 40 have arrived", m.arrived)
	}
	if m.refusals > 40 { // each message has asked once at most
		t.Errorf("%d slot requests were refused", m.refusals)
	}
}

// A key without a slot of its own uses the slots of its size class.
func TestRefusedKey(t *testing.T) {
	m, submit := refusing(t, 1)
	submit(1, 1000)
	m.settle()
	submit(2, 1000)
	m.settle()
	if m.arrived != 2 {
		t.Errorf("%d of 2 have arrived", m.arrived)
	}
}

// If no slot is large enough, the message is dropped, and the messages behind it are sent.
func TestRefusedWithoutPlace(t *testing.T) {
	m, submit := refusing(t, 1)
	submit(1, 1000)
	m.settle()
	large := submit(1, 2000)
	submit(1, 1000)
	m.settle()
	if large.done != "dropped" || m.arrived != 2 {
		t.Errorf("the large one is %q, %d have arrived, want 2", large.done, m.arrived)
	}
}

// After memory has become free, slots are requested again, even if no slot is given back.
func TestRefusedAgain(t *testing.T) {
	m, submit := refusing(t, 1)
	m.credits = false
	submit(1, 1000)
	m.settle()
	submit(1, 1000)
	for m.step() {
	}
	m.memory = 2
	for range 10 * refusedCooldown {
		m.tick()
		for m.step() {
		}
	}
	if m.arrived != 2 {
		t.Errorf("%d of 2 have arrived", m.arrived)
	}
	if m.refusals > 2 {
		t.Errorf("%d slot requests were refused", m.refusals)
	}
}
