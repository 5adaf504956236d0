package links

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
)

// process returns a peer.
func process(id int, incarnation uint32) *Peer {
	p := new(Peer)
	p.Init(id, Process{1}, incarnation)
	return p
}

var errGone = errors.New("gone")

// TestEvents: the watcher is called once for each change, and for the process that has the id.
func TestEvents(t *testing.T) {
	for name, c := range map[string]struct {
		do    func(q *Losses, p, old *Peer, then func())
		want  []string
		calls bool // then is called, after the watcher
	}{
		"lost and back": {func(q *Losses, p, _ *Peer, _ func()) {
			for _, up := range []bool{true, false, false, true, true} {
				q.Tell(p, up, nil)
			}
		}, []string{"8 false", "8 true"}, false},
		"the peer reports a loss": {func(q *Losses, p, _ *Peer, then func()) { q.Broken(p, errGone, then) }, []string{"8 false", "8 true"}, true},
		"a lost peer reports a loss": {func(q *Losses, p, _ *Peer, then func()) {
			q.Tell(p, false, errGone)
			q.Broken(p, errGone, then)
		}, []string{"8 false", "8 false"}, true},
		"replaced":            {func(q *Losses, p, old *Peer, _ func()) { q.Replaced(old, p) }, nil, false},
		"replaced while lost": {func(q *Losses, p, old *Peer, _ func()) { q.Tell(old, false, errGone); q.Replaced(old, p) }, []string{"8 true"}, false},
		"replaced when it was back, which was not told": {func(q *Losses, p, old *Peer, _ func()) {
			q.Tell(old, false, errGone)
			q.Tell(old, true, nil)
			q.Replaced(old, p)
		}, []string{"8 true"}, false},
		"a former peer": {func(q *Losses, _, old *Peer, then func()) {
			q.Tell(old, false, errGone)
			q.Broken(old, errGone, then)
		}, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, old := process(8, 5), process(8, 4)
			var got, gone []string
			called := 0
			q := Losses{running: true, Current: func(x *Peer) bool { return x == p }, Gone: func(id int) { gone = append(gone, fmt.Sprint(id, " false")) }}
			q.Watch(func(id int, up bool, cause error) {
				var at *van.ConnectionError
				if cause != nil && (!errors.As(cause, &at) || at.Incarnation != 5 || !errors.Is(cause, errGone)) {
					t.Errorf("the cause is %#v, want a ConnectionError of process 5", cause)
				}
				got = append(got, fmt.Sprint(id, " ", up))
			})
			c.do(&q, p, old, func() { called = len(got) + 1 })
			q.run()
			if !slices.Equal(got, c.want) || (called == len(got)+1) != c.calls {
				t.Errorf("the watcher was told %q, then was called after %d events, want %q, and then: %t", got, called-1, c.want, c.calls)
			}
			if losses := slices.DeleteFunc(got, func(x string) bool { return x == "8 true" }); !slices.Equal(gone, losses) {
				t.Errorf("Gone was called for %q, want %q", gone, losses)
			}
			if down := len(c.want) > 0 && c.want[len(c.want)-1] == "8 false"; q.Down(p) != down {
				t.Errorf("Down is %t, want %t", !down, down)
			}
		})
	}
}

// TestLossOfAFormerPeer: a queued loss of a process is not told after another process has become the peer. The new process's loss is.
func TestLossOfAFormerPeer(t *testing.T) {
	former, peer, other := process(8, 0), process(8, 0), process(10, 0)
	var mu sync.Mutex
	now := map[int]*Peer{8: former, 10: other}
	begun, replaced := make(chan bool), make(chan bool)
	var first sync.Once
	q := Losses{Current: func(x *Peer) bool {
		mu.Lock()
		defer mu.Unlock()
		return now[x.ID()] == x
	}}
	type told struct {
		id int
		up bool
	}
	events := make(chan told, 8)
	q.Watch(func(id int, up bool, _ error) {
		first.Do(func() {
			close(begun)
			<-replaced
		})
		events <- told{id, up}
	})
	q.Tell(other, false, errGone)
	<-begun // the watcher is busy with it
	q.Tell(former, false, errGone)
	mu.Lock()
	now[8] = peer
	mu.Unlock()
	q.Replaced(former, peer)
	q.Tell(peer, false, errGone)
	close(replaced)
	for _, want := range []told{{10, false}, {8, true}, {8, false}} {
		select {
		case got := <-events:
			if got != want {
				t.Errorf("%v is told, want %v", got, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%v is not told", want)
		}
	}
}
