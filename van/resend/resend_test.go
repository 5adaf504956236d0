package resend

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// pipe is an inner van that records sent messages and can deliver messages.
type pipe struct {
	van.Van // nil: a call that a test does not expect panics

	mu    sync.Mutex
	sent  []sentMessage
	fail  error
	recv  van.Receiver
	watch func(int, bool, error)
	dones []van.Completion
	hold  bool // keep the frames
}

type sentMessage struct {
	meta     van.Meta
	frames   [van.MaxFrames]string
	receiver int
	at       time.Time
}

func (p *pipe) Bind(context.Context, van.Node) (int, error)     { return 1, nil }
func (p *pipe) Start(recv van.Receiver)                         { p.recv = recv }
func (p *pipe) SetID(int)                                       {}
func (p *pipe) Connect(context.Context, int, van.Node) error    { return nil }
func (p *pipe) Disconnect(int)                                  {}
func (p *pipe) Rename(int, int) error                           { return nil }
func (p *pipe) Close(context.Context) error                     { return nil }
func (p *pipe) WatchPeers(f func(id int, up bool, cause error)) { p.watch = f }

func (p *pipe) Send(m *van.Message) error {
	p.mu.Lock()
	if p.fail != nil {
		defer p.mu.Unlock()
		return p.fail
	}
	s := sentMessage{receiver: m.Receiver, at: time.Now()}
	s.meta.CopyFrom(&m.Meta)
	for i := range m.Frames {
		s.frames[i] = string(m.Frame(i).Host())
	}
	p.sent = append(p.sent, s)
	done := m.Done
	if p.hold {
		p.dones = append(p.dones, done)
		done = nil
	}
	p.mu.Unlock()
	if done != nil {
		done.Sent()
	}
	return nil
}

func (p *pipe) take() []sentMessage {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.sent
	p.sent = nil
	return s
}

type counter struct{ atomic.Int32 }

func (c *counter) Sent() { c.Add(1) }

func request(to, ts int) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.AppID, m.CustomerID, m.Timestamp, m.Request, m.Push = 0, 0, int32(ts), true, true
	m.Receiver = to
	return m
}

func from(sender int, m *van.Message) *van.Message { m.Sender = sender; return m }

func ack(sender int, sig uint64) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Sender, m.Control.Cmd, m.Control.MsgSig = sender, van.Ack, sig
	return m
}

type fixture struct {
	*Van
	p   *pipe
	up  []van.Meta
	log bytes.Buffer

	failMu   sync.Mutex
	failures []failure
}

// failure is a call of OnFail.
type failure struct {
	Peer int
	Meta *van.Meta
	Err  error
}

func (f *fixture) failed() []failure {
	f.failMu.Lock()
	defer f.failMu.Unlock()
	return f.failures
}

func newFixture(t *testing.T, opts Options) *fixture {
	f := &fixture{p: &pipe{}}
	opts.OnFail = func(peer int, meta *van.Meta, err error) {
		f.failMu.Lock()
		defer f.failMu.Unlock()
		f.failures = append(f.failures, failure{peer, meta, err})
	}
	opts.Log = cmp.Or(opts.Log, slog.New(slog.NewTextHandler(&f.log, nil)))
	f.Van = New(f.p, opts)
	f.Start(func(m *van.Message) {
		var c van.Meta
		c.CopyFrom(&m.Meta)
		f.up = append(f.up, c)
	})
	f.SetID(9)
	f.Enable()
	t.Cleanup(func() {
		if err := f.Close(context.Background()); err != nil {
			t.Errorf("Close: %v", err)
		}
		if n := len(f.kept.sending); n != 0 {
			t.Errorf("%d messages are being sent after Close", n)
		}
	})
	return f
}

func TestSignature(t *testing.T) {
	// Cases with a command are from a session of ps-lite.
	for _, c := range []struct {
		name             string
		app, ts          int32
		request          bool
		sender, receiver int
		want             uint64
	}{
		{"push request", 0, 5, true, 9, 8, 0x000009080000000b},
		{"barrier request to itself", 0, 2, true, 1, 1, 0x0000010100000005},
		{"barrier request", 0, 1, true, 8, 1, 0x0000080100000003},
		{"barrier release", 0, 3, false, 1, 9, 0x0000010900000006},
		{"pull response", 0, 2, false, 8, 9, 0x0000080900000004},
		{"without application", van.Empty, 0, false, 8, 1, 0x7fff080100000000},
		{"long ids", 0, 0, false, 0x108, 0x209, 0x0000080900000000},
		{"sign of the timestamp", 0, -1, true, 1, 2, 0xffffffffffffffff},
		{"shift out of the timestamp", 0, 1 << 30, false, 1, 2, 0xffffffff80000000},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := van.Meta{AppID: c.app, Timestamp: c.ts, Request: c.request}
			if got := signature(&m, c.sender, c.receiver); got != c.want {
				t.Errorf("signature %016x, want %016x", got, c.want)
			}
		})
	}
}

func TestAckOnTheWire(t *testing.T) {
	f := newFixture(t, Options{})
	f.p.recv(from(8, request(9, 5)))
	sent := f.p.take()
	if len(sent) != 1 || sent[0].receiver != 8 {
		t.Fatalf("sent %v, want one message to 8", sent)
	}
	var want van.Meta
	want.Reset()
	want.Control.Cmd, want.Control.MsgSig = van.Ack, 0x000008090000000b
	got, err := sent[0].meta.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	wantBytes, err := want.AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, wantBytes) {
		t.Errorf("acknowledgement %+v, want %+v", sent[0].meta, want)
	}
}

func TestNotAcknowledgedNorKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{})
		for _, m := range []*van.Message{
			{Meta: van.Meta{Control: van.Control{Cmd: van.Terminate}, Timestamp: van.Empty}},
			{Meta: van.Meta{Control: van.Control{Cmd: van.Heartbeat}, Timestamp: van.Empty}},
		} {
			m.Sender, m.Receiver = 8, 8
			f.p.recv(m)
			if s := f.p.take(); len(s) != 0 {
				t.Errorf("%s was answered by %v", m.Control.Cmd, s)
			}
			if err := f.Send(m); err != nil {
				t.Error(err)
			}
			if f.kept.count != 0 {
				t.Errorf("%s is kept", m.Control.Cmd)
			}
			f.p.take()
		}
		f.p.recv(from(van.Empty, request(9, 1)))
		if len(f.up) != 3 {
			t.Errorf("%d messages were handed up, want 3", len(f.up))
		}
	})
}

func TestRetriesThenGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		var events []bool
		f.WatchPeers(func(id int, up bool, cause error) { events = append(events, up) })
		start := time.Now()
		done := &counter{}
		m := request(8, 5)
		m.Body = []byte("body")
		m.Done = done
		m.Frames = 3
		m.Keys, m.Vals, m.Lens = backend.Bytes([]byte("the keys")), backend.Bytes([]byte("vals")), backend.Bytes([]byte("lens"))
		if err := f.Send(m); err != nil {
			t.Fatal(err)
		}
		m.Body[0] = 'x' // the message itself is ours again, and so are short frames
		for i := range m.Frames {
			m.Frame(i).Host()[0] = 'x'
		}
		time.Sleep(9500 * time.Millisecond)
		synctest.Wait()
		sent := f.p.take()
		if len(sent) != DefaultMaxTries {
			t.Fatalf("sent %d times, want %d", len(sent), DefaultMaxTries)
		}
		for k, s := range sent {
			if at, want := s.at.Sub(start), time.Duration(k)*time.Second; at != want || string(s.meta.Body) != "body" {
				t.Errorf("try %d at %s with body %q, want at %s with the body of Send", k, at, s.meta.Body, want)
			}
			if want := [...]string{"the keys", "vals", "lens"}; s.frames != want {
				t.Errorf("try %d with frames %q, want those of Send, %q", k, s.frames, want)
			}
		}
		if done.Load() != 0 || len(f.failed()) != 0 {
			t.Errorf("before the end: Done called %d times, %d failures", done.Load(), len(f.failed()))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if len(f.failed()) != 1 {
			t.Fatalf("%d failures, want 1", len(f.failed()))
		}
		x := f.failed()[0]
		if x.Peer != 8 || x.Meta.Timestamp != 5 || !errors.Is(x.Err, van.ErrTimeout) || !strings.Contains(x.Err.Error(), "server 0 (id 8)") {
			t.Errorf("failure %d, %v, %v", x.Peer, x.Meta, x.Err)
		}
		if done.Load() != 1 {
			t.Errorf("Done called %d times, want 1", done.Load())
		}
		f.p.recv(ack(8, 1))
		if len(events) != 2 || events[0] || !events[1] {
			t.Errorf("watcher was told %v, want down, then up", events)
		}
	})
}

// TestProbe: after a message has timed out, the peer gets probes until it acknowledges one and is up
// again. Without probes no message would be sent to a peer that counts as lost.
func TestProbe(t *testing.T) {
	for _, c := range []struct {
		name string
		life func(f *fixture, sig uint64)
	}{
		{"acknowledges", func(f *fixture, sig uint64) { f.p.recv(ack(8, sig)) }},
		{"sends something", func(f *fixture, _ uint64) { f.p.recv(from(8, request(9, 1))) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
				ups := make(chan bool, 100)
				f.WatchPeers(func(id int, up bool, cause error) { ups <- up })
				for ts := range 3 { // one probe for all
					if err := f.Send(request(8, ts)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(2500 * time.Millisecond)
				f.p.take()
				time.Sleep(time.Minute)
				synctest.Wait()
				sent := f.p.take()
				if len(sent) != 60 {
					t.Fatalf("%d probes in a minute, want one a second", len(sent))
				}
				for _, x := range sent {
					if m := x.meta; x.receiver != 8 || m.Control.Cmd != van.Heartbeat || len(m.Control.Nodes) != 0 {
						t.Fatalf("to %d: %s, want a heartbeat without records to 8", x.receiver, &m)
					}
				}
				for range 3 {
					if <-ups {
						t.Error("the peer is said to be back")
					}
				}
				c.life(f, signature(&sent[0].meta, 9, 8))
				if up := <-ups; !up || len(ups) > 0 {
					t.Errorf("told that the peer is back: %t, and %d changes more", up, len(ups))
				}
				if n := len(f.failed()); n != 3 {
					t.Errorf("%d messages are said to have failed, want 3", n)
				}
			})
		})
	}
	t.Run("is given up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
			if err := f.Send(request(8, 1)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if sent := f.p.take(); sent[len(sent)-1].meta.Control.Cmd != van.Heartbeat {
				t.Fatalf("sent %v, want a probe at last", sent)
			}
			f.peerChanged(8, false, van.ErrPeerLost)
			synctest.Wait()
			if all := f.failed(); len(all) != 1 || all[0].Meta.Timestamp != 1 {
				t.Errorf("%v are said to have failed, want the request alone", all)
			}
		})
	})
	t.Run("comes", func(t *testing.T) {
		f := newFixture(t, Options{})
		m := from(8, request(9, 0))
		m.Request, m.Push, m.Control.Cmd = false, false, van.Heartbeat
		f.p.recv(m)
		if sent := f.p.take(); len(sent) != 1 || sent[0].meta.Control.Cmd != van.Ack || len(f.up) != 0 {
			t.Errorf("answered with %v, and %d messages handed up; want an acknowledgement and none", sent, len(f.up))
		}
	})
	t.Run("a notice is none", func(t *testing.T) {
		f := newFixture(t, Options{})
		m := from(8, request(9, 0))
		m.Request, m.Push, m.Control.Cmd, m.Body = false, false, van.Heartbeat, []byte("withdraw")
		f.p.recv(m)
		if len(f.up) != 1 {
			t.Errorf("%d messages handed up, want the notice", len(f.up))
		}
	})
	t.Run("heard of while it is given up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
			var events []bool
			f.WatchPeers(func(id int, up bool, cause error) {
				if !up { // it has been received before, and is processed now
					f.p.recv(from(8, request(9, 1)))
				}
				events = append(events, up)
			})
			if err := f.Send(request(8, 1)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2500 * time.Millisecond)
			synctest.Wait()
			sent := f.p.take()
			f.p.recv(ack(8, signature(&sent[len(sent)-1].meta, 9, 8)))
			if n := len(events); n == 0 || !events[n-1] {
				t.Errorf("told %v, want that the peer is back in the end", events)
			}
		})
	})
	t.Run("finds no room", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
			room := func(err error) {
				f.p.mu.Lock()
				defer f.p.mu.Unlock()
				f.p.fail = err
			}
			if err := f.Send(request(8, 1)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1500 * time.Millisecond)
			room(fmt.Errorf("full: %w", van.ErrQueueFull))
			time.Sleep(5 * time.Second)
			synctest.Wait()
			f.p.take()
			room(nil)
			time.Sleep(1500 * time.Millisecond)
			synctest.Wait()
			if sent := f.p.take(); len(sent) == 0 || sent[0].meta.Control.Cmd != van.Heartbeat {
				t.Errorf("sent %v, want a probe when there is room", sent)
			}
		})
	})
	t.Run("none for a scheduler", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
			if err := f.Send(request(van.SchedulerID, 1)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if n := len(f.p.take()); n != 2 {
				t.Errorf("%d messages, want 2", n)
			}
		})
	})
	t.Run("not waited for", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Options{Timeout: time.Second, MaxTries: 2})
			if err := f.Send(request(8, 1)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
			begun := time.Now()
			if err := f.Close(t.Context()); err != nil || time.Since(begun) > 0 {
				t.Errorf("Close: %v after %s, want nil at once", err, time.Since(begun))
			}
		})
	})
}

// TestRetryFindsNoRoom: if the transport's queue is full, a repeat is tried again later.
func TestRetryFindsNoRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		if err := f.Send(request(8, 5)); err != nil {
			t.Fatal(err)
		}
		room := func(err error) {
			f.p.mu.Lock()
			defer f.p.mu.Unlock()
			f.p.fail = err
		}
		room(fmt.Errorf("full: %w", van.ErrQueueFull))
		time.Sleep(1500 * time.Millisecond)
		room(nil)
		time.Sleep(time.Second)
		synctest.Wait()
		if n, x := len(f.p.take()), f.failed(); n != 2 || len(x) != 0 {
			t.Errorf("sent %d times, failures %v; want 2 and none", n, x)
		}
		f.p.recv(ack(8, 0x000009080000000b))
	})
}

func TestAckEndsKeeping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		f.p.hold = true
		done := &counter{}
		m := request(8, 5)
		m.Done = done
		if err := f.Send(m); err != nil {
			t.Fatal(err)
		}
		f.p.recv(ack(10, 0x000009080000000b)) // of another node: not for this message
		if f.kept.count != 1 {
			t.Fatal("a foreign acknowledgement was taken")
		}
		f.p.recv(ack(8, 0x000009080000000b))
		if done.Load() != 0 {
			t.Error("Done was called while the inner van holds the frames")
		}
		f.p.dones[0].Sent()
		if done.Load() != 1 {
			t.Errorf("Done called %d times, want 1", done.Load())
		}
		f.p.recv(ack(8, 0x000009080000000b))
		time.Sleep(time.Minute)
		synctest.Wait()
		if s := f.p.take(); len(s) != 1 {
			t.Errorf("sent %d times, want 1", len(s))
		}
		if len(f.up) != 0 {
			t.Error("an acknowledgement was handed up")
		}
	})
}

func TestBeforeEnable(t *testing.T) {
	p := &pipe{}
	v := New(p, Options{})
	var up int
	v.Start(func(*van.Message) { up++ })
	v.SetID(9)
	p.recv(from(1, request(9, 1)))
	if s := p.take(); len(s) != 0 || up != 1 {
		t.Errorf("before Enable: %d answers and %d handed up, want 0 and 1", len(s), up)
	}
	if err := v.Send(request(8, 1)); err != nil || v.kept.count != 0 {
		t.Errorf("Send before Enable: error %v, %d kept; want none", err, v.kept.count)
	}
	p.take()
	v.Enable()
	p.recv(from(1, request(9, 1)))
	if s := p.take(); len(s) != 1 || up != 1 {
		t.Errorf("sent again after Enable: %d answers and %d handed up, want 1 and still 1", len(s), up)
	}
	if err := v.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestSameSignatureWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		const sig = 0x000009080000000b
		for customer := range int32(3) {
			m := request(8, 5)
			m.CustomerID = customer
			if err := f.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		for customer := range int32(3) {
			s := f.p.take()
			if len(s) != 1 || s[0].meta.CustomerID != customer {
				t.Fatalf("sent %d messages, want only the one of customer %d", len(s), customer)
			}
			f.p.recv(ack(8, sig))
		}
		if f.kept.count != 0 || len(f.kept.byKey) != 0 || f.kept.first != nil {
			t.Errorf("%d messages are kept after their acknowledgement", f.kept.count)
		}
	})
}

// TestRepeatsMakeFewLines: any number of repeats to a suspended peer causes only a few log lines.
func TestRepeatsMakeFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		for ts := range 500 {
			if err := f.Send(request(8, ts)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(4500 * time.Millisecond)
		synctest.Wait()
		if n := strings.Count(f.log.String(), "sending again"); n == 0 || n > 12 {
			t.Errorf("%d lines, want some, and 12 at most", n)
		}
		f.p.watch(8, false, nil)
	})
}

func TestSendError(t *testing.T) {
	f := newFixture(t, Options{})
	f.p.fail = van.ErrUnknownPeer
	done := &counter{}
	m := request(8, 5)
	m.Done = done
	if err := f.Send(m); !errors.Is(err, van.ErrUnknownPeer) || f.kept.count != 0 || done.Load() != 0 {
		t.Errorf("Send: %v, %d kept, Done %d times; want %v, 0, 0", err, f.kept.count, done.Load(), van.ErrUnknownPeer)
	}
}

func TestCloseWaitsForAcks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second})
		if err := f.Send(request(8, 5)); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		go func() {
			time.Sleep(1500 * time.Millisecond)
			f.p.recv(ack(8, 0x000009080000000b))
		}()
		if err := f.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 1500*time.Millisecond {
			t.Errorf("Close took %s, want until the acknowledgement", d)
		}
		if s := f.p.take(); len(s) != 2 {
			t.Errorf("sent %d times, want 2", len(s))
		}
	})
}

func TestCloseGivesUpWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Options{Timeout: time.Second, CloseWait: 2 * time.Second})
		done := &counter{}
		m := request(8, 5)
		m.Done = done
		if err := f.Send(m); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := f.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		late := request(8, 6)
		late.Done = &counter{}
		if err := f.Send(late); !errors.Is(err, van.ErrClosed) || late.Done.(*counter).Load() != 0 {
			t.Errorf("Send after Close: %v, Done %d times; want %v, 0", err, late.Done.(*counter).Load(), van.ErrClosed)
		}
		if d := time.Since(start); d != 2*time.Second || done.Load() != 1 || len(f.failed()) != 0 {
			t.Errorf("Close took %s, Done %d times, %d failures; want 2s, 1, 0", d, done.Load(), len(f.failed()))
		}
	})
}

func TestWarnsOfLongIDs(t *testing.T) {
	f := newFixture(t, Options{})
	for _, id := range []int{van.WorkerID(123), van.Empty, van.ServerID(123)} {
		if err := f.Connect(context.Background(), id, van.Node{}); err != nil {
			t.Fatal(err)
		}
	}
	if f.log.Len() != 0 {
		t.Errorf("warned up to rank 123: %s", f.log.String())
	}
	for range 2 {
		if err := f.Connect(context.Background(), van.ServerID(124), van.Node{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(f.log.String(), "PS_RESEND"); n != 1 {
		t.Errorf("%d warnings from rank 124 up, want 1", n)
	}
}
