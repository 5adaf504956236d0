package real

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/fserver/core"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/pairs"
	"github.com/stepaf/stepaf-go/tests/internal/ranks"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// loads run on a worker until others take their place.
type loads struct {
	ctx    context.Context
	cancel context.CancelFunc
}

// setLoads makes l the loads that run. Calls of other loads in flight go on.
func (n *node) setLoads(l []plan.Load) {
	if !n.isWorker() {
		return
	}
	x := &loads{}
	x.ctx, x.cancel = context.WithCancel(n.ctx)
	n.mu.Lock()
	old := n.loads
	n.loads = x
	n.mu.Unlock()
	if old != nil {
		old.cancel()
	}
	for i := range l {
		if l[i].Collectives {
			go n.collect(x.ctx, &l[i])
			continue
		}
		left := &atomic.Int64{}
		if left.Store(int64(l[i].Rounds)); l[i].Rounds == 0 {
			left.Store(math.MaxInt64)
		}
		for w := range max(l[i].Window, 1) {
			go n.load(x.ctx, &l[i], i<<8|w, left)
		}
	}
}

// lane makes one call after the other, with tensors of its own, or over kv with values of keys.
type lane struct {
	n              *node
	push, pull     []af.KeyTensor // nil over kv
	pairs          *pairs.Call    // over kv only
	pushed, pulled [][]byte       // the bytes of all
	pushes, pulls  int            // of each server
	index, size    int            // of the lane, and of each tensor
	servers        int
	limit          time.Duration
	failed         bool          // the last call has
	current        atomic.Uint64 // the call in flight, 0 for none
}

// untouched is the byte that a worker writes to tensors that are its own again.
const untouched = 0xee

// callGrace is how much longer than its limit a call may take on a busy machine.
const callGrace = 10 * time.Second

// limit of a call, and size of a tensor, that a load does not name.
const (
	defaultLimit = 5 * time.Second
	defaultSize  = 1024
)

func (n *node) lane(p *plan.Load, index int) *lane {
	l := &lane{n: n, index: index, servers: n.cfg().NumServers, limit: p.Limit.Or(defaultLimit)}
	l.size, l.pushes, l.pulls = max(p.Size, value.Head), p.Pushes, max(p.Pulls, 1)
	if p.Size == 0 {
		l.size = defaultSize
	}
	if l.pushes == 0 && (p.Pulls == 0 || n.keyValue != nil) {
		l.pushes = 1
	}
	l.newPushes()
	if n.keyValue != nil {
		return l
	}
	for range l.servers {
		for i := range l.pulls {
			l.pull, l.pulled = l.add(l.pull, l.pulled, index<<16|1<<15|i)
		}
	}
	return l
}

// newPushes gives the lane new memory for its pushes. Over kv, answers are written there,
// too.
func (l *lane) newPushes() {
	if l.n.keyValue != nil {
		l.pairs = pairs.New(l.n.n, l.n.keyValue, l.size, l.pushes, l.pulls)
		l.pushed, l.pulled = l.pairs.Pushes, l.pairs.Pulls
		l.clear()
		return
	}
	l.push, l.pushed = nil, nil
	for i := range l.pushes {
		l.push, l.pushed = l.add(l.push, l.pushed, l.index<<16|i)
	}
}

// add makes a tensor.
func (l *lane) add(list []af.KeyTensor, all [][]byte, key int) ([]af.KeyTensor, [][]byte) {
	b := bytes.Repeat([]byte{untouched}, l.size)
	x, err := af.FromSlice(b)
	if err != nil {
		l.n.wrong("tensor of %d bytes: %v", l.size, err)
	}
	return append(list, af.KeyTensor{Key: uint64(key), Val: x}), append(all, b)
}

func (n *node) cfg() *postoffice.Config {
	if n.session != nil {
		return n.session.Config()
	}
	return n.n.Config()
}

// group is the number of this process's group among those of its role.
func (n *node) group() int { return int(n.rank) / n.cfg().GroupSize }

// counterpart is the rank of the process of another role's group that this one talks to: the
// one with the same index.
func (n *node) counterpart(group int) uint32 {
	g := n.cfg().GroupSize
	return uint32(group*g + int(n.rank)%g)
}

// load makes calls until ctx ends or none is left.
func (n *node) load(ctx context.Context, p *plan.Load, index int, left *atomic.Int64) {
	l := n.lane(p, index)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for i := 1; ctx.Err() == nil && left.Add(-1) >= 0; i++ {
		wait := p.Every.D()
		err := l.round()
		if err == nil && p.Barrier > 0 && index&0xff == 0 && i%p.Barrier == 0 {
			err = n.barrier(ctx, van.WorkerGroup)
		}
		if err != nil {
			if alive := n.alive(); alive != nil && ctx.Err() == nil {
				n.leaveWith(alive)
				return
			}
			wait = max(wait, 20*time.Millisecond)
		}
		if wait > 0 {
			pause.Reset(wait)
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
		}
	}
}

// collect makes collectives with the other workers until ctx ends.
func (n *node) collect(ctx context.Context, p *plan.Load) {
	n.collecting.Lock() // the communicator of an earlier load is closed first
	defer n.collecting.Unlock()
	ranks.Run(&ranks.Env{Node: n.n, Serial: int(n.b.Serial), Limit: p.Limit.Or(defaultLimit), Size: cmp.Or(p.Size, defaultSize), Window: p.Window,
		Pause: func(int) bool {
			select {
			case <-time.After(p.Every.D()):
			case <-ctx.Done():
			}
			return ctx.Err() == nil
		},
		Watch: func(what string, limit time.Duration) func() {
			var over atomic.Bool
			ticks := n.ticks.Load()
			var look func()
			look = func() {
				left := limit + callGrace - time.Duration(n.ticks.Load()-ticks)*tickTime
				switch {
				case over.Load():
				case left > 0: // it was stopped
					time.AfterFunc(left, look)
				default:
					n.wrong("%s has not ended %s behind its limit of %s", what, callGrace, limit)
				}
			}
			t := time.AfterFunc(limit+callGrace, look)
			return func() {
				over.Store(true)
				t.Stop()
			}
		},
		Gone:  func() bool { return false },
		Wrong: func(kind, format string, args ...any) { n.wrong(kind+": "+format, args...) },
		Note:  func(_ string, begin time.Time, err error) { n.result(begin, time.Since(begin), err) },
	})
}

// barrier waits at an instance barrier and notes how that ends.
func (n *node) barrier(ctx context.Context, group int) error {
	begun, ticks := time.Now(), n.ticks.Load()
	vote := Vote{Number: int(n.votes.Add(1)), Group: group, Begin: begun.UnixNano()}
	n.say(Event{Event: barrier, Vote: &vote})
	var err error
	if n.session != nil {
		err = n.session.Barrier(ctx, group&van.ServerGroup != 0, group&van.WorkerGroup != 0, true)
	} else {
		err = n.n.InstanceBarrier(ctx, 0, postoffice.Group(group))
	}
	vote.End, vote.Passed = time.Now().UnixNano(), err == nil
	n.say(Event{Event: barrier, Vote: &vote})
	if errors.Is(err, context.Canceled) {
		return err // the others have stopped to make barriers as well
	}
	n.note(Call{Begin: begun.UnixMilli(), MS: n.took(begun, ticks).Milliseconds(), Text: text(err), Barrier: true})
	return err
}

// note adds a call to the report.
func (n *node) note(c Call) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.done = append(n.done, c)
	n.changed = true
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// took is how long an operation that began at begun took, less the time in which the process
// was stopped.
func (n *node) took(begun time.Time, ticks int64) time.Duration {
	return min(time.Since(begun), time.Duration(n.ticks.Load()-ticks+1)*tickTime)
}

func (n *node) alive() error {
	if n.session != nil {
		_, err := n.session.PushPull(af.DefaultStream, nil, nil, nil) // a live session refuses it for its arguments
		if errors.Is(err, van.ErrInvalid) {
			return nil
		}
		return err
	}
	return n.n.Alive()
}

// round makes a call and checks its results.
func (l *lane) round() error {
	n := l.n
	call := n.calls.Add(1)
	if l.failed {
		l.checkUntouched(call)
	}
	for i, b := range l.pushed {
		o := value.Origin{Kind: value.Pushed, Worker: n.rank, Process: n.b.Serial, Index: uint32(i % l.pushes), Call: call}
		if l.pairs != nil {
			o.Server = n.counterpart(i / l.pushes)
		}
		o.Fill(b)
	}
	begun, ticks := time.Now(), n.ticks.Load()
	limit := l.limit
	l.current.Store(call)
	watch := time.AfterFunc(limit+callGrace, func() { l.late(call, ticks, limit) })
	err := l.call(call, limit)
	watch.Stop()
	l.current.Store(0)
	took := n.took(begun, ticks)
	if err == nil {
		l.checkAnswers(call)
	} else {
		l.clear()
		if len(n.b.Foreign) > 0 { // requests to those nodes cannot be canceled: pushes may still be in flight
			l.newPushes()
		}
	}
	l.failed = err != nil
	n.result(begun, took, err)
	return err
}

// clear makes the pull tensors such that a write to them can be seen.
func (l *lane) clear() {
	for _, b := range l.pulled {
		for k := range b {
			b[k] = untouched
		}
	}
}

// result notes how a call ended.
func (n *node) result(begun time.Time, took time.Duration, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changed = true
	n.stats.Slow = max(n.stats.Slow, took.Milliseconds())
	if err != nil {
		n.stats.Failed++
		n.stats.Streak = 0
		n.stats.Last = err.Error()
		n.done = append(n.done, Call{Begin: begun.UnixMilli(), MS: took.Milliseconds(), Text: err.Error()})
		return
	}
	n.oks[begun.UnixMilli()/10]++
	n.stats.OK++
	n.stats.Streak++
}

// late is called when a call should have ended. The time in which the process stood
// still does not count.
func (l *lane) late(call uint64, since int64, limit time.Duration) {
	if l.current.Load() != call {
		return
	}
	if ran := time.Duration(l.n.ticks.Load()-since) * tickTime; ran < limit+callGrace/2 {
		time.AfterFunc(limit+callGrace-ran, func() { l.late(call, since, limit) })
		return
	}
	l.n.wrong("call %d has not ended %s behind its limit of %s", call, callGrace, limit)
}

func (l *lane) call(number uint64, limit time.Duration) error {
	n := l.n
	switch {
	case l.pairs != nil: // every second call lends its memory
		wait, err := l.pairs.Begin(n.cmd(number), number%2 == 0, limit)
		if err != nil {
			return err
		}
		return wait()
	case n.session == nil:
		call, err := n.worker.PushPull(l.push, testcluster.PerServer(l.pull, l.servers), af.Within(limit))
		if err != nil {
			return err
		}
		return call.Wait(context.Background())
	}
	h, err := n.session.PushPull(af.DefaultStream, nil, l.push, l.pull)
	if err != nil {
		return err
	}
	for {
		if err := n.session.Wait(int64(h), limit, 100*time.Millisecond); !errors.Is(err, core.ErrPending) {
			return err
		}
	}
}

// checkUntouched checks that the tensors of a failed call, which are the worker's again, were
// not written.
func (l *lane) checkUntouched(call uint64) {
	for i, b := range l.pulled {
		for k, x := range b {
			if x != untouched {
				l.n.wrong("before call %d: byte %d of pull tensor %d was written to behind the end of the call that it belonged to", call, k, i)
				break
			}
		}
	}
}

func (l *lane) checkAnswers(call uint64) {
	n := l.n
	q := len(l.pulled) / max(l.servers, 1)
	for i, b := range l.pulled {
		got, err := value.Of(b)
		if err == nil {
			want := value.Origin{Kind: value.Answered, Worker: n.rank, Process: n.b.Serial, Server: n.counterpart(i / q), By: got.By, Index: uint32(i % q), Call: call}
			err = want.Check(b)
		}
		if err != nil {
			n.wrong("call %d returned without an error and pull tensor %d of server %d is wrong: %v", call, i%q, n.counterpart(i/q), err)
		}
	}
}

// serve is the handler of a plain server.
func (n *node) serve(b af.Batch) {
	n.stand()
	out := n.answers(b)
	if len(b.Pulls()) == 0 && !b.Single() {
		b.Release()
		return
	}
	if err := b.Respond(out); err != nil && (errors.Is(err, van.ErrInvalid) || errors.Is(err, postoffice.ErrAnswered)) {
		n.wrong("answer to worker %d: %v", n.counterpart(b.Worker()), err)
	}
}

// stand waits as long as the handler is to be blocked.
func (n *node) stand() {
	n.mu.Lock()
	blocked := n.blocked
	n.mu.Unlock()
	if blocked != nil {
		select {
		case <-blocked:
		case <-n.ended:
		}
	}
}

// answers checks the tensors of a batch and makes the answers to it.
func (n *node) answers(b af.Batch) []af.KeyTensor {
	id := n.batch(b)
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		vals := make([]byte, p.Len)
		value.Origin{Kind: value.Answered, Worker: id.rank, Process: id.serial, Server: n.rank, By: n.b.Serial, Index: uint32(i), Call: id.call}.Fill(vals)
		x, err := af.FromSlice(vals)
		if err != nil {
			n.wrong("%v", err)
		}
		out[i] = af.KeyTensor{Key: p.Key, Val: x}
	}
	return out
}

// batch checks the tensors of a batch: they are all of one call of one process of the worker
// that the batch names, arrive once, and are of no process that another one has replaced.
func (n *node) batch(b af.Batch) (id batchID) {
	worker := n.counterpart(b.Worker())
	for i := range b.Pushes() {
		v := b.Pushes()[i].Val.Bytes()
		o, err := value.Of(v)
		if err == nil {
			if i == 0 {
				id = batchID{o.Worker, o.Process, o.Call}
			}
			err = value.Origin{Kind: value.Pushed, Worker: worker, Process: id.serial, Index: uint32(i), Call: id.call}.Check(v)
		}
		if err != nil {
			n.wrong("batch of worker %d: push tensor %d: %v", worker, i, err)
		}
	}
	if len(b.Pushes()) == 0 {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.stats.Served++
		n.changed = true
		return id
	}
	n.heard(id, "")
	return id
}

// heard notes a part of a call, "" for all of it, and checks that it arrives once, and from no
// process that another one has replaced.
func (n *node) heard(id batchID, part string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stats.Served++
	n.changed = true
	if id.call >= 1<<60 {
		return
	}
	p := source{id.rank, id.serial, part}
	calls := n.seen[p]
	if calls == nil {
		calls = map[uint64]bool{}
		n.seen[p] = calls
	}
	if calls[id.call] && !(n.cfg().Resend && n.foreign("worker", id.rank)) { // which of its processes has repeated it is unknown
		n.wrong("%scall %d of worker %d, process %d, came twice", part, id.call, id.rank, id.serial)
	}
	calls[id.call] = true
	delete(calls, id.call-min(id.call, remembered))
	if last := n.newest[id.rank]; last > id.serial && !n.nameless(id.rank) {
		n.wrong("%scall %d of worker %d came from process %d behind calls of process %d, which has replaced it", part, id.call, id.rank, id.serial, last)
	}
	n.newest[id.rank] = max(n.newest[id.rank], id.serial)
}

// nameless tells whether this server cannot know which process of a worker sent a message: one of
// the two nodes, or the scheduler, neither sends nor reads incarnations.
func (n *node) nameless(worker uint32) bool {
	return n.foreign("worker", worker) || n.foreign("server", n.rank) || n.foreign("scheduler", 0)
}

// batches is the loop of a server of the Python module.
func (n *node) batches() {
	var items []core.Item
	for !n.over() || n.b.LoopEnds {
		var err error
		items, err = n.session.GetBatch(items[:0], 50*time.Millisecond)
		if err != nil {
			if errors.Is(err, postoffice.ErrRefused) {
				n.leaveWith(err)
				return
			}
			if errors.Is(err, core.ErrLoopOver) {
				close(n.loopOver)
				return
			}
			if n.over() && errors.Is(err, van.ErrClosed) {
				return
			}
			if !errors.Is(err, core.ErrPending) && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
				n.wrong("get_batch: %v", err)
				return
			}
			if errors.Is(err, van.ErrPeerLost) { // the error repeats until the worker is replaced
				select {
				case <-time.After(20 * time.Millisecond):
				case <-n.ended:
				}
			}
			continue
		}
		for _, it := range items {
			n.stand() // with batches in its hands
			out := n.answers(it.Batch)
			if _, err := n.session.Answer(af.DefaultStream, it.ID, out, nil); !n.mayFail(err) {
				n.wrong("respond: %v", err)
			}
			it.Release()
		}
	}
}

// mayFail tells whether an answer may end with err: its worker is gone, or this node is
// leaving, as it may while calls of workers that leave as well are in flight.
func (n *node) mayFail(err error) bool {
	return err == nil || errors.Is(err, van.ErrPeerLost) || errors.Is(err, van.ErrTimeout) || errors.Is(err, van.ErrClosed) && n.over()
}

// remembered is how many calls of each process a server knows to have had.
const remembered = 100_000
