package cluster_test

import (
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// TestAnswerToAPausedOriginal: the scheduler has declared a worker dead whose connection to the server is open. If the
// worker is a process of C++ StepMesh, the server still sends it answers: the process was paused, and aborts without the
// answers to its requests. A worker of this library cancels its requests itself. The server sends requests to neither.
func TestAnswerToAPausedOriginal(t *testing.T) {
	for name, original := range map[string]bool{"of the original": true, "of this library": false} {
		t.Run(name, func(t *testing.T) {
			c := testcluster.Start(t, testcluster.Options{})
			w, s := c.Workers[0], c.Servers[0]
			if original {
				core(s).SetProcess(int(w.ID()), &van.Node{Role: van.Worker, ID: int(w.ID())})
			}
			cause := &van.Error{Op: "heartbeat", Err: van.ErrPeerLost}
			core(s).SetLost(int(w.ID()), cause)
			send := func(request bool) error {
				m := rawRequest(7, 1, 8)
				m.Receiver, m.Request = int(w.ID()), request
				m.ProcessEpoch = core(s).Epoch(int(w.ID()))
				return core(s).App().Send(m)
			}
			if err := send(false); original == (err != nil) || !original && !errors.Is(err, van.ErrPeerLost) {
				t.Errorf("an answer to a worker that is declared dead: %v", err)
			}
			if err := send(true); !errors.Is(err, van.ErrPeerLost) {
				t.Errorf("a request to a worker that is declared dead: %v, want %v", err, van.ErrPeerLost)
			}
			if !original {
				return
			}
			core(s).Van().Disconnect(int(w.ID()))
			var detail *van.Error
			if err := send(false); !errors.Is(err, van.ErrPeerLost) || !errors.As(err, &detail) || detail.Peer == "" {
				t.Errorf("an answer to a worker that is declared dead and not connected: %v, want %v and the peer", err, van.ErrPeerLost)
			}
		})
	}
}
