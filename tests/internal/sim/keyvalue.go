package sim

import (
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/tests/internal/pairs"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
)

// newPairs makes the tensors of a call over kv: its values.
func (p *proc) newPairs(size, pushes, pulls int) *tensors {
	c := pairs.New(p.node.Load(), p.keyValue, size, pushes, pulls)
	return &tensors{pushes: pushes, pushB: c.Pushes, pullB: c.Pulls, pairs: c}
}

// cmd says in a pull which call it belongs to.
func (c callID) cmd() kv.Cmd { return kv.Cmd(c.gen<<20 | c.call) }

// pushThenPull begins a call. The returned function waits for it, within limit from now on.
// Every second call lends its memory.
func (t *tensors) pushThenPull(id callID, limit time.Duration) (wait func() error, err error) {
	return t.pairs.Begin(id.cmd(), id.call%2 == 0, limit)
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
	for i, key := range r.Keys {
		l, ok := c.check.push(p, worker, pairs.PushIndex(p.node.Load(), own, key), r.Vals[i*size:(i+1)*size])
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
	size := r.Expected() / len(r.Keys)
	if size < plan.MinSize {
		c.check.fail("wrong data", "%s got a pull of %s with room for %d bytes for each of %d keys", p.name, id, size, len(r.Keys))
		return answer, false
	}
	answer.Keys, answer.Vals = append(answer.Keys, r.Keys...), make([]uint8, size*len(r.Keys))
	for i, key := range r.Keys {
		label{kind: value.Answered, id: id, index: pairs.PullIndex(p.node.Load(), p.who.Rank()/c.group(), key), server: p.who.Rank(), sgen: p.gen}.write(answer.Vals[i*size : (i+1)*size])
	}
	return answer, true
}
