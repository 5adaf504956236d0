package local

import (
	"errors"
	"sync"
	"testing"
	"time"
)

// TestLossOfAFormerPeer: a queued loss of a process is not reported after another process has become the peer. The
// new process's loss is.
func TestLossOfAFormerPeer(t *testing.T) {
	former, peer, other := &outPeer{}, &outPeer{}, &outPeer{}
	now := map[int]*outPeer{8: former, 10: other}
	begun, replaced := make(chan bool), make(chan bool)
	var first sync.Once
	l := losses{}
	l.current = func(id int, n *outPeer) bool { return now[id] == n }
	type event struct {
		id int
		up bool
	}
	events := make(chan event, 8)
	watch := func(id int, up bool, _ error) {
		first.Do(func() {
			close(begun)
			<-replaced
		})
		events <- event{id, up}
	}
	l.watch.Store(&watch)
	gone := errors.New("gone")
	l.tell(other, 10, false, gone)
	<-begun // the watcher is busy with it
	l.tell(former, 8, false, gone)
	now[8] = peer
	l.replaced(8, former, peer)
	l.tell(peer, 8, false, gone)
	close(replaced)
	for _, want := range []event{{10, false}, {8, true}, {8, false}} {
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
