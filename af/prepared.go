package af

// Prepared: tensors that are checked once and sent repeatedly.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// ErrStarted: a prepared PushPull was started again before the call of its last Start was waited for.
var ErrStarted = errors.New("exchange started already")

// Prepared is a PushPull that is prepared once and started repeatedly, one call at a time. Prepare checks its
// tensors, keys and servers. All methods are safe for concurrent use.
type Prepared struct {
	w          *Worker
	push, pull []KeyTensor // pull is server-major, as in batch
	to         To          // nil for all servers
	servers    []int       // their node ids
	defaults   options
	device     bool  // a tensor lies on the node's device
	rows       int64 // number of rows of each tensor, -1 if one has no dimensions

	started  atomic.Bool            // a call is in flight, or not waited for; its batch clears it
	byStream atomic.Pointer[rounds] // nil before the first QueueStart; stored under mu

	mu     sync.Mutex // guards closed, and the elements of the lists
	closed bool
}

// Prepare checks the lists and options of a PushPull, and returns a Prepared one, whose calls
// send and fill these tensors. The lists are copied; the tensors' memory is held until
// Close. A Stream among the options is that of all calls that name none.
func (w *Worker) Prepare(push []KeyTensor, pull [][]KeyTensor, opts ...CallOption) (*Prepared, error) {
	o, err := with(options{limit: w.timeout}, opts)
	x := &Prepared{w: w, to: slices.Clone(o.to), defaults: options{stream: o.stream, limit: o.limit}}
	b := w.calls.take()
	defer b.unref()
	if err == nil {
		err = b.address(o.to)
	}
	if err == nil {
		x.device, err = b.fill(push, pull)
	}
	if err != nil {
		return nil, &van.Error{Op: "prepare", Node: w.node.Name(), Err: err}
	}
	x.servers, x.push, x.pull = slices.Clone(b.servers), slices.Clone(b.pushes), slices.Clone(b.pulls)
	x.rows = math.MaxInt64
	for _, list := range [][]KeyTensor{x.push, x.pull} {
		for i := range list {
			t := &list[i].Val
			t.mem.Retain()
			x.rows = min(x.rows, t.rows())
		}
	}
	if log := w.node.Log(); log.Enabled(context.Background(), slog.LevelDebug) { // at level 1 the transports log the path to each peer
		log.Debug("prepared an exchange", "path", x.Path(), "tensors", x.tensors())
	}
	return x, nil
}

// Path returns how data goes to the servers at present, and why not over a faster path, as Stats does: "messages: server
// 0: shared memory; server 1: tcp (not over shared memory: ...)". A path that is "none" is chosen by the first data. If
// tensors are on the device, Path also says whether their values go through host memory. It does not wait.
func (x *Prepared) Path() string {
	var paths []string
	servers := map[string]string{}
	for _, id := range x.servers {
		p := x.w.node.PathNow(id)
		path := p.String()
		switch {
		case !x.device || p.Over == "":
		case p.Device:
			path += ", directly from the device"
		default:
			path += ", through host memory"
		}
		if servers[path] == "" {
			paths = append(paths, path)
		} else {
			servers[path] += ", "
		}
		servers[path] += fmt.Sprint("server ", van.RankOf(id))
	}
	for i, p := range paths {
		paths[i] = servers[p] + ": " + p
	}
	return "messages: " + strings.Join(paths, "; ")
}

// Start sends the exchange as PushPull would, and returns at once. The call must be waited
// for before the next Start, which is ErrStarted until then. A lost server is an error of
// Wait; when another process has taken its place, the next call goes to that one.
func (x *Prepared) Start(opts ...StartOption) (Call, error) {
	if err := x.Check(); err != nil {
		return Call{}, err
	}
	o, err := with(x.defaults, opts)
	if err == nil && o.cut && (o.rows < 0 || int64(o.rows) > x.rows) {
		err = x.tooMany(o.rows)
	}
	var b *batch
	if err == nil {
		b, err = x.next(o, nil)
	}
	if err != nil {
		return Call{}, &van.Error{Op: "start exchange", Node: x.w.node.Name(), Err: err}
	}
	return b.start(x.device, o)
}

// next creates the batch of a Start, or of a round that a stream has started, and retains its memory.
func (x *Prepared) next(o options, r *rounds) (*batch, error) {
	if err := x.w.calls.mayLeaveOut(x.to); err != nil { // a server may have been replaced since
		return nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.closed:
		return nil, fmt.Errorf("exchange of %s: %w", x.tensors(), van.ErrClosed)
	case x.started.Swap(true):
		return nil, fmt.Errorf("%w: exchange of %s: wait for its last call first", ErrStarted, x.tensors())
	}
	b := x.w.calls.take()
	b.started, b.byStream, b.servers = &x.started, r, x.servers
	b.pushes = append(b.pushes[:0], x.push...)
	b.pulls = append(b.pulls[:0], x.pull...)
	if o.cut {
		for i := range b.pushes {
			b.pushes[i].Val.head(int64(o.rows))
		}
		for i := range b.pulls {
			b.pulls[i].Val.head(int64(o.rows))
		}
	}
	b.retain()
	return b, nil
}

// Check returns, once, why rounds that streams have started have failed, or nil: the first error, and the number of
// later ones since the last Check. It may be called after Close, and does not wait. Start, QueueStart and QueueWait
// check first, too.
func (x *Prepared) Check() error {
	if r := x.byStream.Load(); r != nil {
		return r.check()
	}
	return nil
}

// Close releases the memory of the tensors; a call in flight continues and retains it until its end. Later calls of
// Start fail, and replayed graphs do not start or wait for anything. Close does not wait, and returns nil; Check returns
// errors of rounds.
func (x *Prepared) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil
	}
	x.closed = true
	for _, list := range [][]KeyTensor{x.push, x.pull} {
		for i := range list {
			list[i].Val.mem.Release()
		}
		clear(list)
	}
	if r := x.byStream.Load(); r != nil {
		r.gone.Store(true)
	}
	return nil
}

// tensors describes the exchange in errors.
func (x *Prepared) tensors() string {
	return fmt.Sprintf("%d push and %d pull tensors", len(x.push), len(x.pull))
}

// tooMany is the error of a call with n rows.
func (x *Prepared) tooMany(n Rows) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	for k, list := range [][]KeyTensor{x.push, x.pull} {
		for i := range list {
			t, has := &list[i].Val, "no dimensions"
			most := t.rows()
			if most >= 0 {
				has = fmt.Sprint(most)
			}
			if 0 <= n && most < int64(n) && !x.closed {
				return fmt.Errorf("%w: %d rows of %s tensor %d (key %d), which is %s: it has %s", van.ErrInvalid, n, [...]string{"push", "pull"}[k], i, list[i].Key, t.String(), has)
			}
		}
	}
	return fmt.Errorf("%w: %d rows, want 0 to %d", van.ErrInvalid, n, max(x.rows, 0))
}
