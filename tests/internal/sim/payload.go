package sim

import (
	"fmt"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
)

// callID is one call of one process.
type callID struct {
	worker, gen int // instance rank, number of the process
	call        int
}

func (c callID) String() string {
	return fmt.Sprintf("call %d of %s", c.call, procName(plan.NodeOf("worker", c.worker), c.gen))
}

// label is the origin of a tensor.
type label struct {
	kind         uint32
	id           callID
	index        int // of the tensor
	server, sgen int // of an answer: its maker
}

// write makes b the tensor of l.
func (l label) write(b []byte) {
	value.Origin{Kind: l.kind, Worker: uint32(l.id.worker), Process: uint32(l.id.gen), Server: uint32(l.server), By: uint32(l.sgen),
		Index: uint32(l.index), Call: uint64(l.id.call)}.Fill(b)
}

// read reads a label and checks all bytes.
func read(b []byte, kind uint32) (l label, err error) {
	o, err := value.Of(b)
	if err == nil {
		err = o.Check(b)
	}
	if err == nil && o.Kind != kind {
		err = fmt.Errorf("it is %s", o)
	}
	return label{o.Kind, callID{int(o.Worker), int(o.Process), int(o.Call)}, int(o.Index), int(o.Server), int(o.By)}, err
}

// procName names a process: its node and its number among those of the node, from 1.
func procName(n plan.Node, gen int) string { return fmt.Sprintf("%s.%d", n, gen) }
