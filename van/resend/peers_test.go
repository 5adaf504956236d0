package resend

// Peers that are lost, renamed or connected again.

import (
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

func TestLostPeer(t *testing.T) {
	closed := errors.New("its connection was closed") // as the transports report it
	for _, cause := range []error{nil, closed, fmt.Errorf("%w: %w", van.ErrPeerLost, closed)} {
		t.Run(fmt.Sprint(cause), func(t *testing.T) { synctest.Test(t, func(t *testing.T) { losePeer(t, cause) }) })
	}
}

func losePeer(t *testing.T, cause error) {
	f := newFixture(t, Options{Timeout: time.Second})
	dones := &counter{}
	for _, peer := range []int{8, 8, 10} {
		m := request(peer, 5) // the two messages to 8 have the same signature
		m.Done = dones
		if err := f.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	// The peer does not listen yet: no message has been lost.
	f.p.watch(8, false, fmt.Errorf("connect: %w", syscall.ECONNREFUSED))
	if len(f.failed()) != 0 || f.kept.count != 3 || dones.Load() != 0 {
		t.Fatalf("a refused attempt to connect: %d failures, %d kept, Done %d times; want 0, 3, 0", len(f.failed()), f.kept.count, dones.Load())
	}
	f.p.watch(8, false, cause)
	if len(f.failed()) != 2 || f.kept.count != 1 || dones.Load() != 2 {
		t.Fatalf("%d failures, %d kept, Done %d times; want 2, 1, 2", len(f.failed()), f.kept.count, dones.Load())
	}
	for _, x := range f.failed() {
		if x.Peer != 8 || !errors.Is(x.Err, van.ErrPeerLost) || cause != nil && !errors.Is(x.Err, cause) {
			t.Errorf("failure of %d: %v, want of 8: %v", x.Peer, x.Err, van.ErrPeerLost)
		}
	}
	f.Disconnect(10)
	if len(f.failed()) != 2 || f.kept.count != 0 || dones.Load() != 3 {
		t.Errorf("after Disconnect: %d failures, %d kept, Done %d times; want 2, 0, 3", len(f.failed()), f.kept.count, dones.Load())
	}
}

// TestNoLongerUnresponsive: a message to a peer has timed out, and then the peer is lost, disconnected or replaced. A later message with its id does
// not make this van report the peer as up. Only the transport or the node may report that.
func TestNoLongerUnresponsive(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, f *fixture){
		"lost":         func(_ *testing.T, f *fixture) { f.p.watch(8, false, van.ErrPeerLost) },
		"disconnected": func(_ *testing.T, f *fixture) { f.Disconnect(8) },
		"replaced": func(t *testing.T, f *fixture) {
			if err := f.Connect(t.Context(), 8, van.Node{Hostname: "b", Port: 1}); err != nil {
				t.Fatal(err)
			}
		},
		"in the place of another": func(t *testing.T, f *fixture) {
			if err := f.Rename(-2, 8); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
				for _, id := range []int{8, -2} {
					if err := f.Connect(t.Context(), id, van.Node{Hostname: "a", Port: 1}); err != nil {
						t.Fatal(err)
					}
				}
				var up atomic.Int32
				f.WatchPeers(func(_ int, is bool, _ error) {
					if is {
						up.Add(1)
					}
				})
				if err := f.Send(request(8, 1)); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2500 * time.Millisecond)
				synctest.Wait()
				if len(f.failed()) != 1 {
					t.Fatalf("%d messages have failed, want 1", len(f.failed()))
				}
				end(t, f)
				f.p.recv(from(8, request(9, 1)))
				if n := up.Load(); n != 0 {
					t.Errorf("the peer is reported as up %d times", n)
				}
			})
		})
	}
}

// TestRenamedPeer: when a peer gets another id, messages that were kept for the peer, and for the former holder of that id, are released and not sent
// again. No failure is reported.
func TestRenamedPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		for _, id := range []int{8, 10} {
			if err := f.Connect(t.Context(), id, van.Node{Hostname: "a", Port: id}); err != nil {
				t.Fatal(err)
			}
		}
		done := &counter{}
		for _, id := range []int{8, 10, 10} {
			m := request(id, 1)
			m.Done = done
			if err := f.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		f.p.take()
		if err := f.Rename(10, 8); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(f.p.take()); n != 0 || done.Load() != 3 || f.kept.count != 0 || len(f.failed()) != 0 {
			t.Errorf("%d messages were sent again, %d given back, %d are kept, %d have failed; want 0, 3, 0, 0", n, done.Load(), f.kept.count, len(f.failed()))
		}
		if f.kept.conns[8] != "a:10" || len(f.kept.conns) != 1 {
			t.Errorf("the peers are %v, want 8 at a:10", f.kept.conns)
		}
	})
}

// TestConnectedAgain: if a peer is connected again at the same address, kept messages are sent again and acknowledged there. If it is connected
// at another address, they fail.
func TestConnectedAgain(t *testing.T) {
	for addr, lost := range map[string]bool{"a": false, "b": true} {
		t.Run(addr, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Options{Timeout: time.Second})
				connect := func(host string, incarnation uint32) {
					t.Helper()
					if err := f.Connect(t.Context(), 8, van.Node{Hostname: host, Port: 1, Endpoint: (&van.NodeExtension{Incarnation: incarnation}).Encode()}); err != nil {
						t.Fatal(err)
					}
				}
				connect("a", 1)
				if err := f.Send(request(8, 5)); err != nil {
					t.Fatal(err)
				}
				sent := f.p.take()
				connect(addr, 2)
				if n := len(f.failed()); (n == 1) != lost || (f.kept.count == 0) != lost {
					t.Fatalf("%d messages failed, %d are kept; want them to fail: %t", n, f.kept.count, lost)
				}
				if lost {
					vantest.Fails(t, f.failed()[0].Err, van.ErrPeerLost, "at a:1", "replaced by b:1")
					return
				}
				time.Sleep(1500 * time.Millisecond)
				synctest.Wait()
				again := f.p.take()
				if len(again) != 1 || again[0].meta.Timestamp != 5 {
					t.Fatalf("%d messages were sent again, want the one", len(again))
				}
				f.p.recv(ack(8, signature(&sent[0].meta, 9, 8)))
				if f.kept.count != 0 || len(f.failed()) != 0 {
					t.Errorf("%d are kept, %d have failed after the acknowledgement", f.kept.count, len(f.failed()))
				}
			})
		})
	}
}
