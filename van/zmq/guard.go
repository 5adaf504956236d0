package zmq

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	zmq4 "github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// guard limits the memory that unauthenticated connections can use in the node's ROUTER. libzmq
// assembles a multipart message of any number of parts internally, and shows it when it is
// complete. For each accepted connection, the guard therefore compares the bytes that the kernel has
// received with the bytes that were handed up as messages. When all unauthenticated connections
// together hold more than the budget, the guard closes the connection that holds most. It does not check
// members' connections.
//
// The descriptors belong to libzmq, which may close and reuse one at any time. Facts about a descriptor
// count only while the socket's cookie is the same.
type guard struct {
	n       *shared
	mon     *monitor
	poll    *os.File // an epoll instance with the unauthenticated connections
	raw     syscall.RawConn
	budget  int64
	port    int         // of the ROUTER
	drained func() bool // no message waits inside libzmq
	lines   logx.Sparse
	full    logx.Sparse
	crowd   crowd
	wg      sync.WaitGroup

	mu    sync.Mutex
	conns map[int]*incoming // by descriptor
	held  int64             // bytes that unauthenticated connections hold

	listens int  // the listening socket
	ending  int  // connections that the guard has ended, and libzmq has not
	paused  bool // nothing can connect
}

// greeting is the approximate maximum number of bytes before the first message of a connection, with CURVE.
const greeting = 1024

// lookPause is the pause between two checks of unauthenticated connections. All bytes that a connection receives meanwhile
// cost one check.
const lookPause = time.Millisecond

// newGuard returns the guard of the ROUTER z. It returns nil if unauthenticated connections have no limit.
func newGuard(n *shared, flow *flow, ctx *zmq4.Context, z *zmq4.Socket, port int) (*guard, error) {
	budget := flow.strangers
	if budget <= 0 {
		return nil, nil
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(ep, true); err != nil {
		_ = unix.Close(ep)
		return nil, os.NewSyscallError("fcntl", err)
	}
	g := &guard{n: n, budget: budget, port: port, listens: listener(port), drained: flow.drained.Load, crowd: newCrowd(n), conns: map[int]*incoming{}, poll: os.NewFile(uintptr(ep), "epoll")}
	if g.raw, err = g.poll.SyscallConn(); err == nil {
		g.mon, err = n.newMonitor(ctx, z, zmq4.EVENT_ACCEPTED|zmq4.EVENT_ACCEPT_FAILED|zmq4.EVENT_DISCONNECTED|zmq4.EVENT_CLOSED|zmq4.EVENT_HANDSHAKE_SUCCEEDED|handshakeFailed)
	}
	if err != nil {
		_ = g.poll.Close()
		return nil, err
	}
	return g, nil
}

func (g *guard) start() {
	if g == nil {
		return
	}
	g.wg.Go(g.follow)
	g.wg.Go(g.look)
	g.wg.Go(g.watchCrowd)
}

func (g *guard) close() {
	if g == nil {
		return
	}
	close(g.crowd.stop)
	g.mon.close()
	_ = g.poll.Close()
	g.wg.Wait()
}

// handshakes assigns libzmq's reports of handshakes to the ends of connections. libzmq does not say which connection a report is about, and
// does not report a connection that does not begin with ZMTP 3.
type handshakes struct {
	failed []error  // handshakes that failed and whose connections have not ended
	proved int      // handshakes that succeeded, less ended connections to which they are assigned
	silent []string // hosts of ended connections that have sent no message and have no failed handshake
}

// follow tracks the accepted connections through libzmq's events.
func (g *guard) follow() {
	var h handshakes
	g.mon.idle = func(try uint64) { h.assign(g, try) }
	g.mon.follow(func(event zmq4.Event, value int) {
		switch event {
		case zmq4.EVENT_ACCEPTED:
			g.accepted(value)
		case zmq4.EVENT_ACCEPT_FAILED:
			g.notAccepted()
		case zmq4.EVENT_HANDSHAKE_SUCCEEDED:
			h.proved++
		case zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq4.EVENT_HANDSHAKE_FAILED_AUTH, zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
			if err := g.n.handshakeError(event, value, true); err != nil {
				h.failed = append(h.failed, err)
			}
		case zmq4.EVENT_DISCONNECTED, zmq4.EVENT_CLOSED:
			host, silent := g.gone(value)
			switch {
			case !silent:
				h.proved--
			case len(h.failed) > 0:
				g.n.refused("unknown", host, h.failed[0])
				h.failed = h.failed[1:]
			case g.n.curve != nil && event == zmq4.EVENT_DISCONNECTED:
				h.silent = append(h.silent, host)
			}
		}
	})
}

// assign reports ended silent connections as refused if no successful handshake is left for them: they ended before a handshake. It is
// called when call number try of mon.next has found no event. All of libzmq's reports about connections that sent a message before that
// call have then been read.
func (h *handshakes) assign(g *guard, try uint64) {
	if len(h.silent) == 0 {
		return
	}
	proved := h.proved // on connections that have sent nothing, or have ended
	g.mu.Lock()
	for _, in := range g.conns {
		if in.taken > 0 && !in.gone && in.heardAt < try {
			proved--
		}
	}
	g.mu.Unlock()
	for _, host := range h.silent {
		if proved > 0 { // for example a probe
			proved, h.proved = proved-1, h.proved-1
			continue
		}
		g.n.refused("unknown", host, errNotZMTP)
	}
	for h.silent = h.silent[:0]; proved < 0; proved, h.proved = proved+1, h.proved+1 { // the end of such a connection was taken for that of a proved one
		g.n.refused("unknown", "unknown", errNotZMTP)
	}
}

func (g *guard) accepted(fd int) {
	cookie := cookieOf(fd)
	if cookie == 0 {
		return // it is closed already
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	in := g.conns[fd]
	if in != nil && in.cookie != cookie { // the end of the former connection was not reported yet
		g.forget(in)
	}
	in = g.at(fd, cookie)
	in.gone = false
	g.place(in)
	g.pause()
	if in.member != nil {
		in.member.arrives.Store(int64(fd) + 1)
	}
	if in.member == nil {
		// EPOLLOUT, since the kernel drops an event when libzmq has read the bytes already,
		// but not when the connection can be written to as well.
		_ = unix.EpollCtl(g.epoll(), unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLET&0xffffffff, Fd: int32(fd)})
	}
}

// epoll returns the descriptor of g.poll.
func (g *guard) epoll() int {
	ep := -1
	_ = g.raw.Control(func(fd uintptr) { ep = int(fd) })
	return ep
}

// at returns the connection with descriptor fd and the given cookie. The caller holds g.mu.
func (g *guard) at(fd int, cookie uint64) *incoming {
	in := g.conns[fd]
	if in == nil {
		in = &incoming{tcpSocket: tcpSocket{fd: fd}, name: peerName{id: van.Empty}, since: time.Now()}
		g.conns[fd] = in
		if a, err := unix.Getpeername(fd); err == nil {
			in.host = addrOf(a).Addr()
		}
	}
	in.cookie = cookie
	return in
}

// gone records that the connection of fd has ended. It returns the peer's host, and whether no message has arrived from it.
func (g *guard) gone(fd int) (host string, silent bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer g.pause()
	in := g.conns[fd]
	if in == nil {
		return "unknown", true
	}
	host, silent = "unknown", in.member == nil && in.taken == 0
	if in.host.IsValid() { // it had not ended when its address was read
		host = in.host.String()
	}
	if in.is() {
		g.leave(in)
	} else {
		g.forget(in)
	}
	return host, silent
}

// heard counts a message of size bytes that arrived on connection fd with the routing id of name. The
// connection may have ended while the message was queued. The message then does not count for the
// connection that has fd now.
func (g *guard) heard(fd int, size int64, name peerName) {
	if g == nil || fd < 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	in := g.conns[fd]
	// A connection has one name. The descriptor of a connection that has ended may belong to the next
	// connection already, even one with the same name, before the event of that is read.
	if in != nil && (in.gone || in.taken > 0 && in.name != name) {
		switch cookie := cookieOf(fd); {
		case cookie == 0, cookie == in.cookie && in.taken > 0 && in.name != name:
			return // the message arrived on a former connection with this descriptor
		case cookie != in.cookie:
			g.forget(in)
			in = nil
		}
	}
	if in == nil {
		cookie := cookieOf(fd)
		if cookie == 0 || !g.accepts(fd) {
			return // the connection has ended
		}
		in = g.at(fd, cookie)
		g.place(in)
	}
	if in.member == nil {
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && int64(info.Bytes_received) < in.taken+size {
			return // the present connection has not received that many bytes: the message arrived on a former one
		}
	}
	if in.taken == 0 {
		in.heardAt = g.mon.tries.Load()
	}
	in.name = name
	in.taken += size
	less := min(in.held, size)
	in.held -= less
	g.held -= less
	// The table is read with g.mu held. If a process becomes a member at this moment, either this code sees
	// the member, or known sees the name.
	if c := (*g.n.peers.Load())[name.id]; c != nil && c.isOf(name) {
		g.joins(in, c)
		return
	}
	g.place(in)
}

// accepts reports whether fd is a connection that the node's ROUTER has accepted.
func (g *guard) accepts(fd int) bool {
	if accepting, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || accepting != 0 {
		return false
	}
	a, err := unix.Getsockname(fd)
	return err == nil && int(addrOf(a).Port()) == g.port
}

// known records that c is a member from now on. It assigns to c the connections that carry its name.
// Two C++ StepMesh processes with one id have the same name. A connection of the former process stays
// assigned to that process, unless c has its address.
func (g *guard) known(c *conn) {
	if g == nil {
		return
	}
	name := peerName{c.who.Load().id, c.incarnation}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, in := range g.conns {
		former := in.member != nil && name.incarnation == 0 && in.member.to != c.to
		if in.name == name && !in.gone && !former {
			g.joins(in, c)
		}
	}
}

// joins makes in the connection of the member c. The caller holds g.mu.
func (g *guard) joins(in *incoming, c *conn) {
	g.held -= in.held
	in.member, in.held = c, 0
	in.uncount()
	if !in.gone {
		c.arrives.Store(int64(in.fd) + 1)
	}
	if class, ok := g.n.classOf(c); ok {
		in.setClass(class)
	}
	_ = unix.EpollCtl(g.epoll(), unix.EPOLL_CTL_DEL, in.fd, nil)
	if _, limit := g.n.heartbeats(); limit > 0 && c.incarnation != 0 {
		// If an answer is not acknowledged in time, the system closes the connection. The peer's side
		// has the same limit for requests.
		in.use(func(fd int) {
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds()))
		})
	}
}

// look checks each unauthenticated connection that has received bytes. It returns when the guard is closed.
func (g *guard) look() {
	events := make([]unix.EpollEvent, 64)
	n := 0
	try := func(ep uintptr) bool {
		var err error
		n, err = unix.EpollWait(int(ep), events, 0)
		return n > 0 || err != nil && err != unix.EINTR
	}
	for g.raw.Read(try) == nil && n >= 0 {
		for _, e := range events[:n] {
			g.check(int(e.Fd))
		}
		time.Sleep(lookPause)
	}
}

// check updates the bytes that connection fd holds. If all connections together exceed the budget, it closes some.
func (g *guard) check(fd int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	in := g.conns[fd]
	if in == nil || in.member != nil || in.ended || in.gone || !in.is() {
		return
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return
	}
	// Bytes that libzmq has not read yet count, too, since libzmq does not report what it has read.
	held := max(int64(info.Bytes_received)-in.taken-greeting, 0)
	g.held += held - in.held
	in.held = held
	if g.held > g.budget {
		g.relieve()
	}
}

// relieve closes unauthenticated connections until they hold no more than the budget. The caller holds g.mu.
func (g *guard) relieve() {
	all := append(g.crowd.silent.all(), g.crowd.heard.all()...)
	slices.SortFunc(all, func(a, b *incoming) int { return cmp.Compare(b.held, a.held) })
	excess := g.held - g.budget
	again, doubt := g.mayConnectAgain()
	for i := 0; i < len(all) && all[i].held > 0 && excess > 0; i++ {
		e := all[i]
		if spare := i < doubt || again[e.host] > 0; spare && e.held < 2*maxFrame {
			excess -= e.held // it may be a worker whose first message is long
			if i >= doubt {
				again[e.host]--
			}
			continue
		}
		excess -= e.held
		g.end(e)
	}
}

// mayConnectAgain counts, by host, the workers that may have an unrecognized connection: workers with another connection, and
// workers whose connections have broken. It also counts the running workers that have not sent a message yet: their connections
// may come from any host. A connection is recognized when its first message is read. That message may be long if the worker
// runs C++ StepMesh. The node may also not be reading, for example because its budget for received messages is
// used up. The caller holds g.mu.
func (g *guard) mayConnectAgain() (hosts map[netip.Addr]int, unseen int) {
	hosts = map[netip.Addr]int{}
	for _, c := range *g.n.peers.Load() {
		switch id := c.who.Load().id; {
		case g.n.self.Role != van.Server || id <= 0 || van.RoleOf(id) != van.Worker:
			continue // only workers send long messages, and only to servers
		case c.incarnation != 0 && g.drained():
			continue // its first message is empty
		case !c.seen() && c.up.Load():
			unseen++
			continue
		case !c.seen():
			hosts[addrOfNode(&c.peer)]++
			continue
		}
		for _, in := range g.conns {
			if in.member == c && !in.gone {
				hosts[in.host]++
				break
			}
		}
	}
	return hosts, unseen
}

// end closes an unauthenticated connection that holds too much. The caller holds g.mu.
func (g *guard) end(in *incoming) {
	held := in.held
	from := g.shut(in)
	if n, speak := g.lines.Next(); speak {
		g.n.log.Warn("closed the connection of an unknown process, which is not a member of the cluster", "from", from,
			"bytes of unfinished messages", held, "limit", fmt.Sprintf("%d for all unknown processes (STEPAF_STRANGER_BUDGET)", g.budget), "ended so far", n)
	}
}
