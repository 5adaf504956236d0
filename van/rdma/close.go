package rdma

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the end of a van.

const (
	// maxLinger is the longest that Close waits for messages to leave.
	maxLinger = 5 * time.Second

	// teardownTime is how long connections may take to end after that, stopTime how long the loops and Polls of devices may then
	// take. Longer means that a function of the application, a Done or a handler, does not return.
	teardownTime = 3 * time.Second
	stopTime     = time.Second
)

// Close ends everything. It first waits for queued messages to be sent, until ctx ends or for maxLinger. If a function of the
// application does not return, Close returns an error, and the devices are closed when that function has returned.
func (v *rvan) Close(ctx context.Context) error {
	v.mu.Lock()
	if v.closed.Swap(true) {
		v.mu.Unlock()
		return nil
	}
	for _, p := range *v.tables.peers.Load() {
		v.closingPeers[p] = true
	}
	v.tables.peers.Store(&map[int]*peer{})
	peers := slices.Collect(maps.Keys(v.closingPeers))
	v.mu.Unlock()
	if v.cm.Channel == nil {
		return nil
	}
	v.liveness.stop()
	linger, cancel := context.WithTimeout(ctx, maxLinger)
	defer cancel()
	var listen error
	tornDown, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		var all sync.WaitGroup
		for _, p := range peers {
			all.Go(func() { connector{p}.drainAndClose(linger) })
		}
		all.Wait()
		listen = v.accepted.listen.Destroy()
		v.drainEvents()
		v.mu.Lock()
		ins := v.accepted.inbounds
		v.accepted.inbounds = map[string]*inbound{}
		v.mu.Unlock()
		for _, in := range ins {
			in.fail(van.ErrClosed)
		}
		v.wg.Wait()
		close(tornDown)
		v.stopDevices()
	}()
	select {
	case <-tornDown:
	case <-linger.Done():
	}
	ended := func(what chan struct{}, limit time.Duration) bool {
		select {
		case <-what:
			return true
		case <-time.After(limit):
			return false
		}
	}
	timeout := &van.Error{Op: "close", Node: van.NodeName(int(v.local.id.Load())), Err: van.ErrTimeout, Limit: teardownTime,
		Detail: "connections do not end: a Done function or a handler has not returned; the RDMA devices are closed when it has"}
	if ended(tornDown, teardownTime) {
		if ended(stopped, stopTime) {
			return errors.Join(listen, v.closeDevices())
		}
		timeout.Limit, timeout.Detail = stopTime, "receiving does not end: a Done function or a handler has not returned; the RDMA devices are closed when it has"
	}
	go func() {
		<-stopped
		if err := v.closeDevices(); err != nil {
			v.log.Warn("rdma: closing the devices failed", "err", err)
		}
	}()
	return timeout
}

// stopDevices ends the loops of the devices, and waits for the Polls that use the devices.
func (v *rvan) stopDevices() {
	v.mu.Lock()
	v.delivery.noMoreDevices = true
	v.mu.Unlock()
	for _, d := range *v.tables.devices.Load() {
		d.stop()
	}
}

// closeDevices closes the devices and the connection manager. Nothing uses them any more.
func (v *rvan) closeDevices() error {
	var errs []error
	for _, d := range *v.tables.devices.Load() {
		errs = append(errs, d.close())
	}
	errs = append(errs, v.cm.Channel.Close())
	<-v.eventsEnded
	return errors.Join(errs...)
}

// drainEvents waits until all earlier events of the connection manager have been handled. Each connect request holds an ID, and all
// IDs must be destroyed before the channel is closed.
func (v *rvan) drainEvents() {
	to := v.cm.Source
	if !to.IsValid() { // this node listens at all addresses; any device works
		to = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	serial := v.serials.Add(1)
	defer v.removeConn(serial)
	c, err := v.cm.NewID(conn.Cookie(serial, 0))
	if err != nil {
		return
	}
	defer c.Destroy()
	if c.ResolveAddr(netip.Addr{}, netip.AddrPortFrom(to, uint16(v.local.self.Port)), conn.ResolveTime) == nil {
		_, _ = v.cm.Wait(context.Background(), c, verbs.AddrResolved, 2*conn.ResolveTime)
	}
}
