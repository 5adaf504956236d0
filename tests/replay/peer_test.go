package replay

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van"
)

// peers plays all nodes of a session but one with raw sockets. It is used by one
// goroutine.
type peers struct {
	t       *testing.T
	ctx     *zmq4.Context
	poller  *zmq4.Poller
	routers map[int]*zmq4.Socket // by node id
	dealers map[int]*dealer      // to our node
	owner   map[*zmq4.Socket]stream

	queues map[stream][]arrival // messages of our node, in order
	acks   map[stream][]arrival
	beats  map[stream][]arrival
	stamps []int // timestamps of control messages other than ACK, in the order of arrival
}

type dealer struct {
	sock     *zmq4.Socket
	identity string
}

// stream is one direction of one connection: the messages of our node to a peer through
// one of its kinds of socket.
type stream struct {
	peer   int
	routed bool // with its ROUTER, so that it arrives at the peer's DEALER
}

// arrival is a message as a socket gave it: sender, meta, data.
type arrival struct {
	identity string
	frames   [][]byte
}

func newPeers(t *testing.T) *peers {
	ctx, err := zmq4.NewContext()
	must(t, err)
	p := &peers{t: t, ctx: ctx, poller: zmq4.NewPoller(), routers: map[int]*zmq4.Socket{}, dealers: map[int]*dealer{},
		owner: map[*zmq4.Socket]stream{}, queues: map[stream][]arrival{}, acks: map[stream][]arrival{}, beats: map[stream][]arrival{}}
	t.Cleanup(p.close)
	return p
}

func (p *peers) close() {
	for s := range p.owner {
		if err := s.Close(); err != nil {
			p.t.Error(err)
		}
	}
	if err := p.ctx.Term(); err != nil {
		p.t.Error(err)
	}
}

// bind opens the ROUTERs of nodes and returns their ports by the recorded ones.
// Ports get the order of the recorded ones, since the scheduler ranks by port.
func (p *peers) bind(nodes []vansession.Node) map[int]int {
	bound := map[int]*zmq4.Socket{}
	for range nodes {
		s := p.open(zmq4.ROUTER, nil)
		must(p.t, s.SetRouterMandatory(1))
		must(p.t, s.Bind("tcp://127.0.0.1:*"))
		end, err := s.GetLastEndpoint()
		must(p.t, err)
		port, err := strconv.Atoi(end[strings.LastIndexByte(end, ':')+1:])
		must(p.t, err)
		bound[port] = s
	}
	ports := map[int]int{}
	sorted := slices.SortedFunc(slices.Values(nodes), func(a, b vansession.Node) int { return a.Port - b.Port })
	for i, port := range slices.Sorted(maps.Keys(bound)) {
		n := sorted[i]
		ports[n.Port] = port
		p.routers[n.ID] = bound[port]
		p.watch(bound[port], stream{n.ID, false})
	}
	return ports
}

func (p *peers) open(kind zmq4.Type, set func(*zmq4.Socket) error) *zmq4.Socket {
	s, err := p.ctx.NewSocket(kind)
	must(p.t, err)
	must(p.t, s.SetLinger(0))
	if set != nil {
		must(p.t, set(s))
	}
	return s
}

func (p *peers) watch(s *zmq4.Socket, from stream) {
	p.owner[s] = from
	p.poller.Add(s, zmq4.POLLIN)
}

// dealer returns the DEALER of a node to ours, at port. Like the original, a node
// that has got its id replaces its connection.
func (p *peers) dealer(id int, identity string, port int) *zmq4.Socket {
	d := p.dealers[id]
	if d != nil && d.identity == identity {
		return d.sock
	}
	if d != nil {
		must(p.t, p.poller.RemoveBySocket(d.sock))
		delete(p.owner, d.sock)
		must(p.t, d.sock.Close())
	}
	s := p.open(zmq4.DEALER, func(s *zmq4.Socket) error {
		if identity == "" {
			return nil
		}
		return s.SetIdentity(identity)
	})
	must(p.t, s.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", port)))
	p.dealers[id] = &dealer{s, identity}
	p.watch(s, stream{id, true})
	return s
}

// send sends the frames of one message.
func send(s *zmq4.Socket, frames [][]byte) error {
	for i, f := range frames {
		flag := zmq4.SNDMORE
		if i == len(frames)-1 {
			flag = 0
		}
		if _, err := s.SendBytes(f, flag); err != nil {
			return err
		}
	}
	return nil
}

var errNothing = errors.New("nothing came")

// receive waits until something has come, and sorts it and all else that has.
func (p *peers) receive(limit time.Duration) error {
	ready, err := p.poller.Poll(limit)
	if err != nil {
		return err
	}
	if len(ready) == 0 {
		return errNothing
	}
	for _, r := range ready {
		frames, err := r.Socket.RecvMessageBytes(zmq4.DONTWAIT)
		if err != nil {
			return err
		}
		if err := p.sort(p.owner[r.Socket], frames); err != nil {
			return err
		}
	}
	return nil
}

func (p *peers) sort(from stream, frames [][]byte) error {
	if len(frames) < 2 {
		return fmt.Errorf("%v: message of %d frames, want a name, a meta, data", from, len(frames))
	}
	var meta van.Meta
	if err := van.DecodeMeta(frames[1], &meta); err != nil {
		return fmt.Errorf("%v: %w", from, err)
	}
	queues := p.queues
	switch meta.Control.Cmd {
	case van.Ack:
		queues = p.acks
	case van.Heartbeat:
		queues = p.beats
	}
	if meta.IsControl() && meta.Control.Cmd != van.Ack {
		p.stamps = append(p.stamps, int(meta.Timestamp))
	}
	queues[from] = append(queues[from], arrival{string(frames[0]), frames[1:]})
	return nil
}

// next takes the next message of a stream, waiting for it.
func (p *peers) next(queues map[stream][]arrival, from stream) (arrival, error) {
	deadline := time.Now().Add(patience)
	for len(queues[from]) == 0 {
		if err := p.receive(max(time.Until(deadline), 0)); err != nil {
			return arrival{}, err
		}
	}
	a := queues[from][0]
	queues[from] = queues[from][1:]
	return a, nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
