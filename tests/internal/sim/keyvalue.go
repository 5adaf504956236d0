package sim

import (
	"context"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// Keys of pushes and pulls, counted from the beginning of a server's range.
const (
	firstPush = 1000
	firstPull = 2000
)

// pairs are the keys and values of one call over kv: a push of some keys of each server,
// and, when that has succeeded, a pull of others.
type pairs struct {
	pushKeys, pullKeys []kv.Key
	push, pull         []uint8
}

// newPairs makes the tensors of a call over kv: parts of two slices.
func newPairs(w *kv.Worker[uint8], ranges []kv.Key, size, pushes, pulls int) *tensors {
	t, kp := &tensors{worker: w, pushes: pushes}, &pairs{}
	part := func(keys *[]kv.Key, all *[]uint8, first kv.Key, n int) (parts [][]byte) {
		*all = make([]uint8, size*n*len(ranges))
		rest := *all
		for _, begin := range ranges {
			for i := range n {
				*keys = append(*keys, begin+first+kv.Key(i))
				parts, rest = append(parts, rest[:size:size]), rest[size:]
			}
		}
		return parts
	}
	t.pushB, t.pullB = part(&kp.pushKeys, &kp.push, firstPush, pushes), part(&kp.pullKeys, &kp.pull, firstPull, pulls)
	t.pairs = kp
	return t
}

// ranges is where the keys of each server begin.
func (p *proc) ranges() (begin []kv.Key) {
	for _, r := range p.node.Load().Topology().ServerKeyRanges() {
		begin = append(begin, r.Begin)
	}
	return begin
}

// cmd says in a pull which call it belongs to.
func (c callID) cmd() kv.Cmd { return kv.Cmd(c.gen<<20 | c.call) }

// pushThenPull begins a call. What it returns waits for it, within limit from now on.
// Every second call lends its memory.
func (t *tensors) pushThenPull(p *proc, id callID, limit time.Duration) (wait func() error, err error) {
	begin := p.c.net.now()
	push := []kv.PushOption{id.cmd(), kv.Within(limit)}
	pull := []kv.PullOption{id.cmd()}
	if id.call%2 == 0 {
		push, pull = append(push, kv.NoCopy), append(pull, kv.NoCopy)
	}
	call, err := t.worker.Push(t.pairs.pushKeys, t.pairs.push, push...)
	return func() error {
		if err := call.Wait(context.Background()); err != nil {
			return err
		}
		// A limit of 0 would be none.
		left := max(limit-(p.c.net.now()-begin), time.Nanosecond)
		call, err := t.worker.Pull(t.pairs.pullKeys, &t.pairs.pull, append(pull, kv.Within(left))...)
		if err != nil {
			return err
		}
		return call.Wait(context.Background())
	}, err
}

// serveKV is the handler of a key-value server.
func (p *proc) serveKV(r kv.Request[uint8]) {
	p.stand()
	if !p.runs() {
		return
	}
	c := p.c
	g := c.group()
	worker := r.Worker*g + p.who.Rank()%g
	answer, ok := kv.Pairs[uint8]{}, false
	if r.Push {
		ok = p.takePush(worker, r)
	} else {
		answer, ok = p.takePull(callID{worker, int(r.Cmd >> 20), int(r.Cmd & (1<<20 - 1))}, r)
	}
	if !ok {
		return
	}
	if err := r.Respond(answer); err != nil {
		p.refused(err)
	}
}

// takePush judges a push.
func (p *proc) takePush(worker int, r kv.Request[uint8]) bool {
	c := p.c
	size := len(r.Vals) / len(r.Keys)
	own := p.who.Rank() / c.group()
	begin := p.ranges()[own]
	for i, key := range r.Keys {
		l, ok := c.check.push(p, worker, int(key-begin-firstPush), r.Vals[i*size:(i+1)*size])
		if !ok {
			return false
		}
		if l.server != own || l.id.cmd() != kv.Cmd(r.Cmd) {
			c.check.fail("wrong data", "%s got, for key %d and command %d, what %s pushed to server %d", p.name, key, r.Cmd, l.id, l.server)
			return false
		}
		if i == 0 {
			c.net.note(p.name, "has the push of "+l.id.String())
			c.heard(p, l.id)
		}
	}
	return true
}

// takePull judges a pull and makes its answer.
func (p *proc) takePull(id callID, r kv.Request[uint8]) (answer kv.Pairs[uint8], ok bool) {
	c := p.c
	if _, ok := c.check.find(id); !ok {
		c.check.fail("wrong data", "%s got a pull of %s, which has not been made", p.name, id)
		return answer, false
	}
	c.net.note(p.name, "has the pull of "+id.String())
	c.check.handle(id, p)
	c.heard(p, id)
	begin := p.ranges()[p.who.Rank()/c.group()]
	size := r.Expected() / len(r.Keys)
	if size < plan.MinSize {
		c.check.fail("wrong data", "%s got a pull of %s with room for %d bytes for each of %d keys", p.name, id, size, len(r.Keys))
		return answer, false
	}
	answer.Keys, answer.Vals = append(answer.Keys, r.Keys...), make([]uint8, size*len(r.Keys))
	for i, key := range r.Keys {
		label{magic: answerMagic, id: id, index: int(key - begin - firstPull), server: p.who.Rank(), sgen: p.gen}.write(answer.Vals[i*size : (i+1)*size])
	}
	return answer, true
}
