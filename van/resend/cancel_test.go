package resend

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// TestCancel: canceled requests are not sent again, or for the first time, OnFail is not called,
// and their memory is released. Other requests with the same signature are
// not affected.
func TestCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second, MaxTries: 3})
		if err := f.Connect(t.Context(), 8, van.Node{Hostname: "h", Port: 1}); err != nil {
			t.Fatal(err)
		}
		var done counter
		send := func(ts, customer int) {
			m := request(8, ts)
			m.CustomerID, m.Done = int32(customer), &done
			if err := f.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		// Of signature 5: sent, not sent, not sent.
		for _, customer := range []int{1, 0, 0} {
			send(5, customer)
		}
		for _, customer := range []int{0, 1} {
			send(6, customer)
		}
		send(7, 0)
		if s := f.p.take(); len(s) != 3 {
			t.Fatalf("%d messages were sent, want 3", len(s))
		}
		f.Cancel(van.Requests{First: 5, Count: 2})
		if n := done.Load(); n != 3 {
			t.Errorf("%d messages were given back, want 3", n)
		}
		if s := f.p.take(); len(s) != 1 || s[0].meta.Timestamp != 6 || s[0].meta.CustomerID != 1 {
			t.Errorf("sent: %v, want the other customer's, which has waited", s)
		}
		time.Sleep(1500 * time.Millisecond)
		for _, s := range f.p.take() {
			if m := s.meta; m.CustomerID == 0 && m.Timestamp != 7 {
				t.Errorf("%s was sent after it was given up", &m)
			}
		}
		for _, ts := range []int{5, 6, 7} {
			f.p.recv(ack(8, signature(&request(8, ts).Meta, 9, 8)))
		}
		if f.kept.count != 0 || len(f.kept.byKey) != 0 || f.kept.first != nil || done.Load() != 6 {
			t.Errorf("%d messages are kept after their acknowledgement, %d were given back", f.kept.count, done.Load())
		}
		time.Sleep(10 * time.Second)
		if x := f.failed(); len(x) != 0 {
			t.Errorf("failures: %v", x)
		}
	})
}

// onRepeat is a log that calls f when a message is about to be sent again.
type onRepeat struct {
	slog.Handler
	f func()
}

func (onRepeat) Enabled(context.Context, slog.Level) bool { return true }

func (h onRepeat) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "not acknowledged, sending again" {
		h.f()
	}
	return nil
}

// TestCancelDuringRetry: a request ends, and its memory is the caller's again, while one of its messages is about
// to be sent again, which an acknowledgement or the loss of the peer has just removed.
func TestCancelDuringRetry(t *testing.T) {
	for name, end := range map[string]func(f *fixture, m *van.Message){
		"acknowledged": func(f *fixture, m *van.Message) { f.p.recv(ack(8, signature(&m.Meta, 9, 8))) },
		"peer lost":    func(f *fixture, _ *van.Message) { f.p.watch(8, false, errors.New("its connection broke")) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var f *fixture
				var done counter
				m := request(8, 5)
				m.Done = &done
				ended := 0
				f = newFixture(t, Options{Timeout: time.Second, MaxTries: 3, Log: slog.New(onRepeat{f: func() {
					end(f, m)
					f.Cancel(van.Requests{First: 5, Count: 1})
					ended++
				}})})
				if err := f.Connect(t.Context(), 8, van.Node{Hostname: "h", Port: 1}); err != nil {
					t.Fatal(err)
				}
				if err := f.Send(m); err != nil {
					t.Fatal(err)
				}
				f.p.take()
				time.Sleep(2500 * time.Millisecond) // of the bubble's time: two timeouts
				for _, s := range f.p.take() {
					if s.meta.Control.Cmd == van.EmptyCmd {
						t.Errorf("%s was sent after its request had ended", &s.meta)
					}
				}
				f.kept.mu.Lock()
				defer f.kept.mu.Unlock()
				if ended != 1 || done.Load() != 1 || len(f.kept.sending) != 0 {
					t.Errorf("the request ended %d times, its memory was given back %d times, %d messages are being sent, want 1, 1 and 0",
						ended, done.Load(), len(f.kept.sending))
				}
			})
		})
	}
}

// leaving is a van that calls f when a peer is about to be disconnected.
type leaving struct {
	van.Van
	f func()
}

func (l *leaving) Disconnect(id int) {
	l.f()
	l.Van.Disconnect(id)
}

// TestCancelDuringDisconnect: a message that is sent while its peer is being disconnected, and canceled then, is
// not sent when the peer is connected again.
func TestCancelDuringDisconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second, MaxTries: 3})
		connect := func() {
			if err := f.Connect(t.Context(), 8, van.Node{Hostname: "h", Port: 1}); err != nil {
				t.Fatal(err)
			}
		}
		connect()
		var done counter
		m := request(8, 5)
		m.Done = &done
		f.inner = &leaving{f.inner, func() {
			if err := f.Send(m); err != nil {
				t.Error(err)
			}
		}}
		f.Disconnect(8)
		f.p.take()
		f.Cancel(van.Requests{First: 5, Count: 1})
		if n := done.Load(); n != 1 {
			t.Errorf("the memory was given back %d times, want once", n)
		}
		connect()
		time.Sleep(10 * time.Second) // of the bubble's time: all tries
		for _, s := range f.p.take() {
			if s.meta.Control.Cmd == van.EmptyCmd {
				t.Errorf("%s was sent after its request had ended", &s.meta)
			}
		}
	})
}

// canceler records the canceled requests.
type canceler struct {
	pipe
	got []van.Requests
}

func (r *canceler) Cancel(q van.Requests) { r.got = append(r.got, q) }

// TestCancelReachesTransport: requests are also canceled in the wrapped van.
func TestCancelReachesTransport(t *testing.T) {
	r := &canceler{}
	v := New(r, Options{Timeout: time.Second, Log: slog.New(slog.DiscardHandler)})
	v.Start(func(*van.Message) {})
	defer func() {
		if err := v.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	want := van.Requests{First: 5, Count: 2, Customer: 1}
	v.Cancel(want)
	if len(r.got) != 1 || r.got[0] != want {
		t.Errorf("the transport was told %v, want %v", r.got, want)
	}
}
