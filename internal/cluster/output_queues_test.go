package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// slowVan records calls. Connect ends when the test says so.
type slowVan struct {
	van.Van
	calls   chan string
	release chan struct{}
}

func (v *slowVan) Connect(_ context.Context, id int, _ van.Node) error {
	<-v.release
	v.calls <- fmt.Sprintf("connect %d", id)
	return nil
}

func (v *slowVan) Rename(old, id int) error {
	v.calls <- fmt.Sprintf("rename %d to %d", old, id)
	return nil
}

func (v *slowVan) Send(m *van.Message) error {
	v.calls <- fmt.Sprintf("send to %d", m.Receiver)
	return nil
}

// TestRenameKeepsTheOrder: messages to a node under its new id are sent after the Rename, which waits for the node's
// connection.
func TestRenameKeepsTheOrder(t *testing.T) {
	v := &slowVan{calls: make(chan string, 8), release: make(chan struct{})}
	n := &Node{transport: transport{van: v}, nodeInfo: nodeInfo{log: slog.New(slog.DiscardHandler)}}
	n.assemble()
	for _, o := range []membership.Output{
		membership.Connect{ID: -3}, membership.Rename{Old: -3, New: 9}, membership.Send{To: 9}, membership.Send{To: 11},
	} {
		n.control.queues.dispatch(o)
	}
	close(v.release)
	var calls []string
	for range 4 {
		calls = append(calls, <-v.calls)
	}
	if want := []string{"send to 11", "connect -3", "rename -3 to 9", "send to 9"}; !slices.Equal(calls, want) {
		t.Errorf("done in the order %q, want %q", calls, want)
	}
}
