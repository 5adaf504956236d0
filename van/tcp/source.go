package tcp

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// source is the engine's source of messages that arrive on connections. It also continues incomplete writes. It
// waits for events of all connections with one epoll instance, edge-triggered.
type source struct {
	n      *common
	feed   *engine.Feed[*inbound]
	ep     int         // the epoll instance
	wake   int         // an eventfd that ends a sleep
	isOpen atomic.Bool // ep and wake are descriptors

	deliver van.Receiver
	left    func(c *inConn) // called when c has ended, before its descriptor is closed

	mu    sync.Mutex                    // guards changes of conns, joins
	conns atomic.Pointer[map[int32]any] // by descriptor: *inConn or *outConn
	joins []*inConn                     // connections to read from now on
	any   atomic.Bool                   // joins is not empty

	// The holder of the feed uses these.
	ready  []*inConn // there may be something to read
	next   int       // of ready
	takes  int       // calls of Take since the last poll, plus one for each bytesEach received bytes
	events [64]unix.EpollEvent

	blamed logx.Sparse
}

func (s *source) open(e *engine.Engine, sender func(id int) *sender) (err error) {
	s.conns.Store(&map[int32]any{})
	if s.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		_ = unix.Close(s.ep)
		return err
	}
	s.feed = engine.NewFeed(e, s, engine.FeedOptions{Polls: true, Spins: true, DetectsBusyCores: true})
	loop := s.feed.Loop
	loop.Budget = engine.NewBudget(int64(s.n.cfg.RecvBudgetPeer), int64(s.n.cfg.RecvBudget))
	loop.Weight = (*inbound).weight
	loop.Paused = func(queue *engine.PeerQueue[*inbound], bytes int64) {
		sender(queue.ID).blame.Watch(queue.Paused, queue.Slow, func() { s.blame(queue, bytes) })
	}
	loop.Resumed = func(*engine.PeerQueue[*inbound]) { s.feed.Wake() }
	s.isOpen.Store(true)
	return nil
}

func (s *source) blame(queue *engine.PeerQueue[*inbound], bytes int64) {
	if n, speak := s.blamed.Next(); speak {
		s.n.log.Warn("a peer is not read for now: its handler is slow", "peer", van.NodeName(queue.ID), "bytes that wait for it", bytes,
			"STEPAF_RECV_BUDGET_PEER", s.n.cfg.RecvBudgetPeer, "of all peers", s.feed.Loop.Budget.Used(), "STEPAF_RECV_BUDGET", s.n.cfg.RecvBudget, "so far", n)
	}
}

// add watches c, a *inConn or *outConn with descriptor fd.
func (s *source) add(fd int, c any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	conns := maps.Clone(*s.conns.Load())
	conns[int32(fd)] = c
	s.conns.Store(&conns)
	events := uint32(unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET&0xffffffff)
	if in, ok := c.(*inConn); ok {
		s.joins = append(s.joins, in)
		s.any.Store(true)
	} else {
		events |= unix.EPOLLOUT
	}
	err := unix.EpollCtl(s.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
	s.feed.Wake()
	return err
}

// remove ends add. The caller closes fd after it.
func (s *source) remove(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	conns := maps.Clone(*s.conns.Load())
	delete(conns, int32(fd))
	s.conns.Store(&conns)
	_ = unix.EpollCtl(s.ep, unix.EPOLL_CTL_DEL, fd, nil)
}

// join adds new connections to the list of connections that may have something to read.
func (s *source) join() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.joins {
		s.mark(c)
	}
	s.joins = nil
	s.any.Store(false)
}

func (s *source) mark(c *inConn) {
	if !c.ready && c.fd >= 0 {
		c.ready = true
		s.ready = append(s.ready, c)
	}
}

// poll takes events that are there, and reports whether there were any.
func (s *source) poll() bool {
	s.takes = 0
	n, err := unix.EpollWait(s.ep, s.events[:], 0)
	if err != nil || n <= 0 {
		return false
	}
	conns := *s.conns.Load()
	for i := range s.events[:n] {
		e := &s.events[i]
		switch c := conns[e.Fd].(type) {
		case *inConn:
			c.empty, c.hangup = false, c.hangup || e.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
			s.mark(c)
		case *outConn:
			if e.Events&^unix.EPOLLOUT != 0 {
				c.broke()
			}
			if e.Events&unix.EPOLLOUT != 0 {
				c.resume()
			}
		}
	}
	return true
}

// pollEach is the number of calls of Take after which Take polls for new events although connections are ready. Otherwise a peer whose
// socket is never empty would delay all other peers and blocked writes. bytesEach is the number of received bytes that count as a call.
const (
	pollEach  = 64
	bytesEach = 16 << 10
)

// Take implements engine.Source.
func (s *source) Take(_ time.Duration, poll bool) (*inbound, *engine.PeerQueue[*inbound], engine.PollResult) {
	if s.any.Load() {
		s.join()
	}
	if s.takes++; s.takes >= pollEach {
		s.poll()
	}
	found := engine.Nothing
	for try := 0; try < 2; try++ {
		for n := len(s.ready); n > 0; n-- {
			if s.next++; s.next >= len(s.ready) {
				s.next = 0
			}
			c := s.ready[s.next]
			if poll && c.from.undelivered.Load() != 0 || !s.feed.Loop.MayRead(&c.from.queue) {
				continue
			}
			p, out := c.read()
			s.takes += c.got / bytesEach
			switch out {
			case message:
				return p, &c.from.queue, engine.Message
			case progress:
				found = engine.Progress
				continue
			case ended:
				s.end(c)
			}
			c.ready = false
			s.ready = slices.Delete(s.ready, s.next, s.next+1)
			s.next--
		}
		if found != engine.Nothing || try > 0 || !s.poll() {
			break
		}
	}
	if s.next < 0 {
		s.next = 0
	}
	return nil, nil, found
}

// end closes a connection that has ended.
func (s *source) end(c *inConn) {
	if c.cur != nil {
		s.n.release(c.cur)
		c.cur, c.rest, c.place = nil, nil, nil
	}
	if c.malformed != nil {
		s.n.stats.malformed.Add(1)
		s.n.rarely(logx.PeerKind(c.malformed)).Warn("a connection for data ends", "peer", van.NodeName(c.from.id), "err", c.malformed)
	}
	s.remove(c.fd)
	s.left(c)
	_ = unix.Close(c.fd)
	c.fd = -1
}

// Arm implements engine.Source.
func (s *source) Arm(engine.Sleeper) bool {
	if s.any.Load() {
		return true
	}
	s.poll()
	for _, c := range s.ready {
		if s.feed.Loop.MayRead(&c.from.queue) {
			return true
		}
	}
	return false
}

// Disarm implements engine.Source.
func (s *source) Disarm() {}

// Sleep implements engine.Source.
func (s *source) Sleep(_ engine.Sleeper, arm func() bool, limit time.Duration) {
	timeout := -1
	if limit > 0 {
		timeout = max(int(limit/time.Millisecond), 1)
	}
	if arm() {
		return
	}
	fds := [2]unix.PollFd{{Fd: int32(s.ep), Events: unix.POLLIN}, {Fd: int32(s.wake), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds[:], timeout); err == nil && fds[1].Revents != 0 {
		var b [8]byte
		_, _ = unix.Read(s.wake, b[:])
	}
}

// Wake implements engine.Source.
func (s *source) Wake(engine.Sleeper) {
	if s.isOpen.Load() {
		one := [8]byte{1}
		_, _ = unix.Write(s.wake, one[:])
	}
}

// Deliver implements engine.Source.
func (s *source) Deliver(p *inbound, inPoll bool) {
	c := p.conn
	c.mu.Lock()
	fenced := c.fenced
	c.mu.Unlock()
	if fenced {
		s.n.stats.fenced.Add(1)
		s.n.release(p)
		return
	}
	if err := s.n.finishPlaces(p); err != nil { // its request has ended
		s.n.stats.late.Add(1)
		s.n.rarely("late").Info("dropped an answer", "err", err, "from", van.NodeName(c.from.id), "handler", p.msg.Timestamp)
		s.n.release(p)
		return
	}
	s.n.adopt(p)
	p.msg.InPoll = inPoll
	s.n.stats.received(p.msg.PayloadLen())
	s.deliver(&p.msg)
	p.msg.Release()
}

// Discard implements engine.Source.
func (s *source) Discard(p *inbound) { s.n.release(p) }

// close frees the epoll instance. The feed is held, and every connection has been removed.
func (s *source) close() {
	s.isOpen.Store(false)
	_ = unix.Close(s.ep)
	_ = unix.Close(s.wake)
}
