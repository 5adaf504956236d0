// Package ranks is a program for tests: a rank of a communicator that makes one collective after
// the other, begins anew when one fails, and checks every byte that it gets. The simulation and
// the real processes both run it.
package ranks

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Env is where a rank runs.
type Env struct {
	Node   *postoffice.Node
	Serial int // of the process: the one that takes its place has a larger one
	Limit  time.Duration
	Size   int // bytes of a rank's part
	Window int // calls in flight at once

	Pause func(n int) bool                              // before the n-th call or try; false ends it
	Watch func(what string, limit time.Duration) func() // notes if the function that it returns is not called in time
	Gone  func() bool                                   // tells whether the process has been killed, so that its results do not count
	Wrong func(kind, format string, args ...any)        // notes a violation
	Note  func(what string, begin time.Time, err error) // notes a call that has ended
}

// identity is a process and its number of a try to make the communicator. All calls of one
// communicator carry those of the processes that are in it.
type identity struct{ serial, try uint64 }

type member struct {
	*Env
	comm  *collective.Comm
	try   uint64
	n     int               // pauses
	seen  map[int]identity  // by rank: in the communicator before
	hash  uint64            // of the identities of this one
	calls uint64            // made in it
	given map[string][]byte // memory of failed calls, which must not be written any more
	order []string
}

// made is a call in flight.
type made struct {
	what  string
	begin time.Time
	op    collective.Op
	ins   [][]byte
	outs  [][]byte
	wants [][]byte
	read  bool // others read its results
}

// junk is in memory that is the program's again.
const junk = 0xcc

// Run makes calls until Pause or the node ends it.
func Run(e *Env) {
	m := &member{Env: e, seen: map[int]identity{}, given: map[string][]byte{}}
	defer func() {
		if m.comm != nil {
			m.close()
		}
		m.look()
	}()
	for m.pause() {
		if err := m.meet(); err != nil {
			if m.Node.Alive() != nil {
				return
			}
			continue
		}
		m.look()
		for m.round() {
			if !m.pause() {
				return
			}
		}
	}
}

func (m *member) pause() bool {
	m.n++
	return m.Pause(m.n)
}

func (m *member) close() {
	done := m.Watch("Close", m.Limit)
	err := m.comm.Close()
	done()
	if err != nil && !errors.Is(err, van.ErrTimeout) {
		m.Wrong("wrong error", "Close of a communicator: %v", err)
	}
	if _, err := m.comm.AllGather(af.Tensor{}, af.Tensor{}); !errors.Is(err, van.ErrClosed) {
		m.Wrong("wrong error", "AllGather of a communicator that is closed: %v", err)
	}
	m.comm = nil
}

// meet makes the communicator, or makes it anew, and learns its processes.
func (m *member) meet() error {
	ctx := context.Background()
	if m.comm != nil && mix(uint64(m.Serial), m.try)%4 == 0 { // then another one, of the same ID
		m.close()
	}
	begin := time.Now()
	var err error
	if m.comm == nil {
		done := m.Watch("New", 2*m.Limit) // and Close
		var all []int
		for r := range m.size() {
			all = append(all, r)
		}
		m.comm, err = collective.New(ctx, m.Node, collective.Options{ID: 7, Ranks: all, Timeout: m.Limit, Look: m.Serial%2 == 0})
		done()
		if err != nil {
			m.comm = nil
		}
	} else {
		done := m.Watch("Rebuild", 2*m.Limit)
		err = m.comm.Rebuild(ctx)
		done()
	}
	if err != nil {
		m.Note("New or Rebuild", begin, err)
		return err
	}
	m.try++
	n, self := m.comm.Size(), m.comm.Rank()
	own := make([]byte, 16)
	binary.LittleEndian.PutUint64(own, uint64(m.Serial))
	binary.LittleEndian.PutUint64(own[8:], m.try)
	c := &made{what: "AllGather of identities", begin: time.Now(), ins: [][]byte{own}, outs: [][]byte{make([]byte, 16*n)}}
	if c.op, err = m.comm.AllGather(tensor(c.outs[0]), tensor(own)); err == nil {
		err = m.wait(c)
	}
	if err != nil {
		m.Note(c.what, c.begin, err)
		return err
	}
	m.hash, m.calls = mix(uint64(n)), 0
	for r := range n {
		id := identity{binary.LittleEndian.Uint64(c.outs[0][16*r:]), binary.LittleEndian.Uint64(c.outs[0][16*r+8:])}
		old := m.seen[r]
		if r == self && (id != identity{uint64(m.Serial), m.try}) || id.serial < old.serial || id.serial == old.serial && id.try <= old.try {
			m.Wrong("wrong data", "%s: that of rank %d is %v, and before it was %v; its own is %v", c.what, r, id, old, identity{uint64(m.Serial), m.try})
		}
		m.seen[r] = id
		m.hash = mix(m.hash, id.serial, id.try)
	}
	m.Note(c.what, c.begin, nil)
	return nil
}

func (m *member) size() int {
	t := m.Node.Topology()
	if m.Node.Role() == van.Worker {
		return t.NumWorkerInstances()
	}
	return t.NumServers * t.GroupSize
}

// round makes as many calls as may be in flight, and waits for them. It tells whether all succeeded.
func (m *member) round() bool {
	var flying []*made
	ok := true
	for range max(m.Window, 1) {
		c, err := m.call()
		if err != nil {
			m.Note(c.what, c.begin, err)
			ok = false
			break
		}
		flying = append(flying, c)
	}
	for _, c := range flying {
		err := m.wait(c)
		for i := range c.wants {
			if err == nil && !bytes.Equal(c.outs[i], c.wants[i]) {
				at := 0
				for at < len(c.wants[i]) && c.outs[i][at] == c.wants[i][at] {
					at++
				}
				m.Wrong("wrong data", "%s: result %d is wrong from byte %d of %d", c.what, i, at, len(c.wants[i]))
			}
		}
		if err == nil && !m.Gone() { // all of it is the program's again
			for _, b := range append(c.ins, c.outs...) {
				spoil(b)
			}
		}
		m.Note(c.what, c.begin, err)
		ok = ok && err == nil
	}
	return ok
}

// wait waits for a call. When it has failed, nothing may be written to its results any more.
func (m *member) wait(c *made) error {
	done := m.Watch(c.what, m.Limit)
	err := c.op.Wait(context.Background())
	done()
	if err == nil || m.Gone() || c.read {
		return err
	}
	for i, b := range c.outs {
		if slices.ContainsFunc(c.ins, func(in []byte) bool { return len(in) > 0 && len(b) > 0 && &in[0] == &b[0] }) {
			continue // others may be reading it
		}
		spoil(b)
		name := fmt.Sprintf("result %d of try %d, %s", i, m.try, c.what)
		m.given[name], m.order = b, append(m.order, name)
	}
	if len(m.order) > 64 {
		delete(m.given, m.order[0])
		m.order = m.order[1:]
	}
	return err
}

// look checks that memory of failed calls, which is the program's again, was not written.
func (m *member) look() {
	for name, b := range m.given {
		if i := slices.IndexFunc(b, func(x byte) bool { return x != junk }); i >= 0 {
			m.Wrong("late write", "byte %d of %s was written after the call had failed", i, name)
			delete(m.given, name)
		}
	}
}

func spoil(b []byte) {
	for i := range b {
		b[i] = junk
	}
}

// call makes one call. Its kind and contents follow from its number.
func (m *member) call() (c *made, err error) {
	seq := m.calls
	m.calls++
	n, self, pick := m.comm.Size(), m.comm.Rank(), mix(m.hash, seq)
	root := int(pick >> 8 % uint64(n))
	size := (m.Size/2 + int(pick>>16)%(m.Size/2+1)) &^ 7
	// part is the data that rank from gives, to all or to one.
	part := func(from, to, size int) []byte {
		b := make([]byte, size)
		for i := 0; i < len(b); i += 8 {
			var w [8]byte
			binary.LittleEndian.PutUint64(w[:], mix(m.hash, seq, uint64(from), uint64(to), uint64(i)))
			copy(b[i:], w[:])
		}
		return b
	}
	joined := func(f func(r int) []byte) (b []byte) {
		for r := range n {
			b = append(b, f(r)...)
		}
		return b
	}
	sum := func(from, to int) []byte {
		b := make([]byte, to-from)
		for i := 0; i < len(b); i += 8 {
			var s uint64
			for r := range n {
				s += mix(m.hash, seq, uint64(r), 0, uint64(from+i))
			}
			binary.LittleEndian.PutUint64(b[i:], s)
		}
		return b
	}
	c = &made{begin: time.Now()}
	one := func(in, want []byte) (af.Tensor, af.Tensor) {
		c.ins, c.wants = [][]byte{in}, [][]byte{want}
		c.outs = [][]byte{make([]byte, len(want))}
		return tensor(c.outs[0]), tensor(in)
	}
	many := func() (outs []af.Tensor) {
		for _, w := range c.wants {
			b := make([]byte, len(w))
			c.outs, outs = append(c.outs, b), append(outs, tensor(b))
		}
		return outs
	}
	ragged := func(from, to int) []byte { return part(from, to, size*int((uint64(from+to)+pick)%3)/2+from) }
	name := func(s string) { c.what = fmt.Sprintf("%s, call %d, %d bytes, root %d", s, seq, size, root) }
	switch pick % 10 {
	case 0:
		name("AllGather")
		out, in := one(part(self, 0, size), joined(func(r int) []byte { return part(r, 0, size) }))
		c.op, err = m.comm.AllGather(out, in)
	case 1:
		name("AllGatherV")
		own := ragged(self, 0)
		c.ins = [][]byte{own}
		for r := range n {
			c.wants = append(c.wants, ragged(r, 0))
		}
		c.op, err = m.comm.AllGatherV(many(), tensor(own))
	case 2:
		name("AllToAll")
		var ins []af.Tensor
		for r := range n {
			b := ragged(self, r)
			c.ins, ins = append(c.ins, b), append(ins, tensor(b))
			c.wants = append(c.wants, ragged(r, self))
		}
		c.op, err = m.comm.AllToAll(many(), ins)
	case 3:
		name("Broadcast")
		b := make([]byte, size)
		want := part(root, 0, size)
		if self == root {
			copy(b, want)
			c.ins = [][]byte{b}
		}
		c.outs, c.wants = [][]byte{b}, [][]byte{want}
		c.op, err = m.comm.Broadcast(tensor(b), root)
	case 4:
		name("Gather")
		var want []byte
		if self == root {
			want = joined(func(r int) []byte { return part(r, 0, size) })
		}
		out, in := one(part(self, 0, size), want)
		c.op, err = m.comm.Gather(out, in, root)
	case 5:
		name("Scatter")
		var give []byte
		if self == root {
			give = joined(func(r int) []byte { return part(root, r, size) })
		}
		out, in := one(give, part(root, self, size))
		c.op, err = m.comm.Scatter(out, in, root)
	case 6:
		name("Barrier")
		done := m.Watch(c.what, m.Limit)
		err = m.comm.Barrier(context.Background())
		done()
		if err == nil { // an op to wait for
			c.op, err = m.comm.AllGather(tensor(make([]byte, 8*n)), tensor(make([]byte, 8)))
		}
	case 7:
		name("ReduceScatter")
		out, in := one(part(self, 0, n*size), sum(self*size, self*size+size))
		c.op, err = m.comm.ReduceScatter(words(out), words(in), collective.Sum)
	case 8:
		name("AllReduce")
		out, in := one(part(self, 0, size), sum(0, size))
		c.op, err = m.comm.AllReduce(words(out), words(in), collective.Sum)
	case 9:
		name("large AllReduce")
		c.read = true
		out, in := one(part(self, 0, 72_000+size), sum(0, 72_000+size))
		c.op, err = m.comm.AllReduce(words(out), words(in), collective.Sum)
	}
	if err != nil && errors.Is(err, van.ErrInvalid) {
		m.Wrong("refused", "%s: %v", c.what, err)
	}
	return c, err
}

func tensor(b []byte) af.Tensor { return must(af.FromBytes(b, af.Uint8, int64(len(b)))) }

func words(t af.Tensor) af.Tensor {
	return must(af.FromBytes(t.Bytes(), af.Uint64, int64(t.Len()/8)))
}

func must(t af.Tensor, err error) af.Tensor {
	if err != nil {
		panic(err)
	}
	return t
}

// mix is a hash.
func mix(l ...uint64) uint64 {
	h := uint64(0x9e3779b97f4a7c15)
	for _, x := range l {
		h = (h ^ x) * 0xff51afd7ed558ccd
		h ^= h >> 32
		h *= 0xc4ceb9fe1a85ec53
		h ^= h >> 29
	}
	return h
}
