package zmq

// Connections to peers: opening, naming and closing them.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
)

// receiveFrom starts a receiver on s, the ROUTER or peer's DEALER. With spins, its loop spins before it
// sleeps. With polls, Poll receives from it. The caller holds v.mu.
func (v *zvan) receiveFrom(s *socket, peer *conn, spins, polls bool) *receiver {
	r := newReceiver(&v.intake, s, peer, spins, polls)
	v.loops = append(v.loops, r)
	r.feed.Start()
	return r
}

// listen starts the reader of c. A worker receives answers over its DEALERs, and a process without an id
// receives the scheduler's replies over its DEALER. The caller holds v.mu.
func (v *zvan) listen(c *conn) {
	if c.sock == nil {
		return
	}
	if c.sock.sleeps != noReceiver && c.rx == nil {
		c.rx = v.receiveFrom(c.sock, c, false, van.RoleOf(c.who.Load().id) == van.Server)
	}
	c.mon.start(&v.shared, c)
}

// Connect registers the peer under id, and replaces the connection that serves id. It opens the DEALER at once if the peer is the scheduler
// or a C++ node, if this node is the scheduler, or if the replaced connection had a DEALER. Otherwise the first Send that needs the DEALER
// opens it, because data usually takes another path. Until then only the scheduler detects the peer's death.
func (v *zvan) Connect(ctx context.Context, id int, peer van.Node) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.connect(ctx, id, peer, false)
}

// dial opens the DEALER to peer id, unless it is open already, and returns the connection, or nil if there is no such peer.
func (v *zvan) dial(id int) (*conn, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.open(context.Background(), id)
}

// connect is Connect. If now is set, it opens the DEALER in any case. The caller holds v.mu, which connect releases while it waits.
func (v *zvan) connect(ctx context.Context, id int, peer van.Node, now bool) error {
	if v.closed.Load() {
		return v.connectError(id, &peer, van.ErrClosed)
	}
	if err := noIPv6(peer.Hostname); err != nil && !v.cfg.Local {
		return v.connectError(id, &peer, err)
	}
	c := &conn{peer: peer.Clone(), to: v.endpoint(&peer), ended: make(chan struct{})}
	if v.cfg.Local {
		if err := checkLocal(localPath(peer.Port)); err != nil && !errors.Is(err, fs.ErrNotExist) { // the peer may create it later
			return v.connectError(id, &peer, err)
		}
	}
	c.incarnation = v.peerIncarnation(&peer)
	c.admitted.Store(true)
	old := (*v.peers.Load())[id]
	switch {
	case old == nil:
		c.acct = newAccount()
	case old.sock == nil:
		c.acct = old.acct // answers may have been sent over the ROUTER
	default:
		c.acct = newAccount()
		now = true // only a connected DEALER reports the peer as up again to a watcher that knows old as lost
		v.drop(old, 0)
	}
	v.install(c, id, old)
	if !now && c.incarnation != 0 && id > van.SchedulerID && v.self.Role != van.Scheduler {
		return nil
	}
	opened, err := v.open(ctx, id)
	for err == nil && opened == nil && (*v.peers.Load())[c.who.Load().id] == c { // Rename was called meanwhile
		id = c.who.Load().id
		opened, err = v.open(ctx, id)
	}
	switch {
	case err != nil && (*v.peers.Load())[id] == c:
		v.replace(func(m map[int]*conn) {
			if delete(m, id); old != nil && old.sock == nil {
				m[id] = old
			}
		})
		if old != nil && old.sock == nil {
			v.guard.known(old)
		}
	case err == nil && opened == nil && v.closed.Load():
		err = v.connectError(id, &peer, van.ErrClosed)
	case err == nil && opened == nil:
		err = v.connectError(id, &peer, fmt.Errorf("%w: it was disconnected meanwhile", van.ErrUnknownPeer))
	}
	return err
}

func (n *shared) connectError(id int, peer *van.Node, err error) error {
	return &van.Error{Op: "connect", Node: van.NodeName(int(n.id.Load())), Peer: van.NodeName(id) + " at " + peer.Addr(), Err: err}
}

// install makes c the connection to peer id in place of old, which may be nil. The caller holds v.mu.
func (v *zvan) install(c *conn, id int, old *conn) {
	if old != nil {
		c.succeed(old)
	}
	v.name(c, id)
	v.replace(func(m map[int]*conn) { m[id] = c })
	v.guard.known(c)
	if old != nil && !c.admitted.Load() {
		time.AfterFunc(v.early.admitTime, func() { v.admit(c) })
	}
	if v.started {
		v.listen(c)
	}
}

// open opens the DEALER to peer id, unless it is open, and returns the connection, or nil if there is no such peer. It releases v.mu, which
// the caller holds, while it waits: the table may be another one when it returns. Before, it closes broken connections to the peer's address, and waits up to closeBrokenTimeout for
// libzmq to release them and the connections that are closing already.
// Why: a peer restarts at the same address.
//  1. The old socket to that address is broken; libzmq keeps redialing it in the background.
//  2. This node dials the new process with socket c.
//  3. The old socket reconnects after c, with the same routing id.
//  4. The peer's ROUTER hands the routing id over to the newest connection and never reads c again.
//
// Healthy connections stay, and a closed connection is made again when the new one has ended (restore): a node record that claims another
// node's address proves nothing.
func (v *zvan) open(ctx context.Context, id int) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, closeBrokenTimeout)
	defer cancel()
	for {
		current := (*v.peers.Load())[id]
		if current == nil || current.sock != nil {
			return current, nil
		}
		for _, x := range *v.peers.Load() {
			if x.to == current.to && x.lost.Load() {
				v.drop(x, 0)
			}
		}
		var other *conn
		for x := range v.leaving {
			if x.to == current.to {
				other = x
			}
		}
		if other != nil && ctx.Err() == nil {
			v.mu.Unlock()
			select {
			case <-other.ended:
			case <-ctx.Done():
			}
			v.mu.Lock()
			continue
		}
		if other != nil {
			v.log.Info("another connection to the address has not ended yet", "peer", van.NodeName(other.who.Load().id), "addr", current.to, "limit", closeBrokenTimeout)
		}
		c := &conn{peer: current.peer, to: current.to, incarnation: current.incarnation, acct: current.acct, ended: make(chan struct{})}
		if err := v.openDealer(c, id); err != nil {
			return nil, v.connectError(id, &c.peer, err)
		}
		v.install(c, id, current)
		return c, nil
	}
}

// closeBrokenTimeout is how long open waits for another connection to the same address to close. The wait is
// limited because a handler may be running, perhaps the one that called Connect.
const closeBrokenTimeout = 200 * time.Millisecond

// openDealer opens c's DEALER to peer id. The caller holds v.mu.
func (v *zvan) openDealer(c *conn, id int) error {
	z, err := v.zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		return socketError(err)
	}
	if err := errors.Join(tune(z), z.SetSndhwm(0), z.SetReconnectIvl(50*time.Millisecond),
		z.SetReconnectIvlMax(2*time.Second), v.curve.client(z)); err != nil {
		return errors.Join(err, z.Close())
	}
	v.serial++
	if own := int(v.id.Load()); own == van.Empty && id == van.SchedulerID && v.incarnation != 0 {
		if err := z.SetIdentity(newcomerID(v.incarnation)); err != nil {
			return errors.Join(err, z.Close())
		}
	} else if own != van.Empty {
		name := v.nameTo(c.incarnation)
		if own == van.SchedulerID && c.incarnation != 0 {
			name = serialName(name, uint32(v.serial))
		}
		if err := z.SetIdentity(name); err != nil {
			return errors.Join(err, z.Close())
		}
	}
	if c.incarnation != 0 {
		every, limit := v.heartbeats()
		if err := tuneNative(z, every, limit); err != nil {
			return errors.Join(err, z.Close())
		}
	}
	mon, err := v.newMonitor(v.zctx, z, connEvents)
	if err != nil {
		return errors.Join(err, z.Close())
	}
	if err := z.Connect(c.to); err != nil {
		mon.close()
		return errors.Join(addressError(err), z.Close())
	}
	sleeps := noReceiver
	if v.self.Role == van.Worker || v.id.Load() == van.Empty && id == van.SchedulerID {
		sleeps = inPoller
	}
	s, err := newSocket(z, sleeps)
	if err != nil { // newSocket has closed z
		mon.end()
		return err
	}
	c.sock, c.mon = s, mon
	v.log.Info("connect", "peer", van.NodeName(id), "addr", c.to)
	return nil
}

// restore waits until c has ended. It then reconnects the peers whose connections were closed in favor of c.
func (v *zvan) restore(c *conn) {
	<-c.ended
	v.mu.Lock()
	defer v.mu.Unlock()
	for id, other := range *v.peers.Load() {
		if other.to == c.to && other.leaves.Load() {
			v.reconnect(other, id, false)
		}
	}
}

// reconnect connects to c's peer again, unless c is not the connection to peer id any more. The caller holds v.mu.
func (v *zvan) reconnect(c *conn, id int, now bool) {
	if v.closed.Load() || (*v.peers.Load())[id] != c {
		return
	}
	if err := v.connect(context.Background(), id, c.peer, now); err != nil {
		v.log.Warn("could not reconnect to a peer", "peer", van.NodeName(id), "err", err)
	}
}

// followRefusals counts and names the failed handshakes of processes that connect to the ROUTER over a Unix socket.
func (v *zvan) followRefusals() {
	v.refusals.follow(func(event zmq4.Event, value int) {
		if err := v.handshakeError(event, value, true); err != nil {
			v.refused("a process of this user", localPath(v.self.Port), err)
		}
	})
}

// The pause before a connection is retried after a failed handshake. It doubles with each failure.
const (
	minRedial = 100 * time.Millisecond
	maxRedial = 2 * time.Second
)

// redial connects to c's peer again after a pause. libzmq makes no further attempt after a handshake that broke the
// protocol, but another process may take the address. The repetition also lets both ends learn why: the end that
// finds the fault first closes the connection, perhaps before the other end has read enough to find it.
func (v *zvan) redial(c *conn) {
	n := c.redials.Add(1)
	time.AfterFunc(min(minRedial<<min(n-1, 10), maxRedial), func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.reconnect(c, c.who.Load().id, true)
	})
}

// Alive implements van.LivenessProber. libzmq closes the connection to a peer whose threads do not
// answer its heartbeats. The peer's own connection to this node shows that it is still that process,
// not another one at its address.
func (v *zvan) Alive(id int) bool {
	c := (*v.peers.Load())[id]
	if c == nil || c.incarnation == 0 || !c.up.Load() || v.guard != nil && !c.seen() {
		return false
	}
	_, limit := v.heartbeats()
	return limit > 0
}

// Rename makes the connection to old serve new instead.
func (v *zvan) Rename(old, new int) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := (*v.peers.Load())[old]
	if c == nil {
		return &van.Error{Op: "rename", Peer: van.NodeName(old), Err: van.ErrUnknownPeer}
	}
	other := (*v.peers.Load())[new]
	v.replace(func(m map[int]*conn) { delete(m, old) })
	v.name(c, new)
	if other != nil && other != c {
		c.before.Store(other.incarnation)
	}
	v.replace(func(m map[int]*conn) { m[new] = c })
	v.guard.known(c)
	if other != nil && other != c {
		v.drop(other, 0)
	}
	return nil
}

// leaveTime is how long a closed connection may still deliver messages that were sent before Disconnect.
const leaveTime = 500 * time.Millisecond

func (v *zvan) Disconnect(id int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := (*v.peers.Load())[id]
	if c == nil {
		return
	}
	v.replace(func(m map[int]*conn) { delete(m, id) })
	v.drop(c, leaveTime)
	v.wg.Go(func() { v.restore(c) })
}

// handlerTime is how long closing a connection waits for a running handler. A handler that runs
// longer does no harm: it does not use the socket.
const handlerTime = 2 * time.Second

// drop closes a connection that is no longer in the table or about to be replaced. It does nothing
// if the connection is closing already. The receiver may be delivering a message, perhaps to the handler
// that called drop, so another goroutine waits for it. The caller holds v.mu.
func (v *zvan) drop(c *conn, linger time.Duration) {
	if c.leaves.Swap(true) {
		return
	}
	if c.sock == nil {
		close(c.ended)
		return
	}
	c.sock.stop()
	v.loops = slices.DeleteFunc(v.loops, func(r *receiver) bool { return r == c.rx })
	v.leaving[c] = struct{}{}
	stop := func() {
		if c.rx != nil {
			ctx, cancel := context.WithTimeout(context.Background(), handlerTime)
			defer cancel()
			_ = c.rx.stop(ctx) // an error means that a handler still runs, see handlerTime
		}
	}
	end := func() {
		_ = v.end(c, linger)
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.leaving, c)
		close(c.ended)
	}
	if linger == 0 || c.lost.Load() { // libzmq must stop dialing the address even while a handler runs
		v.wg.Go(stop)
		v.wg.Go(end)
		return
	}
	v.wg.Go(func() {
		stop()
		end()
	})
}

// end closes c's socket.
func (v *zvan) end(c *conn, linger time.Duration) error {
	if c.lost.Load() {
		linger = 0 // no peer would receive the messages
	}
	leaves := c.incarnation != 0 && linger > 0
	sees := c.mon.started && (leaves || linger == 0) // the monitor reports when libzmq has freed the socket
	if !sees {
		c.mon.close()
	}
	var err error
	if leaves {
		err = c.sock.leave(c, linger)
	} else {
		err = c.sock.close(linger)
	}
	if sees {
		c.mon.end()
	}
	return err
}

// admit makes c the peer, and delivers the pending messages of its process.
func (v *zvan) admit(c *conn) {
	if v.early.admit(c) && v.router != nil {
		v.router.wake()
	}
}

// Admit implements van.Admitter.
func (v *zvan) Admit(id int) {
	v.mu.Lock() // the connection may be replaced meanwhile, see dial
	defer v.mu.Unlock()
	if c := (*v.peers.Load())[id]; c != nil && !c.admitted.Load() {
		v.admit(c)
	}
}
