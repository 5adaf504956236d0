package local

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
)

// stopAccepting makes x a process that is about to die: its socket, which is returned,
// is there, and x does not answer on it.
func (x *node) stopAccepting() *net.UnixListener {
	x.t.Helper()
	f, err := x.acceptor.listener.File()
	if err != nil {
		x.t.Fatal(err)
	}
	defer f.Close()
	socket, err := net.FileListener(f)
	if err != nil {
		x.t.Fatal(err)
	}
	// A deadline would do, too, if x were not still on its way to wait for a peer: Close
	// returns when it has left.
	if err := x.acceptor.listener.Close(); err != nil {
		x.t.Fatal(err)
	}
	return socket.(*net.UnixListener)
}

// breakIn ends the links to x as its death does.
func (x *node) breakIn() {
	x.peers.Mu.Lock()
	defer x.peers.Mu.Unlock()
	for c := range x.acceptor.conns {
		_ = c.Close()
	}
}

// down reports whether x has reported the loss of peer id, after all earlier events have been settled.
func (x *node) down(id int) bool {
	x.peers.Mu.Lock()
	defer x.peers.Mu.Unlock()
	return x.peers.Losses.Down(&x.peers.Of(id).Peer)
}

// TestDyingPeer: a process that dies still has its socket when its connections have
// broken. That it takes a connection there is no sign of life.
func TestDyingPeer(t *testing.T) {
	for _, c := range []struct {
		name  string
		tries int // to make the link again, before
	}{{"at first", 0}, {"after many losses", maxTries}} {
		t.Run(c.name, func(t *testing.T) {
			worker, server := pairWith(t, func(v *Van) { v.peers.returnTime = limit }) // no process dies here
			worker.peers.Mu.Lock()
			worker.peers.Of(8).Data.tries = c.tries
			worker.peers.Mu.Unlock()
			socket := server.stopAccepting()
			server.breakIn()
			worker.event(8, false)
			if err := socket.SetDeadline(time.Now().Add(limit)); err != nil {
				t.Fatal(err)
			}
			last, err := socket.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			_ = socket.Close()
			_ = last.Close()
			eventually(t, "it is settled that the link is lost", func() bool { return !worker.Linked(8) })
			if !worker.down(8) {
				t.Error("the dead peer was said to be there again")
			}
		})
	}
}

// TestLateLoss: a peer whose old link is emptied only after it has made a new one is
// there in the end.
func TestLateLoss(t *testing.T) {
	worker, server := pair(t)
	worker.rx.feed.Lock()
	server.peers.Mu.Lock()
	_ = server.peers.link(9).conn.Close()
	server.peers.Mu.Unlock()
	eventually(t, "the new link is there, the old one lost", func() bool {
		ins := worker.peers.Ins()
		return len(ins) == 2 && ins[0].lost.Load() && !ins[1].lost.Load()
	})
	worker.rx.feed.Unlock()
	worker.event(8, false)
	worker.event(8, true)
	eventually(t, "the old link is removed", func() bool { return len(worker.peers.Ins()) == 1 })
	if worker.down(8) {
		t.Error("the peer is held for lost")
	}
}

// TestLinkNotMadeAgain: a peer that lives and cannot make its link again sends over the van
// inside. It is there in the end.
func TestLinkNotMadeAgain(t *testing.T) {
	var full atomic.Bool
	worker, server := pairWith(t, func(v *Van) {
		v.tx.memory.make = func(n, have int) (int, error) {
			if full.Load() {
				return -1, unix.ENOMEM
			}
			return memfd.Part(n, have)
		}
	})
	full.Store(true)
	server.breakIn()
	for _, x := range []struct {
		*node
		peer int
	}{{server, 9}, {worker, 8}} {
		x.event(x.peer, false)
		x.event(x.peer, true)
		if x.down(x.peer) {
			t.Errorf("%d holds its peer for lost", x.self.ID)
		}
	}
	eventually(t, "it is settled that there is no link", func() bool { return !worker.Linked(8) })
	worker.resend(data(8, 1, []byte("x")))
	server.next().Release()
}

// TestReplacedPeer: if another process replaces a peer while the peer's loss is being reported, the watcher may
// apply the loss to the replacement process. In the end the watcher must know that process as connected, also if
// the former link is made again meanwhile, or if yet another process replaces the peer.
func TestReplacedPeer(t *testing.T) {
	for _, made := range []bool{false, true} {
		for _, again := range []bool{false, true} {
			t.Run(fmt.Sprintf("made=%t,again=%t", made, again), func(t *testing.T) {
				n := inproc.NewNetwork()
				worker, old, next := newNode(t, n, 9, nil), newNode(t, n, 8, nil), newNode(t, n, 8, nil)
				for _, x := range []*node{worker, old, next} {
					x.start()
				}
				var first sync.Once
				telling, replaced := make(chan struct{}), make(chan struct{})
				worker.WatchPeers(func(id int, up bool, cause error) {
					first.Do(func() {
						close(telling)
						<-replaced
					})
					worker.events <- event{id, up, cause}
				})
				worker.connect(old)
				worker.peers.Mu.Lock()
				was := worker.peers.Of(8)
				worker.peers.Mu.Unlock()
				old.breakIn()
				<-telling // the loss of old is being reported
				if made {
					worker.peers.Losses.Tell(&was.Peer, true, nil)
				}
				worker.connect(next)
				if again {
					last := newNode(t, n, 8, nil)
					last.start()
					worker.connect(last)
				}
				close(replaced)
				worker.event(8, false)
				worker.event(8, true)
				if worker.down(8) {
					t.Error("the peer is held for lost")
				}
			})
		}
	}
}

// TestDeadPeerDoesNotReturn: a peer whose process has ended is not reported as back when its time to make the link
// anew is over.
func TestDeadPeerDoesNotReturn(t *testing.T) {
	worker, _ := pairWith(t, func(v *Van) { v.peers.returnTime = 0 })
	child := exec.Command("sleep", "600")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer child.Wait()
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process has ended", func() bool { return ended(child.Process.Pid) })
	worker.peers.Mu.Lock()
	n := worker.peers.Of(8)
	worker.peers.Mu.Unlock()
	worker.peers.Losses.Tell(&n.Peer, false, errLinkBroke)
	worker.event(8, false)
	worker.peers.awaitReturn(n, &inLink{pid: child.Process.Pid, from: &inPeer{id: 8}})
	select {
	case e := <-worker.events:
		t.Errorf("told of node %d: up=%t", e.id, e.up)
	case <-time.After(200 * time.Millisecond):
	}
	if !worker.down(8) {
		t.Error("the dead peer was said to be there again")
	}
	worker.peers.awaitReturn(n, &inLink{pid: os.Getpid(), from: &inPeer{id: 8}}) // a living process
	worker.event(8, true)
}

// TestEndedProcess: a process that has ended is known by its number.
func TestEndedProcess(t *testing.T) {
	if ended(unix.Getpid()) {
		t.Error("this process is said to have ended")
	}
	if pid := 1 << 22; !ended(pid) { // the largest is one less
		t.Errorf("process %d is said to be there", pid)
	}
}
