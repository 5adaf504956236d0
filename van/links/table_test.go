package links

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
)

// testPeer, testLink and testIn are those of a transport that moves no bytes.
type testPeer = Node[struct{}, *testLink]

type testLink struct{ closed int }

func (l *testLink) Close() int             { l.closed++; return 0 }
func (l *testLink) Linger(context.Context) {}

type testIn struct {
	Inbound
	fenced bool
}

func newTable(t *testing.T) *Table[struct{}, *testLink, *testIn] {
	p := &Table[struct{}, *testLink, *testIn]{}
	p.Open(Options[struct{}, *testLink, *testIn]{Log: slog.New(slog.DiscardHandler),
		StartLocked: func(in *testIn) { in.Held.Store(false) },
		EndLocked:   func(in *testIn, fence bool) bool { in.fenced = fence; return true }})
	t.Cleanup(func() {
		p.BeginClose()
		p.closeLinks(t.Context())
		p.WG.Wait()
	})
	return p
}

func connect(p *Table[struct{}, *testLink, *testIn], id int, process Process) *testPeer {
	n := &testPeer{}
	n.Init(id, process, 1)
	p.Connect(n)
	return n
}

func enter(p *Table[struct{}, *testLink, *testIn], id int, process Process) (*testIn, error) {
	in := &testIn{Inbound: Inbound{From: id, Process: process}}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return in, p.EnterLocked(in)
}

// TestReplacedAreBounded: of the processes that were replaced the latest are remembered; one without a name is not.
func TestReplacedAreBounded(t *testing.T) {
	p := newTable(t)
	name := func(i int) Process { return Process{byte(i), byte(i >> 8)} }
	for i := range MaxReplaced + 11 { // the first one has no name, and the last one is not replaced
		connect(p, 9, name(i))
	}
	if n := len(p.replaced); n != MaxReplaced || p.replaced[0] != name(10) || p.replaced[n-1] != name(MaxReplaced+9) {
		t.Errorf("%d are remembered, from %x to %x", n, p.replaced[0], p.replaced[n-1])
	}
}

// TestInbound: a link is read while its process has its id. A link of a replacement process is held before Admit, and one of a replaced
// process is refused.
func TestInbound(t *testing.T) {
	p := newTable(t)
	connect(p, 9, Process{1})
	first, err := enter(p, 9, Process{1})
	if err != nil || first.Held.Load() {
		t.Fatalf("held: %t, error: %v; want that it is read", first.Held.Load(), err)
	}
	second, err := enter(p, 9, Process{2})
	if err != nil || !second.Held.Load() {
		t.Fatalf("held: %t, error: %v; want that a link of an unknown process is held", second.Held.Load(), err)
	}
	connect(p, 9, Process{2})
	if !first.fenced || len(p.Ins()) != 1 || !second.Held.Load() {
		t.Errorf("the link of the replaced process is fenced: %t, the other one is held: %t, there are %d", first.fenced, second.Held.Load(), len(p.Ins()))
	}
	p.admit(p.Of(9))
	if second.Held.Load() {
		t.Error("the link of the admitted process is held")
	}
	if _, err := enter(p, 9, Process{1}); !errors.Is(err, van.ErrReplaced) {
		t.Errorf("a link of the replaced process: %v, want ErrReplaced", err)
	}
	p.drop(9)
	connect(p, 9, Process{3})
	if !second.fenced || len(p.Ins()) != 0 {
		t.Errorf("after Disconnect and Connect with another process, the link is fenced: %t; %d are read", second.fenced, len(p.Ins()))
	}
}

// TestWaitingAreBounded: a known process whose links wait for its earlier one keeps a bounded number of them, the newest. Links of others stay.
func TestWaitingAreBounded(t *testing.T) {
	p := newTable(t)
	p.O.StartLocked = func(*testIn) {}
	connect(p, 9, Process{1})
	connect(p, 10, Process{2})
	other, err := enter(p, 10, Process{2})
	for range MaxHeld + 10 {
		if _, e := enter(p, 9, Process{1}); e != nil {
			err = e
		}
	}
	if n := len(p.Ins()); err != nil || n != MaxHeld+1 || p.Ins()[0] != other {
		t.Errorf("%d links wait (%v), want %d with the one of another process", n, err, MaxHeld+1)
	}
}

// TestMarksLost: a link ends if its marks may be lost. An attempt of the van inside to connect that fails loses none.
func TestMarksLost(t *testing.T) {
	p := newTable(t)
	connect(p, 9, Process{1})
	in, err := enter(p, 9, Process{1})
	if err != nil {
		t.Fatal(err)
	}
	in.Marks.Await(Mark{}, func() {})
	told := 0
	for k, cause := range []error{syscall.ECONNREFUSED, syscall.ECONNRESET} {
		p.Inside(func(int, bool, error) { told++ }, 9, false, cause)
		if told != k+1 || len(p.Ins()) != 1-k {
			t.Errorf("after %v the watcher was told of %d losses, and %d links are left; want %d and %d", cause, told, len(p.Ins()), k+1, 1-k)
		}
	}
}

// TestStates: the first Await makes the link. When the link breaks and the peer takes no other one, the peer is refused, and has no link.
// A peer that leaves before its link was made is settled.
func TestStates(t *testing.T) {
	p := newTable(t)
	refused, breaks := errors.New("refused"), make(chan struct{})
	p.O.Dial = func(*testPeer, bool, bool) (*testLink, Mark, error) { return &testLink{}, Mark{}, nil }
	p.O.Keep = func(n *testPeer) {
		<-breaks
		p.Broke(n, refused)
		p.Set(n, Refused, refused)
	}
	n := connect(p, 9, Process{1})
	if s := n.State(); s != Unused {
		t.Errorf("state %d before Await, want Unused", s)
	}
	if x := p.Await(9); x != n || x.State() != Linked || len(p.Outs()) != 1 {
		t.Errorf("state %d after Await, %d links; want Linked, with one link", x.State(), len(p.Outs()))
	}
	close(breaks)
	p.WG.Wait()
	if s, why := p.Status(n); s != Refused || !errors.Is(why, refused) || n.Link() != nil || len(p.Outs()) != 0 || !p.Losses.Down(&n.Peer) {
		t.Errorf("state %d because of %v, link %v; want Refused, no link, and a loss", s, why, n.Link())
	}
	other := connect(p, 10, Process{3})
	p.drop(10)
	<-other.Settled()
}

// TestTimeOfMarks: the timer of a link's marks, which refers to the van, ends with the last mark.
func TestTimeOfMarks(t *testing.T) {
	var w Marks
	mark := Mark{Kind: "test"}
	w.Await(mark, func() { t.Error("marks that have arrived are late") })
	for _, c := range []struct{ request, last bool }{{true, false}, {true, false}, {false, true}, {false, false}} {
		if got := w.Arrived(mark, mark.message(9, c.request)); got != c.last {
			t.Errorf("request %t: the last mark: %t, want %t", c.request, got, c.last)
		}
	}
	if w.limit.Stop() {
		t.Error("the timer runs")
	}
}

// TestAwaitLonger: the timer of a link that waits for its marks starts again, that of an ended link does not.
func TestAwaitLonger(t *testing.T) {
	p := newTable(t)
	connect(p, 9, Process{1})
	in, err := enter(p, 9, Process{1})
	if err != nil {
		t.Fatal(err)
	}
	in.Marks.Await(Mark{}, func() {})
	for _, waits := range []bool{true, false} {
		in.Marks.limit.Stop()
		p.AwaitLonger(in)
		if got := in.Marks.limit.Stop(); got != waits {
			t.Errorf("the timer runs: %t, want %t", got, waits)
		}
		p.Mu.Lock()
		p.RemoveLocked(in)
		p.Mu.Unlock()
	}
}

// TestTimeOfMarksOfEndedLink: the timer of a link that ends before its marks have arrived stops: it would keep the van for MarkTime.
func TestTimeOfMarksOfEndedLink(t *testing.T) {
	for name, end := range map[string]func(p *Table[struct{}, *testLink, *testIn], in *testIn) error{
		"removed": func(p *Table[struct{}, *testLink, *testIn], in *testIn) error {
			defer p.RemoveLocked(in)
			return p.EnterLocked(in)
		},
		"taken": func(p *Table[struct{}, *testLink, *testIn], in *testIn) error {
			defer p.TakeIns()
			p.Mu.Lock()
			defer p.Mu.Unlock()
			return p.EnterLocked(in)
		},
		"closed": func(p *Table[struct{}, *testLink, *testIn], in *testIn) error {
			p.BeginClose()
			if err := p.EnterLocked(in); !errors.Is(err, van.ErrClosed) {
				return fmt.Errorf("a link of a closed table: %w, want ErrClosed", err)
			}
			return nil
		},
		"replaced": func(p *Table[struct{}, *testLink, *testIn], in *testIn) error {
			connect(p, 9, Process{1})
			connect(p, 9, Process{2})
			if err := p.EnterLocked(in); !errors.Is(err, van.ErrReplaced) {
				return fmt.Errorf("a link of a replaced process: %w, want ErrReplaced", err)
			}
			return nil
		},
	} {
		p := newTable(t)
		in := &testIn{Inbound: Inbound{From: 9, Process: Process{1}}}
		in.Marks.Await(Mark{}, func() {})
		if err := end(p, in); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if in.Marks.limit.Stop() {
			t.Errorf("%s: the timer runs", name)
		}
	}
}
