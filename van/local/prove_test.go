package local

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

// keysOf makes the keys of a secret; nil if there is none.
func keysOf(t testing.TB, secret string, required bool) *auth.Keys {
	t.Helper()
	if secret == "" {
		return nil
	}
	k, err := auth.New([]byte(secret), "a cluster", required)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// proving gives a node the keys of a secret.
func proving(t testing.TB, secret string, required bool) func(*Van) {
	k := keysOf(t, secret, required)
	return func(v *Van) { v.own.guard.Keys = k }
}

const (
	secretA = "the secret of one cluster"
	secretB = "the secret of another one"
)

// TestProofModes: the combinations of secrets and modes of the two ends that lead to a link, and the log lines of
// both.
func TestProofModes(t *testing.T) {
	type end struct {
		secret   string
		required bool
	}
	var (
		off, require, warn          = end{}, end{secretA, true}, end{secretA, false}
		otherRequire, otherWarn     = end{secretB, true}, end{secretB, false}
		noSecret, differs, admitted = auth.ErrNoSecret.Error(), auth.ErrOtherSecret.Error(), "is admitted: STEPAF_AUTH is warn"
	)
	for _, c := range []struct {
		name             string
		dialer, acceptor end
		linked           bool
		unproved         [2]bool // counted by the dialer, the acceptor
		dialerSays       string
		acceptorSays     string
	}{
		{"off, off", off, off, true, [2]bool{}, "", ""},
		{"require, require", require, require, true, [2]bool{}, "", ""},
		{"require, warn", require, warn, true, [2]bool{}, "", ""},
		{"warn, require", warn, require, true, [2]bool{}, "", ""},
		{"warn, warn", warn, warn, true, [2]bool{}, "", ""},
		{"require, off", require, off, false, [2]bool{true, false}, noSecret, "the peer has a secret, this node has none"},
		{"warn, off", warn, off, true, [2]bool{true, false}, admitted, "the peer has a secret, this node has none"},
		{"off, require", off, require, false, [2]bool{false, true}, "it requires a proof of the cluster's secret", noSecret},
		{"off, warn", off, warn, true, [2]bool{false, true}, "", admitted},
		{"require, another's require", require, otherRequire, false, [2]bool{true, true}, differs, differs},
		{"require, another's warn", require, otherWarn, false, [2]bool{true, true}, differs, differs},
		{"warn, another's require", warn, otherRequire, false, [2]bool{true, true}, "STEPAF_CLUSTER_ID differs from this node's", differs},
		{"warn, another's warn", warn, otherWarn, true, [2]bool{true, true}, differs, differs},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker := newNode(t, n, 9, proving(t, c.dialer.secret, c.dialer.required))
			server := newNode(t, n, 8, proving(t, c.acceptor.secret, c.acceptor.required))
			worker.start()
			server.start()
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			if err := server.Connect(t.Context(), 9, worker.self); err != nil { // it accepts messages from there
				t.Fatal(err)
			}
			if linked := worker.Linked(8); linked != c.linked {
				t.Errorf("linked %t, want %t; the logs:\n%s%s", linked, c.linked, worker.logged, server.logged)
			}
			worker.must(data(8, 3, []byte("values"))) // over the van inside, if there is no link
			if m := server.next(); string(m.Vals.Host()) != "values" {
				t.Errorf("received %q", m.Vals.Host())
			} else {
				m.Release()
			}
			for i, x := range []*node{worker, server} {
				eventually(t, "it is counted", func() bool { return (x.Stats().Unauthenticated > 0) == c.unproved[i] })
			}
			worker.says(c.dialerSays)
			server.says(c.acceptorSays)
			if !c.linked {
				worker.says("data goes over inproc, not through shared memory")
			}
			for _, secret := range []string{secretA, secretB} {
				if strings.Contains(worker.logged.String()+server.logged.String(), secret) {
					t.Error("a log shows a secret")
				}
			}
		})
	}
}

// TestProofOfBothWays: links in both directions carry data, and end and begin anew, with a secret.
func TestProofOfBothWays(t *testing.T) {
	worker, server := pairWith(t, proving(t, secretA, true))
	worker.must(data(8, 1, pattern(1, 100_000)))
	server.next().Release()
	server.must(data(9, 2, pattern(2, 100_000)))
	worker.next().Release()
	l := worker.peers.link(8)
	_ = l.conn.Close()
	worker.event(8, true)
	worker.resend(data(8, 3, []byte("after")))
	server.next().Release()
	if n := worker.Stats().Unauthenticated + server.Stats().Unauthenticated; n != 0 {
		t.Errorf("%d unproved, want 0", n)
	}
}

// rawDialer is a process that connects to a node's socket and says anything.
type rawDialer struct {
	t    *testing.T
	conn *net.UnixConn
	name [16]byte
}

func dialRaw(t *testing.T, to *node) *rawDialer {
	t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: to.own.token.address(), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	return &rawDialer{t, conn, to.own.token.name}
}

func (d *rawDialer) write(b []byte, fds ...int) {
	d.t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := d.conn.WriteMsgUnix(b, oob, nil); err != nil {
		d.t.Fatal(err)
	}
}

// read returns the next message, nil at the end, and the number of its descriptors.
func (d *rawDialer) read() ([]byte, int) {
	d.t.Helper()
	b, fds, err := receive(d.conn, replyHead+2*maxWhy)
	if err != nil && !hungUp(err) {
		d.t.Fatal(err)
	}
	closeAll(fds)
	return b, len(fds)
}

// challenged greets and returns the handshake as the dialer's end has it, with the challenge.
func (d *rawDialer) challenged(k *auth.Keys, n number) (*proofs, []byte) {
	d.t.Helper()
	d.write(numbered(greetingMagic, n))
	b, fds := d.read()
	receiver, _, ok := parseNumbered(b, challengeMagic, challengeLen)
	if !ok || fds != 0 {
		d.t.Fatalf("a greeting was answered by %q with %d files, want a challenge", b, fds)
	}
	return &proofs{keys: k, sender: n, receiver: receiver, name: d.name}, b
}

// refused checks that the node answers with a refusal that says what, and hands nothing over.
func (d *rawDialer) refused(what string) {
	d.t.Helper()
	b, fds := d.read()
	if len(b) < replyHead || string(b[:4]) != replyMagic || b[4] != verdictNo || fds != 0 || !strings.Contains(string(b[replyHead:]), what) {
		d.t.Errorf("answer %q with %d files, want a refusal that says %q", b, fds, what)
	}
}

// rawHello is a hello that a node without keys would take.
func rawHello() []byte {
	b := append([]byte(helloMagic), make([]byte, helloLen-4)...)
	binary.LittleEndian.PutUint32(b[4:], tokenVersion)
	binary.LittleEndian.PutUint32(b[8:], 9)
	binary.LittleEndian.PutUint32(b[32:], segmentLen)
	binary.LittleEndian.PutUint32(b[36:], slotCount)
	return b
}

// helloFiles are descriptors for a hello.
func helloFiles(t *testing.T) []int {
	t.Helper()
	seg, err := memfd.New(segmentLen)
	if err != nil {
		t.Fatal(err)
	}
	bell, err := memfd.New(bellLen)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll([]int{seg, bell}) })
	return []int{seg, bell}
}

func openFiles(t *testing.T) int {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(dir)
}

// proof appends the dialer's proof over hello.
func (p *proofs) proof(hello []byte) []byte {
	purpose, parts := p.ofSender(hello)
	x := p.keys.Proof(purpose, parts...)
	return append(bytes.Clone(hello), x[:]...)
}

// TestUnprovedDialer: a dialer that does not prove the secret is refused, is counted, gets no descriptor, and
// leaves none: replayed, reflected, truncated and other wrong handshakes.
func TestUnprovedDialer(t *testing.T) {
	const differs, protocol, none = "STEPAF_CLUSTER_ID differs", "protocol", "requires a proof"
	k := keysOf(t, secretA, true)
	n, err := newNumber()
	if err != nil {
		t.Fatal(err)
	}
	hello := rawHello()
	for _, c := range []struct {
		name string
		want string
		do   func(d, other *rawDialer, fds []int)
	}{
		{"no proof", none, func(d, _ *rawDialer, fds []int) { d.write(hello, fds...) }},
		{"a proof without a greeting", "longer than", func(d, _ *rawDialer, fds []int) {
			p := &proofs{keys: k, name: d.name}
			d.write(p.proof(hello), fds...)
		}},
		{"garbage", none, func(d, _ *rawDialer, fds []int) { d.write([]byte("hello?"), fds...) }},
		{"a short greeting", none, func(d, _ *rawDialer, fds []int) { d.write(numbered(greetingMagic, n)[:greetingLen-1], fds...) }},
		{"a long greeting", none, func(d, _ *rawDialer, fds []int) { d.write(append(numbered(greetingMagic, n), 0), fds...) }},
		{"another version", none, func(d, _ *rawDialer, fds []int) {
			b := numbered(greetingMagic, n)
			b[4]++
			d.write(b, fds...)
		}},
		{"a wrong proof", differs, func(d, _ *rawDialer, fds []int) {
			p, _ := d.challenged(k, n)
			b := p.proof(hello)
			b[len(b)-1] ^= 1
			d.write(b, fds...)
		}},
		{"zeros for a proof", differs, func(d, _ *rawDialer, fds []int) {
			d.challenged(k, n)
			d.write(append(bytes.Clone(hello), make([]byte, auth.ProofLen)...), fds...)
		}},
		{"another secret", differs, func(d, _ *rawDialer, fds []int) {
			p, _ := d.challenged(keysOf(t, secretB, true), n)
			d.write(p.proof(hello), fds...)
		}},
		{"another hello than is proved", differs, func(d, _ *rawDialer, fds []int) {
			p, _ := d.challenged(k, n)
			b := p.proof(hello)
			b[8]++
			d.write(b, fds...)
		}},
		{"a hello without its proof", differs, func(d, _ *rawDialer, fds []int) {
			d.challenged(k, n)
			d.write(hello, fds...)
		}},
		{"a proof that is cut off", differs, func(d, _ *rawDialer, fds []int) {
			p, _ := d.challenged(k, n)
			b := p.proof(hello)
			d.write(b[:len(b)-1], fds...)
		}},
		{"less than a proof", protocol, func(d, _ *rawDialer, fds []int) {
			d.challenged(k, n)
			d.write(hello[:auth.ProofLen-1], fds...)
		}},
		{"more than a proof", "longer than", func(d, _ *rawDialer, fds []int) {
			p, _ := d.challenged(k, n)
			d.write(append(p.proof(hello), 0), fds...)
		}},
		{"a replayed handshake", differs, func(d, other *rawDialer, fds []int) {
			p, _ := other.challenged(k, n)
			b := p.proof(hello) // it proves the other handshake
			d.challenged(k, n)
			d.write(b, fds...)
		}},
		{"the receiver's own proof", differs, func(d, _ *rawDialer, fds []int) {
			_, challenge := d.challenged(k, n)
			d.write(append(bytes.Clone(hello), challenge[greetingLen:]...), fds...)
		}},
		{"the receiver's own challenge, reflected", differs, func(d, other *rawDialer, fds []int) {
			p, _ := d.challenged(k, n)
			_, challenge := other.challenged(k, p.receiver) // it proves what the first one asks for, as a receiver
			d.write(append(bytes.Clone(hello), challenge[greetingLen:]...), fds...)
		}},
		{"a proof for another socket", differs, func(d, _ *rawDialer, fds []int) {
			p, _ := d.challenged(k, n)
			p.name[0]++
			d.write(p.proof(hello), fds...)
		}},
		{"a second greeting", differs, func(d, _ *rawDialer, fds []int) {
			d.challenged(k, n)
			d.write(numbered(greetingMagic, n), fds...)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := newNode(t, inproc.NewNetwork(), 8, proving(t, secretA, true))
			server.start()
			fds := helloFiles(t)
			d, other := dialRaw(t, server), dialRaw(t, server)
			c.do(d, other, fds)
			d.refused(c.want)
			_ = d.conn.Close()
			_ = other.conn.Close()
			eventually(t, "the connections end", func() bool {
				server.peers.Mu.Lock()
				defer server.peers.Mu.Unlock()
				// The other connection may be accepted only now.
				return len(server.acceptor.conns) == 0 && len(server.acceptor.handshakes) == 0 && server.Stats().Unauthenticated > 1
			})
			if ins := len(server.peers.Ins()); ins != 0 {
				t.Errorf("%d links, want none", ins)
			}
			if n := server.Stats().Unauthenticated; n != 2 {
				t.Errorf("%d unproved peers, want the one that is refused with %q, and the other, which cuts its handshake off", n, c.want)
			}
		})
	}
}

// TestProvedDialer: the handshakes above are refused only because of their errors.
func TestProvedDialer(t *testing.T) {
	server := newNode(t, inproc.NewNetwork(), 8, proving(t, secretA, true))
	server.start()
	d := dialRaw(t, server)
	p, _ := d.challenged(keysOf(t, secretA, true), number{1})
	d.write(p.proof(rawHello()), helloFiles(t)...)
	if b, fds := d.read(); len(b) < replyHead || b[4] == verdictNo || fds != 1 {
		t.Errorf("answer %q with %d files, want a link and the bell", b, fds)
	}
}

// TestUnprovedFilesAreClosed: descriptors that come before or without a proof are closed.
func TestUnprovedFilesAreClosed(t *testing.T) {
	server := newNode(t, inproc.NewNetwork(), 8, proving(t, secretA, true))
	server.start()
	fds := helloFiles(t)
	before := openFiles(t)
	greeted := dialRaw(t, server)
	greeted.write(numbered(greetingMagic, number{1}), fds...)
	greeted.read() // it stays in the handshake
	eventually(t, "two files, the ends of the connection, are open", func() bool { return openFiles(t) == before+2 })
	greeted.write(append(rawHello(), make([]byte, auth.ProofLen)...), fds...)
	greeted.refused("differs")
	plain := dialRaw(t, server)
	plain.write(rawHello(), fds...)
	plain.refused("requires a proof")
	_ = greeted.conn.Close()
	_ = plain.conn.Close()
	eventually(t, "all are closed", func() bool { return openFiles(t) == before })
}

// TestSlowDialer: a connection without a complete hello is closed after linkTime, wherever it stops.
func TestSlowDialer(t *testing.T) {
	for name, say := range map[string]func(d *rawDialer){
		"silent":  func(*rawDialer) {},
		"greeted": func(d *rawDialer) { d.challenged(nil, number{1}) },
	} {
		t.Run(name, func(t *testing.T) {
			server := newNode(t, inproc.NewNetwork(), 8, func(v *Van) {
				proving(t, secretA, true)(v)
				v.own.linkTime = 200 * time.Millisecond
			})
			server.start()
			d := dialRaw(t, server)
			say(d)
			if b, _ := d.read(); len(b) != 0 {
				t.Errorf("received %q, want the end", b)
			}
			server.says("timeout")
		})
	}
}

// TestCrowdedHandshakes: silent connections hold neither more than maxHandshakes places nor a peer back.
func TestCrowdedHandshakes(t *testing.T) {
	n := inproc.NewNetwork()
	worker, server := newNode(t, n, 9, proving(t, secretA, true)), newNode(t, n, 8, func(v *Van) {
		proving(t, secretA, true)(v)
		v.own.linkTime = time.Minute // none of them ends by itself
	})
	worker.start()
	server.start()
	first := dialRaw(t, server)
	for range maxHandshakes + 20 {
		dialRaw(t, server)
	}
	if b, _ := first.read(); len(b) != 0 {
		t.Errorf("the oldest silent connection received %q, want its end", b)
	}
	worker.connect(server)
	if err := server.Connect(t.Context(), 9, worker.self); err != nil {
		t.Fatal(err)
	}
	server.peers.Mu.Lock()
	held := len(server.acceptor.handshakes)
	server.peers.Mu.Unlock()
	if held > maxHandshakes {
		t.Errorf("%d connections are in their handshake, want up to %d", held, maxHandshakes)
	}
	server.says("too many connections")
	worker.must(data(8, 1, []byte("x")))
	server.next().Release()
}

// rawAcceptor is a process that listens where a node dials, and answers anything.
type rawAcceptor struct {
	t        *testing.T
	listener *net.UnixListener
	token    token
}

func listenRaw(t *testing.T, like *node) *rawAcceptor {
	t.Helper()
	x := like.own.token
	x.name[0]++
	l, err := listen(&x)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return &rawAcceptor{t, l, x}
}

// accept takes a connection and its first message.
func (a *rawAcceptor) accept() (d *rawDialer, first []byte, fds int) {
	a.t.Helper()
	_ = a.listener.SetDeadline(time.Now().Add(limit))
	c, err := a.listener.AcceptUnix()
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(limit))
	d = &rawDialer{a.t, c, a.token.name}
	first, fds = d.read()
	return d, first, fds
}

// TestUnprovedAcceptor: a node that has a secret hands its descriptors over only to peers that prove it.
func TestUnprovedAcceptor(t *testing.T) {
	k := keysOf(t, secretA, true)
	proof := func(p *proofs) []byte {
		purpose, parts := p.ofReceiver()
		x := k.Proof(purpose, parts...)
		return append(numbered(challengeMagic, p.receiver), x[:]...)
	}
	for _, c := range []struct {
		name   string
		want   string
		answer func(n number, name [16]byte, server *node) []byte
	}{
		{"a refusal", "no secret", func(number, [16]byte, *node) []byte { return (&reply{why: "what is this?"}).encode() }},
		{"a link, at once", "no secret", func(number, [16]byte, *node) []byte { return (&reply{verdict: verdictRead}).encode() }},
		{"garbage", "protocol", func(number, [16]byte, *node) []byte { return []byte("what is this?") }},
		{"the greeting, reflected", "protocol", func(n number, _ [16]byte, _ *node) []byte { return numbered(greetingMagic, n) }},
		{"zeros for a proof", "differs", func(n number, _ [16]byte, _ *node) []byte {
			return append(numbered(challengeMagic, n), make([]byte, auth.ProofLen)...)
		}},
		{"the sender's proof", "differs", func(n number, name [16]byte, _ *node) []byte {
			p := &proofs{keys: k, sender: n, receiver: n, name: name}
			return append(numbered(challengeMagic, n), p.proof(nil)...)
		}},
		{"a proof that is cut off", "protocol", func(n number, name [16]byte, _ *node) []byte {
			return proof(&proofs{sender: n, name: name})[:challengeLen-1]
		}},
		{"a proof and more", "protocol", func(n number, name [16]byte, _ *node) []byte {
			return append(proof(&proofs{sender: n, name: name}), 0)
		}},
		{"a replayed challenge", "differs", func(_ number, name [16]byte, _ *node) []byte {
			return proof(&proofs{sender: number{1}, name: name}) // of another greeting
		}},
		{"a member's challenge, passed on", "differs", func(n number, _ [16]byte, server *node) []byte {
			_, challenge := dialRaw(t, server).challenged(nil, n)
			return challenge
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker, server := newNode(t, n, 9, proving(t, secretA, true)), newNode(t, n, 8, proving(t, secretA, true))
			worker.start()
			server.start()
			bad := listenRaw(t, server)
			server.self.Endpoint = Endpoint(bad.token.encode())
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			linked := make(chan bool)
			go func() { linked <- worker.Linked(8) }()
			d, b, fds := bad.accept()
			number, _, ok := parseNumbered(b, greetingMagic, greetingLen)
			if !ok || fds != 0 {
				t.Fatalf("the node began with %q and %d files, want a greeting", b, fds)
			}
			d.write(c.answer(number, d.name, server))
			if b, fds := d.read(); len(b) > 0 && string(b) != denialMagic || fds != 0 {
				t.Errorf("the node went on with %d bytes and %d files", len(b), fds)
			}
			if <-linked {
				t.Error("linked")
			}
			worker.says(c.want)
			if n := worker.Stats().Unauthenticated; (n == 1) != (c.want != "protocol") {
				t.Errorf("%d unproved peers after an answer that is refused with %q", n, c.want)
			}
			worker.must(data(8, 1, []byte("over the van inside")))
			server.next().Release()
		})
	}
}

// TestPlainHello: without a secret the handshake has the bytes that versions without proofs know.
func TestPlainHello(t *testing.T) {
	for name, set := range map[string]func(*Van){"off": nil, "warn, to a peer without a secret": proving(t, secretA, false)} {
		t.Run(name, func(t *testing.T) {
			n := inproc.NewNetwork()
			worker, server := newNode(t, n, 9, set), newNode(t, n, 8, nil)
			bad := listenRaw(t, server)
			server.self.Endpoint = Endpoint(bad.token.encode())
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			linked := make(chan bool)
			go func() { linked <- worker.Linked(8) }()
			d, b, fds := bad.accept()
			if set != nil {
				d.write((&reply{why: "hello of 24 bytes with 0 files"}).encode()) // as an older version does
				d, b, fds = bad.accept()
			}
			if len(b) != helloLen || string(b[:4]) != helloMagic || fds != 2 {
				t.Errorf("the node began with %q and %d files, want a hello of %d bytes with 2", b, fds, helloLen)
			}
			_ = bad.listener.Close()
			_ = d.conn.Close()
			<-linked
		})
	}
}

// FuzzGreeting: for any bytes in place of a greeting and a hello, a receiver that requires proofs admits no link,
// and keeps to the protocol.
func FuzzGreeting(f *testing.F) {
	f.Add(numbered(greetingMagic, number{1}), append(rawHello(), make([]byte, auth.ProofLen)...))
	f.Add(rawHello(), []byte(nil))
	f.Add(numbered(challengeMagic, number{1}), []byte(denialMagic))
	f.Add([]byte("S"), []byte("S"))
	k := keysOf(f, secretA, true)
	f.Fuzz(func(t *testing.T, first, second []byte) {
		near, far := looseEnds(t)
		_ = near.SetDeadline(time.Now().Add(limit))
		a := &acceptor{self: &endpoint{}}
		a.self.guard.Keys = k
		for _, b := range [][]byte{first, second} {
			if len(b) > 0 && len(b) < 1<<14 {
				_, _ = far.Write(b)
			}
		}
		_ = far.CloseWrite()
		hello, fds, err := a.provedHello(near, 0)
		closeAll(fds)
		if err == nil {
			t.Errorf("admitted %q", hello)
		}
	})
}

// FuzzChallenge: after any answer to its greeting without a proof, a sender that requires proofs ends the
// handshake.
func FuzzChallenge(f *testing.F) {
	f.Add(append(numbered(challengeMagic, number{1}), make([]byte, auth.ProofLen)...))
	f.Add((&reply{why: "no"}).encode())
	f.Add([]byte("SAFR"))
	k := keysOf(f, secretA, true)
	f.Fuzz(func(t *testing.T, answer []byte) {
		near, far := looseEnds(t)
		_ = near.SetDeadline(time.Now().Add(limit))
		e := &endpoint{}
		e.guard.Keys = k
		if len(answer) > 0 && len(answer) < 1<<14 {
			_, _ = far.Write(answer)
		}
		_ = far.CloseWrite()
		if _, err := e.greet(near, 8, [16]byte{1}); err == nil || errors.Is(err, van.ErrClosed) {
			t.Errorf("%q proves a secret: %v", answer, err)
		}
	})
}
