// Package pairs makes calls over kv for tests: a push of some keys of each server and, when that
// has succeeded, a pull of others. The simulation and the real processes both make them, and fill
// and check the values themselves.
package pairs

import (
	"context"
	"time"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
)

// Keys of pushes and pulls, counted from the beginning of a server's range.
const (
	firstPush = 1000
	firstPull = 2000
)

// Call is the keys and values of one call, which may be made again and again, one at a time.
type Call struct {
	// Pushes and Pulls are the values of single keys: those of the first server, then those of
	// the next.
	Pushes, Pulls [][]byte

	worker             *kv.Worker[uint8]
	pushKeys, pullKeys []kv.Key
	push, pull         []uint8
}

// New makes a call with so many keys of each server, each with size bytes.
func New(n *postoffice.Node, w *kv.Worker[uint8], size, pushes, pulls int) *Call {
	c := &Call{worker: w}
	part := func(keys *[]kv.Key, all *[]uint8, first kv.Key, count int) (parts [][]byte) {
		servers := n.Topology().ServerKeyRanges()
		*all = make([]uint8, size*count*len(servers))
		rest := *all
		for _, r := range servers {
			for i := range count {
				*keys = append(*keys, r.Begin+first+kv.Key(i))
				parts, rest = append(parts, rest[:size:size]), rest[size:]
			}
		}
		return parts
	}
	c.Pushes, c.Pulls = part(&c.pushKeys, &c.push, firstPush, pushes), part(&c.pullKeys, &c.pull, firstPull, pulls)
	return c
}

// Begin begins the call. The returned function waits for it, within limit from now on. With lend the
// call's own memory is sent and not a copy of it.
func (c *Call) Begin(cmd kv.Cmd, lend bool, limit time.Duration) (wait func() error, err error) {
	begin := time.Now()
	push := []kv.PushOption{cmd, kv.Within(limit)}
	pull := []kv.PullOption{cmd}
	if lend {
		push, pull = append(push, kv.NoCopy), append(pull, kv.NoCopy)
	}
	call, err := c.worker.Push(c.pushKeys, c.push, push...)
	return func() error {
		if err := call.Wait(context.Background()); err != nil {
			return err
		}
		// A limit of 0 would be none.
		left := max(limit-time.Since(begin), time.Nanosecond)
		call, err := c.worker.Pull(c.pullKeys, &c.pull, append(pull, kv.Within(left))...)
		if err != nil {
			return err
		}
		return call.Wait(context.Background())
	}, err
}

// PushIndex is which of a server's pushes a key is of, counted from 0.
func PushIndex(n *postoffice.Node, server int, key kv.Key) int {
	return int(key - n.Topology().ServerKeyRanges()[server].Begin - firstPush)
}

// PullIndex is which of a server's pulls a key is of.
func PullIndex(n *postoffice.Node, server int, key kv.Key) int {
	return int(key - n.Topology().ServerKeyRanges()[server].Begin - firstPull)
}
