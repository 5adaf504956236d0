package local

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

var (
	stories    = flag.Int("stories", 20, "number of stories of TestStory")
	firstStory = flag.Uint64("first-story", 1, "seed of the first one")
)

// TestStory tells stories, see vantest.Story, over links that are broken, and that cannot be made at times. Data then goes over the van
// inside, and returns to a link.
func TestStory(t *testing.T) {
	n := *stories
	if testing.Short() || vantest.Race {
		n = min(n, 5)
	}
	for i := range n {
		seed := *firstStory + uint64(i)
		for _, mode := range readModes {
			t.Run(fmt.Sprint(mode.name, seed), func(t *testing.T) {
				t.Parallel()
				runStory(t, seed, mode.set)
			})
		}
	}
}

// troubles are the obstacles of a node's links. They come and go.
type troubles struct {
	memory, files, silence atomic.Bool
	over                   chan struct{} // closed when there is no trouble any more
}

func (x *troubles) set(v *Van) {
	v.own.linkTime = 200 * time.Millisecond
	v.dialer.retry.Pause = time.Millisecond
	v.peers.returnTime = limit // a busy sender may notice late that its link broke
	v.tx.memory.make = func(n, have int) (int, error) {
		if x.memory.Load() {
			return -1, unix.ENOMEM
		}
		return memfd.Part(n, have)
	}
	v.acceptor.refuse = func() error {
		switch {
		case x.files.Load():
			return unix.EMFILE
		case x.silence.Load():
			select {
			case <-time.After(300 * time.Millisecond):
			case <-x.over:
			}
		}
		return nil
	}
}

// change starts or ends an obstacle.
func (x *troubles) change(r *rand.Rand) {
	which := []*atomic.Bool{&x.memory, &x.files, &x.silence}[r.IntN(3)]
	which.Store(r.IntN(3) == 0)
}

// end removes all obstacles.
func (x *troubles) end() {
	x.memory.Store(false)
	x.files.Store(false)
	x.silence.Store(false)
	close(x.over)
}

func runStory(t *testing.T, seed uint64, mode func(*Van)) {
	n := inproc.NewNetwork()
	ids := []int{9, 8}
	trouble := []*troubles{{over: make(chan struct{})}, {over: make(chan struct{})}}
	remove := sync.OnceFunc(func() {
		for _, x := range trouble {
			x.end()
		}
	})
	t.Cleanup(remove)
	var nodes []*node
	for i, id := range ids {
		nodes = append(nodes, newNode(t, n, id, func(v *Van) {
			trouble[i].set(v)
			if mode != nil {
				mode(v)
			}
		}))
	}
	s := vantest.NewStory(t, seed, nodes[0], nodes[1], ids[0], ids[1])
	s.Late, s.Places = true, true
	s.Path = func(x *vantest.Teller) any {
		if x == s.Ends[0] {
			return nodes[0].peers.link(ids[1])
		}
		return nodes[1].peers.link(ids[0])
	}
	r := s.Random(1)
	for i, x := range nodes {
		if r.IntN(3) == 0 {
			trouble[i].change(r)
		}
		teller := s.Ends[i]
		x.WatchPeers(func(_ int, up bool, _ error) { teller.Watch(up) })
		x.Start(teller.Receive)
	}
	for i, x := range nodes {
		if err := x.Connect(t.Context(), ids[1-i], nodes[1-i].self); err != nil {
			t.Fatal(err)
		}
		if seed%2 == 0 {
			x.peers.mu.Lock()
			x.peers.nodes[ids[1-i]].tries = -1000 // each broken link is made again
			x.peers.mu.Unlock()
		}
	}
	s.Tell(func(x *vantest.Teller, r *rand.Rand) {
		i := 0
		if x == s.Ends[1] {
			i = 1
		}
		switch r.IntN(60) {
		case 0:
			x.Note("breaks in")
			nodes[i].breakIn()
		case 1:
			x.Note("breaks out")
			nodes[i].breakOut(ids[1-i])
		case 2:
			x.Note("inside lost")
			nodes[i].peers.lostInside(ids[1-i])
		case 3, 4, 5, 6:
			trouble[r.IntN(2)].change(r)
		}
	})
	remove()
	s.End()
	if t.Failed() {
		for i, x := range nodes {
			t.Logf("node %d:\n%s", ids[i], x.logged.String())
		}
	}
}
