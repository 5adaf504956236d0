package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// TestReadRefused: the text of a refusal is parsed; no other text is, and nothing unprintable gets into an error.
func TestReadRefused(t *testing.T) {
	out := &sent{}
	var lines bytes.Buffer
	n := &Node{nodeInfo: nodeInfo{log: slog.New(slog.NewTextHandler(&lines, nil))}, transport: transport{van: out}}
	n.assemble()
	n.processes.change(9, func(p *process) { p.known, p.incarnation, p.epoch = true, 5, 2 })
	n.App().Refuse(9, 2, 7, 3, 20, &van.Error{Detail: "12 bytes\n", Err: van.ErrQueueFull})
	n.App().Refuse(9, 2, 7, 3, 20, errors.Join(van.ErrInvalid, errors.New(strings.Repeat("ä", 2000))))
	for _, body := range out.bodies {
		if rest, is := strings.CutPrefix(body, refusedPrefix); !is || len(body) > maxRefused {
			t.Errorf("%d bytes are sent: %.60q", len(body), body)
		} else if meta, why := parseRefused([]byte(rest)); meta.AppID != 7 || meta.CustomerID != 3 || meta.Timestamp != 20 || why == nil || why.Error() != logx.Printable(why.Error()) {
			t.Errorf("%.60q is read as %d %d %d %v", body, meta.AppID, meta.CustomerID, meta.Timestamp, why)
		}
	}
	if len(out.bodies) != 2 {
		t.Errorf("%d refusals are told, want 2", len(out.bodies))
	}
	n.App().Refuse(9, 1, 7, 3, 20, van.ErrInvalid)   // of the earlier process
	n.App().Refuse(11, 1, 7, 3, 20, van.ErrInvalid)  // node 11 is unknown
	n.App().Refuse(9, 2, 7, 3, 20, van.ErrMalformed) // a reason that is not sent
	n.processes.change(9, func(p *process) { p.lost = van.ErrPeerLost })
	n.App().Refuse(9, 2, 7, 3, 20, van.ErrInvalid)
	if len(out.bodies) != 2 {
		t.Errorf("%q are told, want nothing more", out.bodies[2:])
	}
	if got, want := countersOf(n), (Counters{RefusedRequests: 1, InvalidRequests: 4}); got != want {
		t.Errorf("%+v is counted, want %+v", got, want)
	}

	n.processes.change(13, func(p *process) { p.known = true })
	n.App().Refuse(13, 1, 7, 3, 20, Declined(errors.New("key 5 is locked")))
	if want := "which cannot be notified and waits for its limit"; len(out.bodies) != 2 || !strings.Contains(lines.String(), want) || !strings.Contains(lines.String(), "key 5 is locked") {
		t.Errorf("a C++ process receives %q; the log is %q, want %q", out.bodies[2:], lines.String(), want)
	}
	n.processes.change(9, func(p *process) { p.lost = nil })
	n.App().Refuse(9, 2, 7, 3, 20, Declined(fmt.Errorf("%w: key 5 is locked", van.ErrInvalid)))
	if len(out.bodies) != 3 {
		t.Fatalf("%q are told, want one more", out.bodies[2:])
	}
	_, no := parseRefused([]byte(strings.TrimPrefix(out.bodies[2], refusedPrefix)))
	if !errors.Is(no, van.ErrRequestRefused) || !errors.Is(no, van.ErrInvalid) || errors.Is(no, van.ErrQueueFull) || no.Error() != "request refused: key 5 is locked" {
		t.Errorf("%q is read as %v", out.bodies[2], no)
	}

	n.App().Refuse(9, 2, 7, 3, 20, Unanswered(&van.Error{Op: "send", Err: van.ErrQueueFull}))
	if len(out.bodies) != 4 {
		t.Fatalf("%q are told, want one more", out.bodies[3:])
	}
	_, no = parseRefused([]byte(strings.TrimPrefix(out.bodies[3], refusedPrefix)))
	if errors.Is(no, van.ErrRequestRefused) || errors.Is(no, van.ErrQueueFull) || no.Error() != "the request was processed, but its answer was not sent: send: send queue full" {
		t.Errorf("%q is read as %v", out.bodies[3], no)
	}

	for body, want := range map[string]error{
		"7 0 5 refused x": van.ErrRequestRefused, "7 0 5 refused,full x": van.ErrQueueFull, "7 0 5 refused, x": nil, "7 0 5 refused,closed x": nil, "7 0 5 , x": nil,
		"7 0 5 unanswered x": errUnanswered, "7 0 5 invalid x": van.ErrInvalid, "7 0 5 full x y": van.ErrQueueFull, "7 0 5 full a\nb\xff": van.ErrQueueFull, "7 0 5 full ": van.ErrQueueFull,
		"7 0 5 full": nil, "7 0 5 closed x": nil, "7 0 x full y": nil, "7 0 99999999999 full x": nil, "": nil, "7": nil, " 7 0 5 full x": nil,
	} {
		_, why := parseRefused([]byte(body))
		if !errors.Is(why, want) || why != nil && why.Error() != logx.Printable(why.Error()) {
			t.Errorf("%q is read as %v, want %v", body, why, want)
		}
	}
}

// TestRefusedWhileLost: a refusal for a process that is considered lost is sent when that process is back, and not to its replacement.
func TestRefusedWhileLost(t *testing.T) {
	out := &sent{}
	n := &Node{nodeInfo: nodeInfo{log: slog.New(slog.DiscardHandler)}, transport: transport{van: out}}
	n.assemble()
	n.processes.change(9, func(p *process) { p.known, p.incarnation, p.epoch, p.lost = true, 5, 2, van.ErrPeerLost })
	n.App().Refuse(9, 1, 7, 3, 19, van.ErrInvalid) // of the earlier process
	n.App().Refuse(9, 2, 7, 3, 20, Unanswered(van.ErrPeerLost))
	if len(out.bodies) > 0 {
		t.Errorf("%q are told while the worker is lost", out.bodies)
	}
	back := func() {
		n.processes.change(9, func(p *process) { p.lost = nil })
		n.perform(membership.PeerAlive{ID: 9})
	}
	back()
	if want := []string{"stepaf/1 refused 7 3 20 unanswered peer lost"}; !slices.Equal(out.bodies, want) {
		t.Errorf("%q are told, want %q", out.bodies, want)
	}
	n.processes.change(9, func(p *process) { p.lost = van.ErrPeerLost })
	for range 2 * maxNotices {
		n.App().Refuse(9, 2, 7, 3, 20, van.ErrInvalid)
	}
	if k := len(n.notices.by[9]); k != maxNotices {
		t.Errorf("%d refusals are remembered, want %d", k, maxNotices)
	}
	n.processes.change(9, func(p *process) { p.incarnation, p.epoch = 6, 3 })
	back()
	if len(out.bodies) > 1 {
		t.Errorf("the replacement receives %q", out.bodies[1:])
	}
}
