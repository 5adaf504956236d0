package replay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
)

// play goes through the recording.
func (r *run) play() error {
	sent, err := r.session.Sent()
	if err != nil {
		return err
	}
	arrived := map[int]bool{}
	for _, k := range sent {
		arrived[k] = true
	}
	first := r.firsts()
	for i := range r.session.Events {
		e := &r.session.Events[i]
		switch {
		case e.Type == vansession.Send && e.From == r.self.ID:
			m, err := parseMessage(e)
			if err == nil && first(m) {
				r.actions <- struct{}{}
			}
			if err == nil {
				err = r.expect(m)
			}
			if err != nil {
				return err
			}
		case e.Type == vansession.Send && e.To == r.self.ID && !arrived[i]:
			// The recorded node had left already. Ours need not.
			if err := r.deliver(e, false); err != nil {
				return err
			}
		case e.Type == vansession.Recv && e.To == r.self.ID:
			if e = &r.session.Events[sent[i]]; e.From == r.self.ID {
				continue
			}
			if err := r.deliver(e, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// firsts returns a function that tells, message by message of our node, whether
// one is the first of an action of the application.
func (r *run) firsts() func(*message) bool {
	barriers := 0
	seen := map[int32]bool{}
	return func(m *message) bool {
		switch {
		case !m.meta.Request:
			return false
		case m.meta.Control.Cmd == van.InstanceBarrier:
			barriers++
			return barriers > 1 // the first one belongs to the start
		case m.meta.IsControl():
			return true
		case m.meta.IsTensor && m.meta.Head != van.Single && m.meta.Head != van.BatchStart || seen[m.meta.Timestamp]:
			return false
		}
		seen[m.meta.Timestamp] = true
		return true
	}
}

// expect waits for a message of our node and compares it.
func (r *run) expect(m *message) error {
	if m.To == r.self.ID {
		return r.expectOwn(m)
	}
	from := stream{m.To, m.Via.Socket == "ROUTER"}
	queues := r.peers.queues
	switch m.meta.Control.Cmd {
	case van.Ack:
		r.acks[from] = append(r.acks[from], m)
		return nil
	case van.Heartbeat:
		if r.over {
			return nil // the original's heartbeats go on for a while
		}
		queues = r.peers.beats
	}
	r.due[from] = append(r.due[from], m)
	if late(&m.meta) {
		return nil
	}
	due := r.due[from]
	r.due[from] = nil
	for _, m := range due {
		if err := r.match(m, queues, from); err != nil {
			return err
		}
	}
	return nil
}

// match takes the next message that our node has sent and compares it.
func (r *run) match(m *message, queues map[stream][]arrival, from stream) error {
	a, err := r.peers.next(queues, from)
	if err != nil {
		return fmt.Errorf("event %d, %s to %s: %w", m.Seq, m.meta.String(), van.NodeName(m.To), err)
	}
	if m.meta.Control.Cmd == van.AddNode && r.self.ID != van.SchedulerID {
		r.learnPort(m, a)
	}
	if err := checkIdentity(m, a); err != nil {
		return err
	}
	if d := r.difference(a.frames, r.expectation(m)); d != "" {
		return fmt.Errorf("event %d, to %s: %s", m.Seq, van.NodeName(m.To), d)
	}
	return r.note(m, a)
}

// expectOwn is expect for a message of our node to itself, which never leaves it.
func (r *run) expectOwn(m *message) error {
	switch m.meta.Control.Cmd {
	case van.Terminate:
		r.over = true
		return nil
	case van.Ack:
		return nil
	}
	r.hidden++
	if !m.meta.Request || r.hidden == 1 {
		return nil
	}
	select {
	case <-r.finalizes.reached:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("event %d: our node does not ask itself for the last barrier", m.Seq)
	}
}

// learnPort takes our node's port from its first message.
func (r *run) learnPort(m *message, a arrival) {
	if len(a.frames[0]) == metaSize+nodeSize {
		r.ports[r.self.Port] = int(binary.LittleEndian.Uint32(a.frames[0][metaSize+nodePort:]))
	}
}

// checkIdentity compares the name that came with a message: the routing id of the
// DEALER, or the name that a server writes before its answers.
func checkIdentity(m *message, a arrival) error {
	want := m.Via.Identity
	if self := m.Frame("self"); self != nil {
		want = string(self.Bytes)
	}
	if want == "" {
		// libzmq makes one up for a C++ node without an id. A node of this library names itself, so that the scheduler can
		// answer before it has an id; C++ StepMesh takes every name that does not begin with "ps" for none.
		madeUp := len(a.identity) == 5 && a.identity[0] == 0
		if !madeUp && !strings.HasPrefix(a.identity, "new.") {
			return fmt.Errorf("event %d: routing id %q, want none, or new.<incarnation>", m.Seq, a.identity)
		}
		return nil
	}
	if a.identity != want {
		return fmt.Errorf("event %d: sender %q, want %q", m.Seq, a.identity, want)
	}
	return nil
}

// note keeps the fields of our request that answers repeat, and checks traces.
func (r *run) note(m *message, a arrival) error {
	if m.meta.IsControl() {
		return nil
	}
	var got van.Meta
	if err := van.DecodeMeta(a.frames[0], &got); err != nil {
		return err
	}
	if got.Request {
		r.addrs[request{m.To, got.Timestamp}] = got.Addr
	}
	for _, f := range []struct {
		name      string
		got, want uint64
	}{
		{"request start", got.RequestTrace.Start, m.meta.RequestTrace.Start},
		{"request process", got.RequestTrace.Process, m.meta.RequestTrace.Process},
		{"response start", got.ResponseTrace.Start, m.meta.ResponseTrace.Start},
	} {
		if f.want != 0 && f.got == 0 {
			return fmt.Errorf("event %d: no time of %s", m.Seq, f.name)
		}
	}
	return nil
}

// deliver sends a recorded message to our node. With wait it returns when our node
// has taken it, so that messages of different peers have the recorded order.
func (r *run) deliver(e *vansession.Event, wait bool) error {
	m, err := parseMessage(e)
	if err != nil {
		return err
	}
	packed := r.translate(m)
	if !m.meta.Request && !m.meta.IsControl() {
		binary.LittleEndian.PutUint64(packed[offAddr:], r.addrs[request{m.From, m.meta.Timestamp}])
	}
	frames := append([][]byte{packed}, m.data...)
	sock := r.peers.routers[m.From]
	if m.Via.Socket == "ROUTER" {
		frames = slices.Insert(frames, 0, m.Frame("dest").Bytes, m.Frame("self").Bytes)
	} else {
		sock = r.peers.dealer(m.From, m.Via.Identity, r.ports[r.self.Port])
	}
	if err := send(sock, frames); err != nil {
		return fmt.Errorf("event %d: %w", m.Seq, err)
	}
	if !wait {
		return nil
	}
	select {
	case <-r.delivered:
		return nil
	case err := <-r.left:
		r.left <- err
		if err != nil {
			return fmt.Errorf("event %d: our node has left: %w", m.Seq, err)
		}
		return nil
	case <-time.After(patience):
		return fmt.Errorf("event %d: our node does not take %s from %s", m.Seq, m.meta.String(), van.NodeName(m.From))
	}
}

// end waits for our node and checks the messages that play could not compare in order.
func (r *run) end() error {
	select {
	case err := <-r.left:
		r.left <- err
		if err != nil {
			return err
		}
	case <-time.After(patience):
		return errors.New("our node does not leave")
	}
	for to, due := range r.due {
		if len(due) > 0 {
			return fmt.Errorf("event %d: nothing follows %s to %s", due[0].Seq, due[0].meta.String(), van.NodeName(to.peer))
		}
	}
	if err := r.endAcks(); err != nil {
		return err
	}
	err := r.peers.receive(quiet)
	for ; err == nil; err = r.peers.receive(quiet) {
	}
	if !errors.Is(err, errNothing) {
		return err
	}
	for what, queues := range map[string]map[stream][]arrival{"message": r.peers.queues, "acknowledgement": r.peers.acks} {
		for to, q := range queues {
			if len(q) > 0 {
				return fmt.Errorf("%d more of %s to %s than recorded, the first one %x", len(q), what, van.NodeName(to.peer), q[0].frames[0])
			}
		}
	}
	if r.heartbeats {
		return r.checkCounter()
	}
	return nil
}

// endAcks compares the acknowledgements as a set.
func (r *run) endAcks() error {
	for from, want := range r.acks {
		for range want {
			a, err := r.peers.next(r.peers.acks, from)
			if err != nil {
				return fmt.Errorf("%d acknowledgements to %s missing: %w", len(want), van.NodeName(from.peer), err)
			}
			i := slices.IndexFunc(want, func(m *message) bool {
				return checkIdentity(m, a) == nil && r.difference(a.frames, r.expectation(m)) == ""
			})
			if i < 0 {
				return fmt.Errorf("acknowledgement to %s that the recording does not have: %x", van.NodeName(from.peer), a.frames[0])
			}
			want = slices.Delete(want, i, i+1)
		}
	}
	return nil
}

// checkCounter checks that the timestamps of our control messages count them.
func (r *run) checkCounter() error {
	if r.self.ID != van.SchedulerID && !slices.IsSorted(r.peers.stamps) {
		return fmt.Errorf("timestamps %v of the control messages do not ascend", r.peers.stamps)
	}
	all := slices.Sorted(slices.Values(r.peers.stamps))
	if len(slices.Compact(slices.Clone(all))) < len(all) || all[0] != 0 || all[len(all)-1] >= len(all)+r.hidden {
		return fmt.Errorf("timestamps %v of the control messages, want those of a counter, with %d of the node to itself", all, r.hidden)
	}
	return nil
}
