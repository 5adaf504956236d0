package sim

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// entry is something that happened.
type entry struct {
	at   time.Duration
	who  string
	what string
	msg  bool // the event of a message
	meta summary
}

// summary is the part of a message that a timeline shows.
type summary struct {
	cmd           van.Command
	request, push bool
	simple        bool
	ts, group     int32
	key           uint64
	size          int32
	nodes         int32
}

func summaryOf(m *van.Message) summary {
	return summary{cmd: m.Control.Cmd, request: m.Request, push: m.Push, simple: m.SimpleApp, ts: m.Timestamp, key: m.Key,
		size: int32(m.PayloadLen()), group: int32(m.Control.BarrierGroup), nodes: int32(len(m.Control.Nodes))}
}

func (s summary) String() string {
	if s.cmd != van.EmptyCmd {
		return fmt.Sprintf("%s request=%t group=%d nodes=%d", s.cmd, s.request, s.group, s.nodes)
	}
	kind, way := "pull", "answer"
	if s.push {
		kind = "push"
	}
	if s.request {
		way = "request"
	}
	return fmt.Sprintf("%s %s key=%d bytes=%d", kind, way, s.key, s.size)
}

// timeline is the events of a run.
type timeline struct {
	mu   sync.Mutex
	all  []entry
	logs []entry
	off  bool
}

func (t *timeline) add(e entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.off {
		t.all = append(t.all, e)
	}
}

// log notes a line of a node's log, which is no part of the hash: it may have times and
// random numbers in it.
func (t *timeline) log(e entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.off {
		t.logs = append(t.logs, e)
	}
}

// hash is the same for equal runs. Events of one time have no order.
func (t *timeline) hash() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortStableFunc(t.all, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.at, b.at), strings.Compare(a.who, b.who), strings.Compare(a.what, b.what),
			cmp.Compare(a.meta.key, b.meta.key), cmp.Compare(a.meta.size, b.meta.size))
	})
	h := fnv.New64a()
	for i := range t.all {
		e := &t.all[i]
		fmt.Fprintf(h, "%d %s %s", e.at, e.who, e.what)
		if e.msg {
			fmt.Fprint(h, e.meta.String())
		}
	}
	return h.Sum64()
}

// write prints the last lines of the story: all that the application and the nodes have
// done, and, as far as there is room, the messages.
func (t *timeline) write(w io.Writer, lines int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := append(slices.Clone(t.all), t.logs...)
	slices.SortStableFunc(all, func(a, b entry) int { return cmp.Compare(a.at, b.at) })
	if n := len(all); n > lines {
		fmt.Fprintf(w, "  (%d lines before)\n", n-lines)
		all = all[n-lines:]
	}
	for i := range all {
		e := &all[i]
		what := e.what
		if e.msg {
			what += " " + e.meta.String()
		}
		fmt.Fprintf(w, "  %12.6fs  %-34s %s\n", e.at.Seconds(), e.who, what)
	}
}
