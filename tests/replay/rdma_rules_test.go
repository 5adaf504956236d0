package replay

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestCPPOneRequestAtATime: a second request of a key waits for the first one's answer,
// and others wait behind it. Tensors that have moved are sent from where they are now.
func TestCPPOneRequestAtATime(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Worker, workerID)
	p := ours.with(net, van.Server, serverID)
	for i := range byte(3) {
		must(t, ours.Send(pushMsg(int32(i), 7, filledWith(5000, i))))
	}
	must(t, ours.Send(pushMsg(3, 8, filledWith(64, 3))))
	for i := range byte(3) {
		m := arrives(t, p, int32(i), filledWith(5000, i))
		if i < 2 {
			ours.passed(p, 100)
		}
		p.answer(m, nil)
		if a := ours.next(); a.Request || !a.Push || a.Timestamp != int32(i) || a.sender != serverID {
			t.Fatalf("the answer is %s from %d", a.String(), a.sender)
		}
	}
	arrives(t, p, 3, filledWith(64, 3))
	if p.starts != 2+2 {
		t.Errorf("%d rendezvous, want 4: two keys, two heartbeats", p.starts)
	}

	into := filledWith(60, 0)
	for i := range byte(3) {
		must(t, ours.Send(pullMsg(int32(10+i), 9, into)))
		m := arrives(t, p, int32(10+i), nil)
		p.answer(m, filledWith(60, 40+i))
		if a := ours.next(); a.Request || a.Push || !a.placed || !bytes.Equal(a.vals, filledWith(60, 40+i)) || !bytes.Equal(into, a.vals) {
			t.Fatalf("the answer is %s, placed %t, %x", a.String(), a.placed, a.vals)
		}
	}
}

// TestCPPRevoked: memory that was given back stays open for the late answer: the peer
// would end its process over a refusal.
func TestCPPRevoked(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Worker, workerID)
	p := ours.with(net, van.Server, serverID)
	for i := range byte(3) {
		into := filledWith(6000, 0)
		must(t, ours.Send(pullMsg(int32(i), 9, into)))
		m := arrives(t, p, int32(i), nil)
		ours.Van.(van.Invalidator).Invalidate(backend.Bytes(into))
		p.answer(m, filledWith(6000, 40+i)) // fails the test when it does not complete
		if a := ours.next(); a.Request || a.Push {
			t.Fatalf("the answer is %s", a.String())
		}
		ours.passed(p, int32(100+i))
	}
}

// TestCPPConnectAgain: the scheduler's table names a peer that this node has connected to
// again by itself. A node of the original never hears a second connection under the same
// name.
func TestCPPConnectAgain(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Server, serverID)
	p := ours.with(net, van.Worker, workerID)
	ours.watched(true)
	p.die()
	net.KillTelling(p.stack)
	p.close()
	p = newCPP(t, net, theirsAt, van.Worker, workerID)
	t.Cleanup(p.die)
	ours.watched(false)
	ours.watched(true)
	ours.passed(p, 1)
	must(t, ours.Connect(t.Context(), workerID, p.node()))
	ours.passed(p, 2)
}

// TestCPPGrown: a message larger than the peer's buffer is refused, with the sizes, before the peer
// ends its process over it.
func TestCPPGrown(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Worker, workerID)
	p := ours.with(net, van.Server, serverID)
	ts := int32(0)
	push := func(key uint64, n int) {
		t.Helper()
		ts++
		must(t, ours.Send(pushMsg(ts, key, filledWith(n, byte(ts)))))
		p.answer(arrives(t, p, ts, filledWith(n, byte(ts))), nil)
		ours.next()
	}
	pull := func(key uint64, n int) {
		t.Helper()
		ts++
		must(t, ours.Send(pullMsg(ts, key, make([]byte, n))))
		p.answer(arrives(t, p, ts, nil), filledWith(n, byte(ts)))
		if a := ours.next(); !bytes.Equal(a.vals, filledWith(n, byte(ts))) {
			t.Fatalf("pulled %x", a.vals)
		}
	}
	refused := func(key uint64, n, have int) {
		t.Helper()
		ts++
		err := ours.Send(pushMsg(ts, key, filledWith(n, 1)))
		for _, want := range []string{fmt.Sprintf("key %d", key), fmt.Sprint(n), fmt.Sprint(have), "server 0"} {
			if !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), want) {
				t.Fatalf("%d bytes under key %d: %v, want an error with %q", n, key, err, want)
			}
		}
		ours.passed(p, ts)
	}
	push(7, 6400)
	refused(7, 12800, 6400)
	push(7, 6400)
	push(7, 32) // less is no problem
	push(7, 6400)
	pull(7, 12800) // nor is a pull, whose value is not put there
	pull(7, 25600)
	refused(7, 6401, 6400)
	pull(9, 60)
	pull(9, 120)
	refused(9, 61, 60)
	push(9, 60)
}

// TestCPPEarly: messages queued before there is a connection are subject to the same rules then.
// Requests that cannot be sent fail as those of a lost peer do.
func TestCPPEarly(t *testing.T) {
	for _, tc := range []struct {
		name string
		bad  *van.Message
	}{
		{"grown push", pushMsg(1, 7, make([]byte, 128))},
		{"grown after a pull", pushMsg(1, 8, make([]byte, 128))},
		{"no value", pushMsg(1, 9, nil)},
		{"nowhere to answer to", &van.Message{Meta: dataMeta(false, 1, 9, 64), Receiver: serverID, Frames: 2, Keys: keyFrame(9)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			net := rulesNet(t)
			ours := newOurs(t, net, van.Worker, workerID)
			p := newCPP(t, net, theirsAt, van.Server, serverID)
			node := p.node()
			p.close()
			must(t, ours.Connect(t.Context(), serverID, node))
			must(t, ours.Send(pushMsg(0, 7, filledWith(64, 1))))
			must(t, ours.Send(pullMsg(2, 8, make([]byte, 64))))
			must(t, ours.Send(tc.bad))
			must(t, ours.Send(pushMsg(3, 10, filledWith(64, 2))))
			p = newCPP(t, net, theirsAt, van.Server, serverID)
			p.connect(workerID, ours.addr)
			t.Cleanup(p.die)
			p.answer(arrives(t, p, 0, filledWith(64, 1)), nil)
			p.answer(arrives(t, p, 2, nil), make([]byte, 64))
			p.answer(arrives(t, p, 3, filledWith(64, 2)), nil)
			ours.watched(true)
			ours.watched(false) // the requests that wait fail,
			ours.watched(true)  // and on it goes
			must(t, ours.Send(pushMsg(4, 10, filledWith(64, 3))))
			arrives(t, p, 4, filledWith(64, 3))
		})
	}
}

// TestCPPInexpressible: messages that the original's form over RDMA has no room for are
// refused, and others go on.
func TestCPPInexpressible(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Worker, workerID)
	p := ours.with(net, van.Server, serverID)
	must(t, ours.Send(pushMsg(0, 7, filledWith(64, 1))))
	p.answer(arrives(t, p, 0, filledWith(64, 1)), nil)
	into := make([]byte, 64)
	for i, tc := range []struct {
		name   string
		change func(*van.Message)
		pull   bool
	}{
		{"two keys", func(m *van.Message) { m.Keys = backend.Bytes(make([]byte, 16)) }, false},
		{"no value", func(m *van.Message) { m.Vals, m.ValLen = backend.Mem{}, 0 }, false},
		{"val_len counts elements", func(m *van.Message) { m.ValLen = 16 }, false},
		{"a key that is not the meta's", func(m *van.Message) { m.Key = 8 }, false},
		{"lengths that are not val_len", func(m *van.Message) {
			m.Frames, m.Lens = 3, backend.Bytes([]byte{1, 0, 0, 0})
			m.DataTypes = append(m.DataTypes, van.TypeInt32)
		}, false},
		{"a pull of nothing", func(m *van.Message) { m.Into, m.ValLen = backend.Mem{}, 0 }, true},
		{"a pull to nowhere", func(m *van.Message) { m.Into = backend.Mem{} }, true},
		{"a pull to elsewhere", func(m *van.Message) { m.Addr += 8 }, true},
		{"a pull to less", func(m *van.Message) { m.Into = backend.Bytes(into[:32]) }, true},
		{"an answer to nowhere", func(m *van.Message) { m.Request, m.Push = false, false }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ts := int32(2 * i)
			m := pushMsg(ts, 7, filledWith(64, 9))
			if tc.pull {
				m = pullMsg(ts, 7, into)
			}
			tc.change(m)
			if err := ours.Send(m); !errors.Is(err, van.ErrInvalid) {
				t.Fatalf("sent with %v, want ErrInvalid", err)
			}
			must(t, ours.Send(pushMsg(ts+1, 7, filledWith(64, byte(i)))))
			p.answer(arrives(t, p, ts+1, filledWith(64, byte(i))), nil)
		})
	}
}

// TestCPPNoMemory: a message that the device refuses is lost, but not its key.
func TestCPPNoMemory(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Worker, workerID)
	p := ours.with(net, van.Server, serverID)
	must(t, ours.Send(pushMsg(0, 7, filledWith(5000, 1))))
	p.answer(arrives(t, p, 0, filledWith(5000, 1)), nil)
	ours.next()
	net.Fail(func(o fakeverbs.Op) error {
		if o.Kind == fakeverbs.OpRegister && o.Stack == ours.stack {
			return syscall.ENOMEM
		}
		return nil
	})
	must(t, ours.Send(pushMsg(1, 7, filledWith(5000, 2))))
	net.Fail(nil)
	must(t, ours.Send(pushMsg(2, 7, filledWith(5000, 3))))
	arrives(t, p, 2, filledWith(5000, 3))
}

// TestCPPOrder: messages arrive in the order in which they were sent, those with known
// keys among those with new ones.
func TestCPPOrder(t *testing.T) {
	t.Run("worker", func(t *testing.T) {
		net := rulesNet(t)
		ours := newOurs(t, net, van.Worker, workerID)
		p := ours.with(net, van.Server, serverID)
		ts := int32(0)
		into := make([]byte, 64)
		for round := range uint64(20) {
			first := ts
			// In each round all keys of the earlier ones, and new ones among them.
			for key := range round + 1 {
				must(t, ours.Send(pushMsg(ts, 100+2*(round-key), filledWith(64, byte(ts)))))
				must(t, ours.Send(pullMsg(ts+1, 101+2*key, into)))
				ts += 2
			}
			for ; first < ts; first += 2 {
				p.answer(arrives(t, p, first, filledWith(64, byte(first))), nil)
				p.answer(arrives(t, p, first+1, nil), into)
				ours.next()
				ours.next()
			}
		}
	})
	t.Run("server", func(t *testing.T) {
		net := rulesNet(t)
		ours := newOurs(t, net, van.Server, serverID)
		p := ours.with(net, van.Worker, workerID)
		ts := int32(0)
		for round := range uint64(20) {
			first := ts
			var tensors [][]byte
			for key := range round + 1 {
				into, push := make([]byte, 64), dataMeta(true, ts, 100+2*key, 64)
				tensors = append(tensors, into)
				p.send(serverID, packedMeta(t, &push), nil, le.AppendUint64(nil, push.Key), filledWith(64, 1))
				pull := dataMeta(false, ts+1, 101+2*(round-key), 64)
				p.send(serverID, packedMeta(t, &pull), into, le.AppendUint64(nil, pull.Key), into)
				ts += 2
			}
			got := map[int32]*received{}
			for range 2 * (round + 1) { // the original's order, which is not that of sending
				m := ours.next()
				got[m.Timestamp] = m
			}
			for at := first; at < ts; at++ {
				must(t, ours.Send(ourAnswer(got[at], filledWith(64, byte(at)))))
			}
			for at := first; at < ts; at += 2 {
				arrives(t, p, at, nil)
				arrives(t, p, at+1, filledWith(64, byte(at+1)))
				if into := tensors[(at-first)/2]; !bytes.Equal(into, filledWith(64, byte(at+1))) {
					t.Fatalf("the tensor of timestamp %d is %x", at+1, into)
				}
			}
		}
	})
}

// ourAnswer is our node's answer to a worker's request.
func ourAnswer(r *received, value []byte) *van.Message {
	a := &van.Message{Meta: *answerTo(&r.Meta), Receiver: r.sender}
	if !a.Push {
		a.Frames, a.Keys, a.Vals = 2, keyFrame(a.Key), backend.Bytes(value)
	}
	return a
}

// TestCPPWorkerReuses: a worker of the original's uses one buffer of each key again and
// again, there and here, and pulls of a key may grow.
func TestCPPWorkerReuses(t *testing.T) {
	for _, split := range []bool{false, true} {
		t.Run(fmt.Sprintf("split %t", split), func(t *testing.T) {
			net := rulesNet(t)
			ours := newOurs(t, net, van.Server, serverID, func(c *env.Config) { c.SplitQPLag = split })
			registered := make([]byte, 10001)
			must(t, ours.Van.(van.BufferRegistrar).RegisterRecvBuffer(workerID, 2, backend.Bytes(registered)))
			p := ours.with(net, van.Worker, workerID, func(p *cppNode) { p.split = split })
			tensors := map[uint64][]byte{1: make([]byte, 10001), 2: make([]byte, 10001), 3: make([]byte, 40000)}
			held := 0
			for round := range 300 {
				for key := uint64(1); key <= 2; key++ {
					value := tensors[key]
					for i := range value {
						value[i] = byte(round + i + int(key))
					}
					m := dataMeta(true, int32(4*round)+int32(key), key, len(value))
					p.send(serverID, packedMeta(t, &m), nil, le.AppendUint64(nil, key), value)
					r := ours.next()
					if !r.Push || r.Key != key || r.sender != workerID || !bytes.Equal(r.vals, value) || r.placed != (key == 2) {
						t.Fatalf("round %d: got %s, placed %t, %.16x, want %.16x", round, r.String(), r.placed, r.vals, value)
					}
					must(t, ours.Send(ourAnswer(r, nil)))
					arrives(t, p, m.Timestamp, nil)
				}
				n := 30000 + 30*round
				m := dataMeta(false, int32(4*round)+3, 3, n)
				p.send(serverID, packedMeta(t, &m), tensors[3][:n], le.AppendUint64(nil, 3), tensors[3][:n])
				must(t, ours.Send(ourAnswer(ours.next(), filledWith(n, byte(round)))))
				arrives(t, p, m.Timestamp, filledWith(n, byte(round)))
				if round == 10 {
					held = ours.stack.Registered()
				}
			}
			if p.starts != 3 {
				t.Errorf("our node has asked for %d places, want 3", p.starts)
			}
			// Sent answers that the cache of regions keeps do not count.
			if now := ours.stack.Registered(); now > held+400*40000 {
				t.Errorf("%d bytes are registered, there were %d after 10 rounds", now, held)
			}
		})
	}
}

// TestCPPControl: places of control messages come back, though the original asks for a
// new one for each and has 10240 of them.
func TestCPPControl(t *testing.T) {
	net := rulesNet(t)
	ours := newOurs(t, net, van.Server, serverID)
	p := ours.with(net, van.Worker, workerID)
	const all, each = 20000, 100
	held := 0
	for i := 0; i < all; i += each {
		for k := range int32(each) {
			m := controlMeta(int32(i) + k)
			if k%10 == 3 {
				m = van.Meta{SimpleApp: true, Request: true, Timestamp: m.Timestamp, Body: []byte("hello")}
			}
			p.send(serverID, packedMeta(t, &m), nil)
		}
		for k := range int32(each) {
			if m := ours.next(); m.Timestamp != int32(i)+k || m.SimpleApp != (k%10 == 3) || m.SimpleApp && string(m.Body) != "hello" {
				t.Fatalf("message %d is %s", i+int(k), m.String())
			}
		}
		switch now := ours.stack.Registered(); {
		case i == 2*each:
			held = now
		case i > 2*each && now > held+1<<20: // 20,000 places would be 10 MiB
			t.Fatalf("after %d messages %d bytes are registered, there were %d", i, now, held)
		}
	}
	// Places of data are still given.
	m := dataMeta(true, 1, 7, 64)
	p.send(serverID, packedMeta(t, &m), nil, le.AppendUint64(nil, 7), filledWith(64, 1))
	if r := ours.next(); !bytes.Equal(r.vals, filledWith(64, 1)) {
		t.Errorf("got %s", r.String())
	}
}

// TestCPPQueuePairs: the queue pairs of a node of the original's connect in any order, and
// their writes arrive in any order.
func TestCPPQueuePairs(t *testing.T) {
	for _, swapped := range []bool{false, true} {
		t.Run(fmt.Sprintf("swapped %t", swapped), func(t *testing.T) {
			net := rulesNet(t)
			ours := newOurs(t, net, van.Server, serverID)
			p := ours.with(net, van.Worker, workerID, func(p *cppNode) { p.swapped, p.split = swapped, true })
			value := make([]byte, 10001)
			m := dataMeta(true, 0, 7, len(value))
			x, into := dataMeta(false, 100, 8, 64), make([]byte, 64) // the message after it
			pull := func() { p.send(serverID, packedMeta(t, &x), into, le.AppendUint64(nil, 8), into) }
			pulled := func(r *received, round byte) {
				if r.Timestamp != 100 {
					t.Fatalf("round %d: got %s, want what was sent behind", round, r.String())
				}
				must(t, ours.Send(ourAnswer(r, filledWith(64, round))))
				arrives(t, p, 100, filledWith(64, round))
			}
			pull() // it has a place from now on, and need not ask
			pulled(ours.next(), 0)
			for round := range byte(30) {
				for i := range value {
					value[i] = round + byte(i)
				}
				m.Timestamp = int32(round)
				late := int(round % 3) // 2: neither
				controls := 0          // these keep an order among themselves only
				if round > 0 && late < 2 {
					net.HoldQP(p.active[serverID].qps[late].Num())
				}
				p.send(serverID, packedMeta(t, &m), nil, le.AppendUint64(nil, 7), value)
				if round > 0 && late < 2 {
					if late == 1 {
						pull()
						// Our node answers a question when it has seen all that came before it.
						c := controlMeta(101)
						p.send(serverID, packedMeta(t, &c), nil)
						p.settled()
					}
					for early := true; early; {
						select {
						case r := <-ours.got:
							if !r.IsControl() {
								t.Fatalf("round %d: %s was handed up though a part of it is missing", round, r.String())
							}
							controls++
						default:
							early = false
						}
					}
					net.Release()
				}
				data := func() *received {
					r := ours.next()
					for ; r.IsControl(); r = ours.next() {
						controls++
					}
					return r
				}
				r := data()
				if r.Timestamp != int32(round) || !bytes.Equal(r.vals, value) {
					t.Fatalf("round %d: got %s", round, r.String())
				}
				must(t, ours.Send(ourAnswer(r, nil)))
				arrives(t, p, int32(round), nil)
				if round > 0 && late == 1 {
					pulled(data(), round)
					if controls == 0 && ours.next().Timestamp != 101 {
						t.Fatalf("round %d: the control message has not come", round)
					}
				}
			}
		})
	}
}

// TestCPPReconnect: a node of the original's that comes again under the same name takes
// the place of the one that was there, whether its end was noticed or not.
func TestCPPReconnect(t *testing.T) {
	for _, told := range []bool{true, false} {
		t.Run(fmt.Sprintf("told %t", told), func(t *testing.T) {
			net := rulesNet(t)
			ours := newOurs(t, net, van.Server, serverID)
			p := ours.with(net, van.Worker, workerID)
			ours.watched(true)
			m := dataMeta(true, 0, 7, 64)
			held := 0
			for round := range 5 {
				m.Timestamp = int32(round)
				p.send(serverID, packedMeta(t, &m), nil, le.AppendUint64(nil, 7), filledWith(64, byte(round)))
				r := ours.next()
				if r.Timestamp != m.Timestamp || !bytes.Equal(r.vals, filledWith(64, byte(round))) {
					t.Fatalf("round %d: got %s", round, r.String())
				}
				must(t, ours.Send(ourAnswer(r, nil)))
				arrives(t, p, m.Timestamp, nil)
				if round == 1 {
					held = ours.stack.Registered()
				}
				p.die()
				if told {
					net.KillTelling(p.stack)
				} else {
					net.Kill(p.stack)
				}
				p.close()
				p = newCPP(t, net, theirsAt, van.Worker, workerID)
				t.Cleanup(p.die)
				if told {
					ours.watched(false)
					ours.watched(true)
				} else { // the scheduler's table makes our node connect
					must(t, ours.Connect(t.Context(), workerID, p.node()))
				}
				p.connect(serverID, ours.addr)
			}
			ours.passed(p, 50)
			if now := ours.stack.Registered(); now > 2*held {
				t.Errorf("%d bytes are registered, with one worker there were %d", now, held)
			}
		})
	}
}
