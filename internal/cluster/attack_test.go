package cluster_test

// Attacks of a process that is not a member, over real sockets.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// zmtp is an attacker's end of a connection of ZMTP 3.0 without a proof.
type zmtp struct{ net.Conn }

const zmtpTime = 20 * time.Second

// greet does the handshake and returns the routing id that the other side presents.
func (z zmtp) greet(kind, id string) (other string, err error) {
	_ = z.SetDeadline(time.Now().Add(zmtpTime))
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	ready := []byte("\x05READY")
	for _, p := range [][2]string{{"Socket-Type", kind}, {"Identity", id}} {
		ready = append(ready, byte(len(p[0])))
		ready = append(ready, p[0]...)
		ready = binary.BigEndian.AppendUint32(ready, uint32(len(p[1])))
		ready = append(ready, p[1]...)
	}
	if _, err := z.Write(append(append(greeting, 4, byte(len(ready))), ready...)); err != nil {
		return "", err
	}
	var head [66]byte
	if _, err := io.ReadFull(z, head[:]); err != nil {
		return "", err
	}
	command := make([]byte, head[65])
	if _, err := io.ReadFull(z, command); err != nil {
		return "", err
	}
	if _, at, ok := bytes.Cut(command, []byte("Identity")); ok && len(at) >= 4 {
		other = string(at[4:][:binary.BigEndian.Uint32(at)])
	}
	return other, nil
}

// send sends one control message.
func (z zmtp) send(m *van.Message) error {
	b := make([]byte, m.EncodedLen())
	if err := m.EncodeTo(b); err != nil {
		return err
	}
	_, err := z.Write(append(binary.BigEndian.AppendUint64([]byte{2}, uint64(len(b))), b...))
	return err
}

// dialStranger connects to a node under a routing id.
func dialStranger(t *testing.T, addr, id string) zmtp {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	z := zmtp{c}
	if _, err := z.greet("DEALER", id); err != nil {
		t.Fatalf("%s: handshake as %q: %v", addr, id, err)
	}
	return z
}

func heartbeat(body []byte, nodes ...van.Node) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Control.Cmd, m.Control.Nodes, m.Body, m.Timestamp = van.Heartbeat, nodes, body, 1
	return m
}

// TestNameOfTheScheduler: an attacker asks the scheduler, which connects to it. With the routing id of that
// connection the attacker takes over none of the scheduler's connections to members, and no member is declared dead
// (A1).
func TestNameOfTheScheduler(t *testing.T) {
	var logged vantest.Log
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Workers: 2, Log: logged.Logger()})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	scheduler := fmt.Sprintf("127.0.0.1:%d", c.Port)
	if err := dialStranger(t, scheduler, "").send(heartbeat(membership.Question(0xeeee, l.Addr().String(), "list"))); err != nil {
		t.Fatal(err)
	}
	_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(zmtpTime))
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	name, err := zmtp{in}.greet("ROUTER", "")
	if err != nil || !strings.HasPrefix(name, "ps1") {
		t.Fatalf("the scheduler calls itself %q, %v; want a name that begins with ps1", name, err)
	}
	first, _, _ := strings.Cut(name[len("ps1."):], ".") // the scheduler's incarnation
	for _, n := range append(c.Workers, c.Servers...) {
		for _, as := range []string{name, "ps1." + first, "ps1", "ps1." + first + ".00000001"} {
			z := dialStranger(t, core(n).Addr(), as)
			for _, body := range []string{"stepaf/1 error go away", "stepaf/1 dead 8 it says so", "stepaf/1 dead 9 it says so"} {
				if err := z.send(heartbeat([]byte(body))); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for range 3 { // its requests and releases need the scheduler's connections
		together(t, c.Nodes(), func(n *postoffice.Node) error { return n.InstanceBarrier(within(t, 20*time.Second), 0, van.AllNodes) })
	}
	for _, n := range c.Nodes() {
		if dead := testcluster.Dead(n); len(dead) > 0 {
			t.Errorf("%s takes %v for dead", n.Name(), dead)
		}
	}
	if text := logged.String(); strings.Contains(text, "peer lost") {
		t.Errorf("somebody was taken for lost:\n%s", text)
	}
	c.Finalize(t)
}

// TestForgedTable: a node that waits for its scheduler does not accept a table that an attacker sends as ps1, before
// the scheduler runs and while it starts. The node joins the real cluster (A2).
func TestForgedTable(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Over: testcluster.TCP})
	addr := make(chan string, 1)
	type result struct {
		n   *postoffice.Node
		err error
	}
	joined := make(chan result, 1)
	go func() {
		n, err := c.Join(within(t, time.Minute), "worker", 0, func(cfg *postoffice.Config) {
			port, err := freeport.Find()
			if err != nil {
				t.Error(err)
			}
			cfg.Port, cfg.NodeHost = port, "127.0.0.1"
			addr <- fmt.Sprintf("127.0.0.1:%d", port)
		})
		joined <- result{n, err}
	}()
	at := <-addr
	host, port := "127.0.0.1", 0
	fmt.Sscanf(at, "127.0.0.1:%d", &port)
	record := func(role van.Role, id int, port int) van.Node {
		return van.Node{Role: role, ID: id, Hostname: host, Port: port, Ports: []int32{int32(port)}, DevTypes: []int32{0}, DevIDs: []int32{0}, AuxID: -1}
	}
	table := &van.Message{}
	table.Reset()
	table.Control.Cmd, table.Timestamp = van.AddNode, 1
	table.Control.Nodes = []van.Node{record(van.Server, 8, 1), record(van.Worker, 9, port), record(van.Scheduler, 1, c.Port)}
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() { // repeatedly, until the worker has joined
		defer close(over)
		for k := 0; ctx.Err() == nil; k++ {
			conn, err := net.Dial("tcp", at)
			if err != nil {
				continue // it does not listen yet
			}
			z := zmtp{conn}
			if _, err = z.greet("DEALER", []string{"ps1", "ps1.00000001.00000001"}[k%2]); err == nil { // the second is a name for another process
				for i := 0; err == nil && i < 50 && ctx.Err() == nil; i++ {
					table.Timestamp = int32(i)
					err = z.send(table)
					select {
					case <-ctx.Done():
					case <-time.After(time.Millisecond):
					}
				}
			}
			_ = conn.Close()
		}
	}()
	defer func() { stop(); <-over }()
	select {
	case r := <-joined:
		t.Fatalf("the worker has joined a cluster without a scheduler: %v, %v", r.n, r.err)
	case <-time.After(500 * time.Millisecond): // time for the attacker
	}
	rest := make(chan error, 2)
	for _, role := range []string{"scheduler", "server"} {
		go func() {
			n, err := c.Join(within(t, time.Minute), role, 0, nil)
			if err == nil {
				t.Cleanup(func() { n.Close() })
			}
			rest <- err
		}()
	}
	r := <-joined
	for range 2 {
		if err := <-rest; err != nil {
			t.Error(err)
		}
	}
	if r.err != nil {
		t.Fatal(r.err)
	}
	defer r.n.Close()
	if got := core(r.n).App().PeerName(8); strings.HasSuffix(got, ":1") {
		t.Errorf("its server is the stranger's, %s", got)
	}
}

// TestPhantoms: an attacker sends a waiting scheduler invented records, in heartbeats of a cluster that never was (A3), or in registrations
// before the real nodes register, which a cluster id refuses (A4). The scheduler forms no cluster of them. The real nodes then form one.
func TestPhantoms(t *testing.T) {
	for _, x := range []struct {
		name, clusterID string
		cluster         uint32 // in the records; 0: they have no extension, as those of C++ StepMesh
		register        bool
	}{
		{"heartbeats", "", 666, false},
		{"heartbeats to a named cluster", "mine", 666, false},
		{"registrations without a cluster", "mine", 0, true},
		{"registrations of another cluster", "mine", 666, true},
	} {
		t.Run(x.name, func(t *testing.T) { phantoms(t, x.clusterID, x.cluster, x.register) })
	}
}

func phantoms(t *testing.T, clusterID string, cluster uint32, register bool) {
	var logged vantest.Log
	c := testcluster.New(t, testcluster.Options{Over: testcluster.TCP, Log: logged.Logger(), Set: func(cfg *postoffice.Config) { cfg.ClusterID = clusterID }})
	type result struct {
		n   *postoffice.Node
		err error
	}
	scheduler := make(chan result, 1)
	go func() {
		n, err := c.Join(within(t, time.Minute), "scheduler", 0, nil)
		scheduler <- result{n, err}
	}()
	at := fmt.Sprintf("127.0.0.1:%d", c.Port)
	vantest.Eventually(t, zmtpTime, "the scheduler listens", func() bool {
		x, err := net.Dial("tcp", at)
		if err == nil {
			_ = x.Close()
		}
		return err == nil
	})
	for i, role := range []van.Role{van.Server, van.Worker} {
		l, err := net.Listen("tcp", "127.0.0.1:0") // it receives nothing: the attacker sees no proof
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		port := l.Addr().(*net.TCPAddr).Port
		rec := van.Node{Role: role, ID: van.Empty, Hostname: "127.0.0.1", Port: port, Ports: []int32{int32(port)}, DevTypes: []int32{0}, DevIDs: []int32{0}, AuxID: -1}
		if cluster != 0 {
			rec.Endpoint = (&van.NodeExtension{Incarnation: uint32(61 + i), Cluster: cluster}).Encode()
		}
		as := ""
		if !register {
			rec.ID = 8 + i
			as = fmt.Sprintf("ps%d", rec.ID)
		}
		z := dialStranger(t, at, as)
		for k := range 5 {
			m := heartbeat([]byte(fmt.Sprintf("stepaf/1 rejoin %016x", k)), rec)
			if m.Timestamp = int32(k); register {
				m.Control.Cmd, m.Body = van.AddNode, nil
			} else {
				m.SetIncarnations(uint32(61+i), 1234)
			}
			if err := z.send(m); err != nil {
				t.Fatal(err)
			}
		}
		if clusterID == "" { // the scheduler asks the address for a proof
			_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(zmtpTime))
			in, err := l.Accept()
			if err != nil {
				t.Fatalf("the scheduler has not asked the %s for a proof: %v", role, err)
			}
			defer in.Close()
		} else {
			vantest.Eventually(t, zmtpTime, "the refusal is logged", func() bool { return strings.Contains(logged.String(), rec.Addr()) })
		}
	}
	select {
	case r := <-scheduler:
		t.Fatalf("the scheduler has formed a cluster of nodes that do not exist, with the error %v", r.err)
	default:
	}
	rest := make(chan result, 2)
	for _, role := range []string{"server", "worker"} {
		go func() {
			n, err := c.Join(within(t, time.Minute), role, 0, nil)
			rest <- result{n, err}
		}()
	}
	all := []result{<-scheduler, <-rest, <-rest}
	for _, r := range all {
		if r.err != nil {
			t.Fatal(r.err)
		}
	}
	together(t, []*postoffice.Node{all[0].n, all[1].n, all[2].n}, func(n *postoffice.Node) error { return n.Shutdown(within(t, time.Minute)) })
}

// crowd is the number of idle connections to each port.
const crowd = 600

// TestReplacementInACrowd: an attacker keeps thousands of connections open, half of them in the middle of a handshake, to the scheduler and
// to the data port of a server. A worker dies, and its replacement joins at once and exchanges data, with and without a cluster secret (A10).
func TestReplacementInACrowd(t *testing.T) {
	for name, secret := range map[string]env.Secret{"no secret": "", "secret": "correct horse battery staple"} {
		t.Run(name, func(t *testing.T) { replacementInACrowd(t, secret) })
	}
}

func replacementInACrowd(t *testing.T, secret env.Secret) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP, Set: func(cfg *postoffice.Config) { cfg.Secret = secret }})
	srv, err := af.NewServer(c.Servers[0], af.ServerOptions{})
	if err == nil {
		err = srv.Handle(func(b af.Batch) {
			if err := b.Respond(b.Pushes()); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	count := crowd // with 10,000 in all it takes as long to join
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil {
		count = min(count, int(min(limit.Cur, 1<<20))/5)
	}
	var idle []net.Conn
	defer func() {
		for _, x := range idle {
			_ = x.Close()
		}
	}()
	began := map[string][]byte{
		fmt.Sprintf("127.0.0.1:%d", c.Port): append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3}, make([]byte, 20)...), // half a greeting
		core(c.Workers[0]).DataAddr(8):      []byte("SAFT\x01\x00\x00\x00"),                                             // a part of a hello
	}
	for addr, part := range began {
		for i := range count {
			x, err := net.Dial("tcp", addr)
			if err != nil {
				if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.EADDRNOTAVAIL) {
					break
				}
				t.Fatal(err)
			}
			idle = append(idle, x)
			if i%2 == 0 {
				_, _ = x.Write(part)
			}
		}
	}
	c.Workers[0].Close()
	testcluster.Lost(t, c.Scheduler, van.WorkerID(0))
	start := time.Now()
	n, err := c.Join(within(t, zmtpTime), "worker", 0, nil)
	if err != nil {
		t.Fatalf("among %d idle connections: %v", len(idle), err)
	}
	c.Workers[0] = n
	push, pull := []byte("value"), make([]byte, 5)
	x, err := af.FromSlice(push)
	if err != nil {
		t.Fatal(err)
	}
	y, err := af.FromSlice(pull)
	if err != nil {
		t.Fatal(err)
	}
	w, err := af.NewWorker(n, af.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}}, [][]af.KeyTensor{{{Key: 1, Val: y}}})
	if err == nil {
		err = call.Wait(within(t, zmtpTime))
	}
	if err != nil || string(pull) != "value" {
		t.Fatalf("the server answers %q, %v", pull, err)
	}
	if path := van.PathTo(core(n).Van(), 8, false); path.Over != "tcp" {
		t.Errorf("data goes over %s", path.Over)
	}
	t.Logf("a replacement has joined and has exchanged data among %d idle connections within %s", len(idle), time.Since(start).Round(time.Millisecond))
	c.Finalize(t)
}
