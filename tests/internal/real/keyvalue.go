package real

import (
	"errors"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/pairs"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
	"github.com/stepaf/stepaf-go/van"
)

// callBits are those of a command that count the calls of a process. The others number the
// process, so that a pull says whose it is: it brings no value.
const callBits = 20

// cmd is the command of a call over kv.
func (n *node) cmd(call uint64) kv.Cmd {
	if call >= 1<<callBits || n.b.Serial >= 1<<(31-callBits) {
		n.wrong("call %d of process %d does not fit into a command", call, n.b.Serial)
	}
	return kv.Cmd(uint64(n.b.Serial)<<callBits | call)
}

// serveKV is the handler of a key-value server.
func (n *node) serveKV(r kv.Request[uint8]) {
	n.stand()
	id := batchID{n.counterpart(r.Worker), uint32(r.Cmd) >> callBits, uint64(r.Cmd) & (1<<callBits - 1)}
	answer := kv.Pairs[uint8]{}
	if r.Push {
		n.takePush(id, r)
	} else {
		answer = n.takePull(id, r)
	}
	if err := r.Respond(answer); errors.Is(err, van.ErrInvalid) || errors.Is(err, postoffice.ErrAnswered) {
		n.wrong("answer to worker %d: %v", id.rank, err)
	}
}

// takePush checks that each value is the one that this call has pushed to this server.
func (n *node) takePush(id batchID, r kv.Request[uint8]) {
	size := len(r.Vals) / len(r.Keys)
	for i, key := range r.Keys {
		want := value.Origin{Kind: value.Pushed, Worker: id.rank, Process: id.serial, Server: n.rank, Index: uint32(pairs.PushIndex(n.n, n.group(), key)), Call: id.call}
		if err := want.Check(r.Vals[i*size : (i+1)*size]); err != nil {
			n.wrong("push of worker %d, key %d: %v", id.rank, key, err)
		}
	}
	n.heard(id, "the push of ")
}

// takePull makes the answer to a pull.
func (n *node) takePull(id batchID, r kv.Request[uint8]) (answer kv.Pairs[uint8]) {
	n.heard(id, "the pull of ")
	size := r.Expected() / len(r.Keys)
	if size < plan.MinSize {
		n.wrong("the pull of call %d of worker %d, process %d, has room for %d bytes for each of %d keys", id.call, id.rank, id.serial, size, len(r.Keys))
		return answer
	}
	answer.Keys, answer.Vals = append(answer.Keys, r.Keys...), make([]uint8, size*len(r.Keys))
	for i, key := range r.Keys {
		index := pairs.PullIndex(n.n, n.group(), key)
		value.Origin{Kind: value.Answered, Worker: id.rank, Process: id.serial, Server: n.rank, By: n.b.Serial, Index: uint32(index), Call: id.call}.Fill(answer.Vals[i*size : (i+1)*size])
	}
	return answer
}
