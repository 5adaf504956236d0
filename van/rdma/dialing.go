package rdma

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns one attempt to connect to a peer.

// Retries of the transport itself. A retry count of 7 means "forever" on some providers: a write to a dead peer would never end.
const (
	retryCount    = 6
	rnrRetryCount = 7 // forever: the peer is alive, it is only slow
)

// inlineWanted is enough for a meta with its trailer.
const inlineWanted = 512

// dialing is a connection attempt.
type dialing struct {
	p        connector
	link     *link
	serial   uint32
	qps      []verbs.QP
	dev      verbs.Device
	own      handshake
	requests [][]byte // private data of the connect requests, by queue pair
}

// dial makes a connection:
//  1. It resolves the peer's address and makes all queue pairs.
//  2. It sends the connect requests of all queue pairs.
//  3. It waits for the peer's answers, in the order of the requests, and checks each.
//
// The peer numbers the queue pairs in the order of their requests. A StepMesh node counts connect requests and established queue
// pairs with one counter: if it answers a request before it has received all of them, it loses a queue pair and crashes later.
func (p connector) dial(ctx context.Context) (*link, error) {
	v := p.v
	d := &dialing{p: p, serial: v.serials.Add(1)}
	d.link = &link{epoch: v.local.epoch + d.serial, failed: make(chan error, 1), class: v.classOf(int(p.id.Load()))}
	v.mu.Lock()
	v.addConnLocked(d.serial, &connection{link: d.link, peer: p.peer})
	v.mu.Unlock()
	err := d.run(ctx)
	if err != nil {
		d.abort()
		return nil, err
	}
	return d.link, nil
}

func (d *dialing) run(ctx context.Context) error {
	v, l := d.p.v, d.link
	if err := d.makeQueuePairs(ctx); err != nil {
		return err
	}
	d.own = v.newHandshake(l.epoch)
	l.connectedAs = d.own.node
	d.p.setConnecting(true, l.connectedAs)
	limit := v.times.connect
	if d.p.incarnation == 0 && !d.p.state.native.Load() {
		limit = v.times.connectStepMesh
	}
	if err := d.sendRequests(ctx); err != nil {
		return err
	}
	for q := range l.ids {
		if err := d.awaitAnswer(ctx, q, limit); err != nil {
			return err
		}
	}
	if l.native {
		l.dialect = &nativeOut{buffers: map[uint64]*peerBuffer{}, split: len(d.qps) > 1}
	} else {
		l.dialect = &stepmeshOut{keySizes: map[uint64]int{}}
	}
	var err error
	if l.device, err = v.owner.device(d.dev); err != nil {
		return err
	}
	n := v.cm.SendDepth / 2
	l.carried = make([]carriedCredits, n)
	l.queue, err = conn.NewSendQueue[sentMessage](d.dev, d.qps, d.serial, v.cm.SendDepth, n, stageEach)
	return err
}

// abort releases what the attempt holds.
func (d *dialing) abort() {
	v := d.p.v
	d.p.setConnecting(false, 0)
	v.removeConn(d.serial)
	for _, id := range d.link.ids {
		_ = id.Destroy()
	}
	for range d.qps {
		v.cm.Release(d.dev)
	}
}

// makeQueuePairs makes the queue pairs, which must all be on one device.
func (d *dialing) makeQueuePairs(ctx context.Context) error {
	v, l := d.p.v, d.link
	for q := range v.cfg.QPNum {
		id, err := v.cm.NewID(conn.Cookie(d.serial, q))
		if err != nil {
			return err
		}
		l.ids = append(l.ids, id)
		qp, dev, classSet, err := v.cm.Prepare(ctx, id, d.p.addr, q, l.class)
		if err != nil {
			return fmt.Errorf("queue pair %d: %w", q, err)
		}
		if q > 0 && dev != d.dev {
			v.cm.Release(dev)
			return fmt.Errorf("queue pair %d was assigned to device %s, the others to %s", q, dev.Name(), d.dev.Name())
		}
		d.qps, d.dev = append(d.qps, qp), dev
		if !classSet {
			l.class = unset
		}
	}
	return nil
}

// sendRequests sends the connect requests. It sends no further ones if the first is rejected at once.
func (d *dialing) sendRequests(ctx context.Context) error {
	v, ids := d.p.v, d.link.ids
	d.requests = make([][]byte, len(ids))
	for q, id := range ids {
		if q == 1 {
			if err := v.cm.WaitRejected(ctx, ids[0]); err != nil {
				return fmt.Errorf("queue pair 0: connect: %w", v.verifyRejection(err, d.requests[0]))
			}
		}
		d.own.qp = q
		d.requests[q] = requestData(v.secret.guard.Keys, &d.own, d.p.addr)
		if err := id.Connect(verbs.ConnParam{Private: d.requests[q], RetryCount: retryCount, RNRRetryCount: rnrRetryCount}); err != nil {
			return fmt.Errorf("queue pair %d: connect: %w", q, err)
		}
	}
	return nil
}

// awaitAnswer waits for the answer for queue pair q and checks which process has sent it.
func (d *dialing) awaitAnswer(ctx context.Context, q int, limit time.Duration) error {
	v, p, l := d.p.v, d.p, d.link
	ev, err := v.cm.Wait(ctx, l.ids[q], verbs.Established, limit)
	if err != nil {
		return fmt.Errorf("queue pair %d: connect: %w", q, v.verifyRejection(err, d.requests[q]))
	}
	answer, err := decodeHandshake(ev.Private)
	l.native = err == nil && answer.native
	if err := p.verifyAcceptor(l, q, &answer, ev.Private, d.requests[q]); err != nil {
		return fmt.Errorf("queue pair %d: %w", q, err)
	}
	if why := v.misread(&answer, int(p.id.Load())); why != "" {
		return fmt.Errorf("queue pair %d: %s", q, why)
	}
	l.process = answer.incarnation
	l.numbered = l.native && answer.incarnation != 0 && v.local.incarnation != 0
	p.state.native.Store(l.native)
	if l.native && p.incarnation != 0 && answer.incarnation != 0 && answer.incarnation != p.incarnation && !failpoint.On("fencing") {
		return fmt.Errorf("queue pair %d: another process answers than the one in the node table (incarnation %#x, want %#x)", q, answer.incarnation, p.incarnation)
	}
	if v.cfg.SplitQPLag && !d.qps[q].Pinned() { // known only after the connection is established
		v.warnPin.Do(func() {
			v.log.Info("rdma: STEPMESH_SPLIT_QP_LAG: queue pairs are not pinned to ports: not a bonded mlx5 device, or no libmlx5")
		})
	}
	return nil
}
