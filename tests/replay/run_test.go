package replay

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// patience is how long to wait for anything.
const patience = 30 * time.Second

// quiet is how long nothing may come at the end.
const quiet = 20 * time.Millisecond

// heartbeatSpeed is how much faster heartbeats are than recorded.
const heartbeatSpeed = 10

// run is one session played with one node being ours.
type run struct {
	t          *testing.T
	session    *vansession.Session
	self       vansession.Node
	heartbeats bool
	ports      map[int]int // this run's, by the recorded ones
	peers      *peers
	script     script

	delivered chan struct{} // one for each message that our node has taken
	actions   chan struct{} // one for each action that our node may do next
	left      chan error    // our node has finished
	finalizes *signal       // our node waits for the others to finish

	addrs  map[request]uint64 // addresses in our requests
	hidden int                // messages of our node to itself that took a timestamp
	over   bool               // the recorded node has stopped receiving
	acks   map[stream][]*message
	due    map[stream][]*message // may come later, see late
}

// request names one of our requests to a peer.
type request struct {
	peer      int
	timestamp int32
}

func newRun(t *testing.T, s *vansession.Session, self vansession.Node) *run {
	sc, ok := scripts[s.Name]
	if !ok {
		t.Fatalf("no script for session %s", s.Name)
	}
	r := &run{t: t, session: s, self: self, script: sc, heartbeats: s.Env["PS_HEARTBEAT_INTERVAL"] != "",
		delivered: make(chan struct{}, 1024), actions: make(chan struct{}, 64), left: make(chan error, 1),
		addrs: map[request]uint64{}, acks: map[stream][]*message{}, due: map[stream][]*message{}}
	ctx, cancel := context.WithTimeout(context.Background(), 6*patience)
	r.finalizes = &signal{Context: ctx, reached: make(chan struct{})}
	r.peers = newPeers(t)
	others := slices.DeleteFunc(slices.Clone(s.Nodes), func(n vansession.Node) bool { return n.ID == self.ID })
	r.ports = r.peers.bind(others)
	root := s.Nodes[slices.IndexFunc(s.Nodes, func(n vansession.Node) bool { return n.ID == van.SchedulerID })]
	if self.ID == van.SchedulerID {
		r.ports[root.Port] = testcluster.FreePort(t)
	}
	o := r.options(r.ports[root.Port])
	go func() { r.left <- r.live(ctx, o) }()
	t.Cleanup(func() {
		cancel() // so that our node ends, also if the test has failed
		select {
		case <-r.left:
		case <-time.After(patience):
			t.Error("our node does not end")
		}
	})
	return r
}

// options configures our node as the session's environment does.
func (r *run) options(rootPort int) postoffice.Options {
	e := []string{"DMLC_ROLE=" + r.self.Role, fmt.Sprintf("DMLC_PS_ROOT_PORT=%d", rootPort)}
	for k, v := range r.session.Env {
		e = append(e, k+"="+v)
	}
	cfg, err := env.LoadFrom(env.FromList(e))
	must(r.t, err)
	if r.self.ID != van.SchedulerID {
		cfg.NodeRank, cfg.GPU = r.self.Rank/cfg.GroupSize, r.self.Rank%cfg.GroupSize
	}
	cfg.HeartbeatInterval /= heartbeatSpeed
	level := slog.LevelError
	if testing.Verbose() {
		level = slog.LevelWarn
	}
	return postoffice.Options{
		Rand:   testcluster.Zero, // recorded timestamps begin at 0
		Config: cfg,
		Log:    slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
		NoRank: r.session.Name == "s2w2_norank",
		Van: func(o van.Options) (van.Van, error) {
			v, err := van.New(o)
			return &counted{v, r.delivered}, err
		},
	}
}

// counted is a van that says when its node has taken a message.
type counted struct {
	van.Van
	delivered chan<- struct{}
}

func (v *counted) Unwrap() van.Van { return v.Van }

func (v *counted) Start(recv van.Receiver) {
	v.Van.Start(func(m *van.Message) {
		recv(m)
		v.delivered <- struct{}{}
	})
}

// signal is a context that signals when a goroutine begins to wait for it.
type signal struct {
	context.Context
	once    sync.Once
	reached chan struct{}
}

func (s *signal) Done() <-chan struct{} {
	s.once.Do(func() { close(s.reached) })
	return s.Context.Done()
}

// live is our node's life. Each action after the start waits for its place in the
// recording.
func (r *run) live(ctx context.Context, o postoffice.Options) error {
	n, err := postoffice.Start(ctx, o)
	if err != nil {
		return err
	}
	defer n.Close()
	var actions []action
	barrier := func(ctx context.Context) error { return n.Barrier(ctx, 0, van.ServerGroup|van.WorkerGroup) }
	switch n.Role() {
	case van.Server:
		err = r.script.serve(r, n)
		actions = []action{barrier}
	case van.Worker:
		actions, err = r.script.work(r, n)
		actions = slices.Insert(actions, 0, barrier)
	}
	if err != nil {
		return err
	}
	if int(n.ID()) != r.self.ID || n.Rank() != r.self.Rank {
		return fmt.Errorf("our node is %s with rank %d, want id %d, rank %d", n.Name(), n.Rank(), r.self.ID, r.self.Rank)
	}
	for i, act := range append(actions, func(context.Context) error { return n.Shutdown(r.finalizes) }) {
		select {
		case <-r.actions:
		case <-ctx.Done():
			return fmt.Errorf("action %d has no place in the recording", i)
		}
		if err := act(ctx); err != nil {
			return fmt.Errorf("action %d: %w", i, err)
		}
	}
	if k := len(r.actions); k > 0 {
		return fmt.Errorf("%d actions of the recording are not in the script", k)
	}
	return nil
}
