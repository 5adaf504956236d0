package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/env"
)

// keysOf derives the keys of a secret that begins with text; nil for "".
func keysOf(t *testing.T, text string, required bool) *auth.Keys {
	t.Helper()
	if text == "" {
		return nil
	}
	k, err := auth.New([]byte(text+" of at least sixteen bytes"), "", required)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// withTLS returns the options of a node with TLS.
func withTLS(t *testing.T) func(*van.Options) {
	return func(o *van.Options) { o.Keys, o.Config.TLS = keysOf(t, "one", true), true }
}

// TestSecret: nodes with the same secret and the same STEPAF_TLS exchange data. All other pairs are counted. If a proof is required,
// their connection is refused, and the errors name the cause.
func TestSecret(t *testing.T) {
	const here, there = "it is 1 here and not at the peer", "it is 1 at the peer and not here"
	for _, c := range []struct {
		dialer, listener string // "+" at the end: with TLS
		required         bool
		dialerSays       string // "": the handshake succeeds
		listenerSays     string
	}{
		{"one", "one", true, "", ""},
		{"one", "two", true, "differs", ""},
		{"one", "", true, "has no secret", "this node has none"},
		{"", "one", true, "the peer has a secret", "the peer has no secret"},
		{"one", "one", false, "", ""},
		{"one", "", false, "", ""},
		{"", "one", false, "", ""},
		{"one", "two", false, "", ""},
		{"one+", "one+", true, "", ""},
		{"one+", "two+", true, "differs", "differs"},
		{"one+", "one", true, here, there},
		{"one", "one+", true, there, here},
		{"one+", "two", true, here, there},
		{"one", "two+", true, there, here},
		{"one+", "", true, here, there},
		{"", "one+", true, there, here},
	} {
		t.Run(fmt.Sprintf("%s-%s-%t", c.dialer, c.listener, c.required), func(t *testing.T) {
			node := func(keys string, incarnation uint32) *common {
				text, encrypts := strings.CutSuffix(keys, "+")
				n := &common{cfg: env.Default(), incarnation: incarnation}
				n.guard.Keys, n.guard.Log = keysOf(t, text, c.required), (&vantest.Log{}).Logger()
				if encrypts {
					var err error
					if n.tls, err = newTLS(n.guard.Keys); err != nil {
						t.Fatal(err)
					}
				}
				return n
			}
			from, to := node(c.dialer, 1), node(c.listener, 2)
			from.id.Store(9)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			var accepting sync.WaitGroup
			var refusals []error
			accepting.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_ = c.SetDeadline(time.Now().Add(limit))
					conn, _, err := to.serveHandshake(c)
					if err == nil {
						to.say(conn, verdictYes)
					} else {
						refusals = append(refusals, err)
					}
					_ = c.Close()
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			conn, err := from.meet(ctx, &callee{addr: l.Addr().String(), incarnation: 2, name: "server 0"})
			if (err == nil) != (c.dialerSays == "") {
				t.Fatalf("the handshake ends with %v", err)
			}
			if err == nil {
				_ = conn.Close()
			} else if !strings.Contains(err.Error(), c.dialerSays) {
				t.Errorf("the dialer says %q, want %q", err, c.dialerSays)
			}
			_ = l.Close()
			accepting.Wait()
			if says := errors.Join(refusals...); c.listenerSays != "" && (says == nil || !strings.Contains(says.Error(), c.listenerSays)) {
				t.Errorf("the listener says %q, want %q", says, c.listenerSays)
			}
			if n := from.guard.Count() + to.guard.Count(); (n > 0) != (c.dialer != c.listener) {
				t.Errorf("%d connections without proof were counted", n)
			}
		})
	}
}

// TestOtherTLS: nodes with different STEPAF_TLS exchange no data, not even over the van inside. The logs of both nodes say what to set.
func TestOtherTLS(t *testing.T) {
	secured := start(t, 9, withTLS(t))
	plain := start(t, 8, func(o *van.Options) { o.Keys = keysOf(t, "one", true) })
	secured.connect(plain)
	plain.connect(secured)
	for _, x := range []struct {
		from, to *end
		says     string
	}{{secured, plain, "STEPAF_TLS must be the same on all nodes: it is 1 here"}, {plain, secured, "STEPAF_TLS must be the same on all nodes: it is 1 at the peer"}} {
		for range 2 {
			vantest.Fails(t, x.from.Send(dataMessage(x.to.self.ID, 1, true, true, []byte("in the clear"))), van.ErrPeerLost, x.says)
		}
		for _, e := range []*end{x.from, x.to} {
			vantest.Eventually(t, limit, "the log says what to set", func() bool { return strings.Contains(e.log.String(), "STEPAF_TLS must be the same") })
		}
	}
	if len(secured.in)+len(plain.in) > 0 {
		t.Error("a message arrived")
	}
}

// TestTLSNeedsSecret: a node with STEPAF_TLS and without a required secret does not start.
func TestTLSNeedsSecret(t *testing.T) {
	for _, keys := range []*auth.Keys{nil, keysOf(t, "one", false)} {
		o := van.Options{Config: env.Default(), Incarnation: incarnations.Add(1), Keys: keys}
		o.Config.TLS = true
		v := New(unbound{}, o)
		_, err := v.Bind(t.Context(), van.Node{Role: van.Server, ID: van.Empty, Hostname: "127.0.0.1"})
		vantest.Fails(t, err, van.ErrInvalid, "STEPAF_TLS", "STEPAF_SECRET_FILE", "STEPAF_AUTH=require")
	}
}

// unbound is a van whose methods must not be called.
type unbound struct{ van.Van }

func (unbound) Type() string { return "unbound" }

// proxy forwards connections to a node, and records all bytes.
type proxy struct {
	mu   sync.Mutex
	seen bytes.Buffer
}

// proxied starts a proxy to e, and makes e's record name the proxy as its data port.
func proxied(t *testing.T, e *end) *proxy {
	t.Helper()
	p := &proxy{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	done := make(chan struct{})
	t.Cleanup(func() { close(done); _ = l.Close(); wg.Wait() })
	copying := func(from, to net.Conn) {
		defer from.Close()
		defer to.Close()
		b := make([]byte, 32<<10)
		for {
			n, err := from.Read(b)
			p.mu.Lock()
			p.seen.Write(b[:n])
			p.mu.Unlock()
			if _, e := to.Write(b[:n]); e != nil || err != nil {
				return
			}
		}
	}
	target := dataAddr(e)
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", target)
			if err != nil {
				_ = c.Close()
				continue
			}
			wg.Go(func() {
				<-done
				_, _ = c.Close(), s.Close()
			})
			wg.Go(func() { copying(c, s) })
			wg.Go(func() { copying(s, c) })
		}
	})
	who, _ := e.self.Extension()
	who.DataPort = uint16(l.Addr().(*net.TCPAddr).Port)
	e.self.Endpoint = who.Encode()
	return p
}

func (p *proxy) has(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return bytes.Contains(p.seen.Bytes(), b)
}

// TestOnTheWire: with STEPAF_TLS=1, neither the hello nor the keys, meta and values of a message can be read on the wire.
func TestOnTheWire(t *testing.T) {
	for _, encrypts := range []bool{false, true} {
		options := withTLS(t)
		if !encrypts {
			options = func(o *van.Options) { o.Keys = keysOf(t, "one", true) }
		}
		worker, server := start(t, 9, options), start(t, 8, options)
		p := proxied(t, server)
		worker.connect(server)
		server.connect(worker)
		text := []byte("a tensor that nobody else may read")
		for i, n := range []int{len(text), lendFrom, 3 << 20} {
			m := dataMessage(8, i, true, true, bytes.Repeat(text, n/len(text)+1))
			m.Body = []byte("the body of a message")
			worker.must(m)
			if got := server.next(); !bytes.Equal(got.Vals.Host(), m.Vals.Host()) {
				t.Errorf("%d bytes arrived as others", n)
			}
		}
		for _, secret := range [][]byte{text, []byte("the body of a message"), {1, 0, 0, 0, 0, 0, 0, 0}, []byte(helloMagic), []byte(replyMagic)} {
			if found := p.has(secret); found == encrypts {
				t.Errorf("STEPAF_TLS %t: %q is on the wire: %t", encrypts, secret, found)
			}
		}
	}
}

// TestForged: a forged TLS record ends the connection, and is not delivered. The next message arrives over the next connection.
func TestForged(t *testing.T) {
	worker, server := pair(t, withTLS(t))
	worker.must(dataMessage(8, 1, true, true, []byte("first")))
	server.next().Release()
	c := worker.peers.Of(8).Link()
	c.mu.Lock()
	_, err := unix.Write(c.fd, append([]byte{23, 3, 3, 0, 64}, make([]byte, 64)...))
	c.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.broken:
	case <-time.After(limit):
		t.Fatal("the connection has not ended")
	}
	vantest.Eventually(t, limit, "there is another connection", func() bool {
		now := worker.peers.Of(8).Link()
		return now != nil && now != c
	})
	worker.must(dataMessage(8, 2, true, true, []byte("second")))
	if m := server.next(); m.Timestamp != 2 {
		t.Errorf("message %d arrived, want 2", m.Timestamp)
	}
}

// TestTLSStrangers: a TLS handshake without a key, with a key of another secret, or with an older version is refused before the hello.
func TestTLSStrangers(t *testing.T) {
	worker, server := pair(t, withTLS(t))
	other, err := newTLS(keysOf(t, "two", true))
	if err != nil {
		t.Fatal(err)
	}
	other.VerifyConnection = nil
	anonymous := other.Clone()
	anonymous.Certificates = nil
	older := server.own.tls.Clone()
	older.MinVersion, older.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	for name, cfg := range map[string]*tls.Config{"another key": other, "no key": anonymous, "TLS 1.2": older} {
		before := server.Stats().Unauthenticated
		c, err := net.Dial("tcp", dataAddr(server))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(limit))
		conn := tls.Client(c, cfg)
		if _, err := conn.Write(make([]byte, helloLen)); err == nil {
			_, err = conn.Read(make([]byte, 1))
			if err == nil || os.IsTimeout(err) || errors.Is(err, io.EOF) {
				t.Errorf("%s: the listener's end is %v, want an alert", name, err)
			}
		}
		_ = c.Close()
		vantest.Eventually(t, limit, name+" is counted", func() bool { return server.Stats().Unauthenticated > before })
	}
	worker.must(dataMessage(8, 1, true, true, []byte("member")))
	server.next().Release()
}

// TestTLSDescriptors: connections that were made, broken and refused leave no descriptor.
func TestTLSDescriptors(t *testing.T) {
	worker, server := pair(t, withTLS(t))
	count := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip(err)
		}
		return len(all)
	}
	worker.must(dataMessage(8, 0, true, true, []byte("first")))
	server.next().Release()
	before := count()
	for i := range 20 {
		c := worker.peers.Of(8).Link()
		c.mu.Lock()
		_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
		c.mu.Unlock()
		vantest.Eventually(t, limit, "there is another connection", func() bool {
			now := worker.peers.Of(8).Link()
			return now != nil && now != c
		})
		worker.must(dataMessage(8, i, true, true, []byte(strconv.Itoa(i))))
		server.next().Release()
	}
	vantest.Eventually(t, limit, "descriptors are closed", func() bool { return count() <= before })
}
