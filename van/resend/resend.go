package resend

// The wrapper around a van: its options, start and end, and the handling of acknowledgements.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// Defaults of Options; those of ps-lite where it has them.
const (
	DefaultTimeout  = time.Second
	DefaultMaxTries = 10
)

// Options are the timeouts of a Van. The zero Options are the defaults.
type Options struct {
	// Timeout is PS_RESEND_TIMEOUT: the time without an acknowledgement after which a
	// message is resent.
	Timeout time.Duration
	// MaxTries is the number of times that a message is sent before it fails.
	MaxTries int
	// CloseWait limits how long Close waits for the last acknowledgements; by default
	// three Timeouts. A peer that has also closed never acknowledges.
	CloseWait time.Duration
	// OnFail is called with messages that failed: not acknowledged after MaxTries (err
	// wraps van.ErrTimeout), or their peer is lost (van.ErrPeerLost). It must not block, and
	// may keep meta.
	OnFail func(peer int, meta *van.Meta, err error)
	// Expand says that the wrapped van sends a batch to any node as several messages, which are acknowledged one by one.
	Expand bool
	Log    *slog.Logger
}

// Van wraps a van and resends messages.
type Van struct {
	inner van.Van
	opts  Options
	log   *slog.Logger
	up    van.Receiver
	watch func(id int, up bool, cause error)

	id      atomic.Int64
	enabled atomic.Bool
	warned  atomic.Bool
	twice   logx.Sparse // log lines about duplicates
	again   logx.Sparse // log lines about repeats
	closing sync.Once

	kept    table
	seen    memory
	quit    chan struct{}
	monitor sync.WaitGroup
}

var (
	_ van.Van         = (*Van)(nil)
	_ van.Wrapper     = (*Van)(nil)
	_ van.PeerWatcher = (*Van)(nil)
	_ van.Canceler    = (*Van)(nil)
)

// New wraps inner, which must not have been started. Until Enable is called,
// messages pass unchanged. Use van.As to find the optional abilities of inner.
func New(inner van.Van, opts Options) *Van {
	if opts.Timeout <= 0 {
		opts.Timeout = DefaultTimeout
	}
	if opts.MaxTries <= 0 {
		opts.MaxTries = DefaultMaxTries
	}
	if opts.CloseWait <= 0 {
		opts.CloseWait = 3 * opts.Timeout
	}
	opts.Log = cmp.Or(opts.Log, slog.New(slog.DiscardHandler))
	v := &Van{inner: inner, opts: opts, log: opts.Log,
		kept: table{timeout: opts.Timeout, byKey: map[key]*entry{}, sending: map[*entry]int{}, conns: map[int]string{}, unresponsive: map[int]bool{}, wake: make(chan struct{}, 1)},
		seen: memory{life: time.Duration(opts.MaxTries) * opts.Timeout, peers: map[int]*peer{}}, quit: make(chan struct{})}
	v.id.Store(van.Empty)
	if w, ok := van.As[van.PeerWatcher](inner); ok {
		w.WatchPeers(v.peerChanged)
	}
	return v
}

// Enable begins to keep and to acknowledge messages. Call it when the node's
// start-up is complete, as ps-lite does. A second call does nothing.
func (v *Van) Enable() {
	v.kept.mu.Lock()
	defer v.kept.mu.Unlock()
	if v.kept.closed || v.enabled.Swap(true) {
		return
	}
	v.monitor.Add(1)
	go v.monitorRun()
}

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.inner }

// WatchPeers implements van.PeerWatcher, whether or not the wrapped van does: a peer
// is also reported as down when a message to it times out, and as up when it
// acknowledges one again.
func (v *Van) WatchPeers(f func(id int, up bool, cause error)) { v.watch = f }

// Type implements van.Van.
func (v *Van) Type() string { return v.inner.Type() }

// Reorders implements van.Reorderer: a lost message arrives after later ones.
func (v *Van) Reorders() bool { return true }

// Bind implements van.Van.
func (v *Van) Bind(ctx context.Context, self van.Node) (int, error) {
	v.id.Store(int64(self.ID))
	return v.inner.Bind(ctx, self)
}

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	v.up = recv
	v.inner.Start(v.receive)
}

// SetID implements van.Van.
func (v *Van) SetID(id int) {
	v.warnAbout(id)
	v.id.Store(int64(id))
	v.inner.SetID(id)
}

// warnAbout warns once of ids that signatures cannot distinguish.
func (v *Van) warnAbout(id int) {
	if id > 255 && id != van.Empty && !v.warned.Swap(true) {
		v.log.Warn("PS_RESEND distinguishes only instance ranks 0 to 123", "node", van.NodeName(id))
	}
}

// Connect implements van.Van. A second connection under the same id counts as a restarted
// peer, whose timestamps start again, unless its record has the same incarnation.
// Kept messages are resent to it only if its address is the same.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	v.warnAbout(id)
	if err := v.inner.Connect(ctx, id, peer); err != nil {
		return err
	}
	addr := peer.Addr()
	old, again := v.kept.connect(id, addr)
	v.seen.begin(id, &peer)
	if again && old != addr {
		v.failAll(id, &van.Error{Op: "connection", Peer: van.NodeName(id) + " at " + old, Detail: "replaced by " + addr, Err: van.ErrPeerLost})
	}
	return nil
}

// Rename implements van.Van.
func (v *Van) Rename(old, id int) error {
	if err := v.inner.Rename(old, id); err != nil || old == id {
		return err
	}
	drop(v.kept.take(id, false))
	drop(v.kept.take(old, false))
	v.kept.rename(old, id)
	v.seen.rename(old, id)
	return nil
}

// Disconnect implements van.Van. Messages that were not acknowledged are dropped.
func (v *Van) Disconnect(id int) {
	v.inner.Disconnect(id) // first: after this no message is sent to it, nor kept
	drop(v.kept.take(id, false))
	v.kept.disconnect(id) // last: Cancel searches the entries of connected peers
	v.seen.remove(id)
}

// Close implements van.Van. It first waits for acknowledgements, no longer than
// Options.CloseWait.
func (v *Van) Close(ctx context.Context) error {
	v.closing.Do(func() {
		v.kept.mu.Lock()
		v.kept.closed = true
		v.kept.mu.Unlock()
		v.awaitAcks(ctx)
		close(v.quit)
		v.monitor.Wait()
		drop(v.kept.take(0, true))
	})
	return v.inner.Close(ctx)
}

func (v *Van) awaitAcks(ctx context.Context) {
	limit := time.After(v.opts.CloseWait)
	v.kept.mu.Lock()
	var probes []*entry
	for _, e := range v.kept.byKey {
		if e.probe {
			probes = append(probes, e)
		}
	}
	for _, e := range probes {
		if next, ok := v.kept.removeLocked(e); ok {
			defer v.launch(next)
			defer e.release()
		}
	}
	count := v.kept.count
	none := make(chan struct{})
	v.kept.none = none
	v.kept.mu.Unlock()
	if count == 0 {
		return
	}
	select {
	case <-none:
		return
	case <-limit:
	case <-ctx.Done():
	}
	v.log.Warn("closed with messages that were not acknowledged", "node", van.NodeName(int(v.id.Load())))
}

// receive handles a message that the wrapped van has received.
func (v *Van) receive(m *van.Message) {
	if m.Control.Cmd == van.Ack {
		v.acknowledged(m) // first, as long as a probe is kept
	}
	if v.kept.anyUnresponsive.Load() && !v.seen.fromOtherProcess(m) {
		v.received(m.Sender)
	}
	if m.Control.Cmd == van.Ack {
		return
	}
	if !tracked(m) || m.Sender == van.Empty || m.Sender < 0 {
		v.up(m)
		return
	}
	if isProbe(m, m.Sender, int(v.id.Load())) {
		if v.enabled.Load() {
			v.acknowledge(m)
		}
		return
	}
	duplicate, other := v.seen.note(m)
	if v.enabled.Load() {
		v.acknowledge(m)
	}
	if isRelease(m) {
		v.released(m)
	}
	// A replaced process learns that in answer to its record. That answer may have been lost, so a repeated record is delivered.
	repeated := other && m.Control.Cmd == van.Heartbeat && len(m.Control.Nodes) > 0
	if duplicate && !repeated && !failpoint.On("duplicate") {
		if n, show := v.twice.Next(); show {
			v.log.Warn("dropped a duplicate message", "from", van.NodeName(m.Sender), "msg", &m.Meta, "so far", n)
		}
		return
	}
	v.up(m)
}

var acks = sync.Pool{New: func() any { return new(van.Message) }}

func (v *Van) acknowledge(m *van.Message) {
	ack := acks.Get().(*van.Message)
	ack.Reset()
	ack.Receiver = m.Sender
	ack.Control.Cmd = van.Ack
	ack.Control.MsgSig = signature(&m.Meta, m.Sender, int(v.id.Load()))
	if from, to := m.Incarnations(); from != 0 && to != 0 {
		ack.SetIncarnations(to, from)
	}
	if err := v.inner.Send(ack); err != nil {
		v.log.Debug("no acknowledgement sent", "err", err)
	}
	acks.Put(ack)
}

// peerChanged is called by the wrapped van.
func (v *Van) peerChanged(id int, up bool, cause error) {
	if !up && !errors.Is(cause, syscall.ECONNREFUSED) { // a refused connection has lost nothing
		if cause == nil {
			cause = fmt.Errorf("connection to %s: %w", van.NodeName(id), van.ErrPeerLost)
		}
		lost := cause
		if !errors.Is(lost, van.ErrPeerLost) { // transports report only the cause
			lost = fmt.Errorf("%w: %w", van.ErrPeerLost, cause)
		}
		v.failAll(id, lost)
	}
	if v.watch != nil {
		v.watch(id, up, cause)
	}
}
