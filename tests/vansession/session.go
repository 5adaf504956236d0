// Package vansession reads recorded sessions of the C++ reference: the messages that each
// node of a small cluster sent and received through its ZeroMQ sockets. Tests
// replay them. It is not part of the library.
package vansession

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
)

// Session is one recorded run.
type Session struct {
	Name        string
	Description string
	Env         map[string]string // environment of every node
	Nodes       []Node            // with the ids that the scheduler gave them
	Events      []Event           // in the order of time
}

// Node is one process of a session.
type Node struct {
	Role     string // "scheduler", "server", "worker"
	ID       int
	Rank     int
	Hostname string
	Port     int
}

// Types of an Event.
const (
	Send   = "send"         // frames handed to a socket
	Recv   = "recv"         // the same frames at the receiver
	Socket = "socket_event" // a socket was made, set, bound, connected, closed
)

// Event is one thing that happened.
type Event struct {
	Seq   int
	Type  string  // Send, Recv or Socket
	Time  float64 // microseconds since the first event
	Phase string  // the first worker's activity

	// From and To are node ids; 0 where the receiver could not know. An event of
	// type Socket has its node in From.
	From, To int
	// IDKnown tells whether the node at which the event was recorded had its id.
	IDKnown bool
	Via     Via // the socket

	// Frames of a Send hold the bytes; those of a Recv only names and lengths.
	Frames []Frame

	// The event of a Socket ("socket", "setsockopt", "bind", "connect",
	// "close"), with its option and value, or its address.
	What, Option, Value, Addr string
}

// Via names a socket.
type Via struct {
	Socket   string // "ROUTER" or "DEALER"
	Number   int    // of the socket in its process
	Endpoint string // the peer address of a DEALER
	Identity string // of a DEALER; "" when it has none
}

// Frame is one frame of a message.
type Frame struct {
	Kind      string // "identity", "dest", "self", "sender", "meta", "data[0]", ...
	Len       int    // in bytes, as sent
	Bytes     []byte // nil when not recorded
	Truncated bool   // Bytes are only the first of Len
}

// Frame returns the first frame of that kind, or nil.
func (e *Event) Frame(kind string) *Frame {
	for i := range e.Frames {
		if e.Frames[i].Kind == kind {
			return &e.Frames[i]
		}
	}
	return nil
}

// Kinds lists the kinds of the event's frames.
func (e *Event) Kinds() []string {
	kinds := make([]string, len(e.Frames))
	for i, f := range e.Frames {
		kinds[i] = f.Kind
	}
	return kinds
}

// Metas returns the packed metas that were sent, in order.
func (s *Session) Metas() [][]byte {
	var metas [][]byte
	for i := range s.Events {
		if f := s.Events[i].Frame("meta"); f != nil && f.Bytes != nil {
			metas = append(metas, f.Bytes)
		}
	}
	return metas
}

type end struct {
	ID      *int
	IDKnown *bool `json:"id_known_to_itself"`
}

func (e end) id() int {
	if e.ID == nil {
		return 0
	}
	return *e.ID
}

// A node that never lacked its id has no such mark.
func (e end) known() bool { return e.IDKnown == nil || *e.IDKnown }

type line struct {
	Seq      int
	Type     string
	Time     float64 `json:"t_us"`
	Phase    string
	Name     string
	Text     string `json:"description"`
	Env      map[string]any
	Nodes    []Node
	Node     end
	From, To end
	Via      struct {
		Socket   string
		Number   int `json:"socket_no"`
		Endpoint string
		Identity string
	}
	Frames []struct {
		Kind      string
		Len       int
		Hex       string
		Truncated bool
	}
	Event, Option, Addr string
	Value               any
	Socket              int
	SocketType          string `json:"socket_type"`
}

// Load reads a session file: one JSON object a line, the session itself first.
func Load(path string) (*Session, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s := &Session{}
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 16<<20)
	sockets := map[[2]int]string{} // type of a node's socket
	for no := 1; scan.Scan(); no++ {
		var l line
		if err := json.Unmarshal(scan.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, no, err)
		}
		if (l.Type == "session") != (no == 1) {
			return nil, fmt.Errorf("%s:%d: type %q, want \"session\" in line 1 and only there", path, no, l.Type)
		}
		if no == 1 {
			s.Name, s.Description, s.Nodes = l.Name, l.Text, l.Nodes
			s.Env = make(map[string]string, len(l.Env))
			for k, v := range l.Env {
				s.Env[k] = fmt.Sprint(v)
			}
			continue
		}
		e, err := l.event(sockets)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, no, err)
		}
		s.Events = append(s.Events, e)
	}
	if err := scan.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if s.Name == "" {
		return nil, fmt.Errorf("%s: no session in it", path)
	}
	return s, nil
}

func (l *line) event(sockets map[[2]int]string) (Event, error) {
	e := Event{Seq: l.Seq, Type: l.Type, Time: l.Time, Phase: l.Phase, From: l.From.id(), To: l.To.id(), Via: Via(l.Via)}
	switch l.Type {
	case Send:
		e.IDKnown = l.From.known()
	case Recv:
		e.IDKnown = l.To.known()
	case Socket:
		e.From, e.IDKnown = l.Node.id(), l.Node.known()
		e.What, e.Option, e.Addr = l.Event, l.Option, l.Addr
		if l.Value != nil {
			e.Value = fmt.Sprint(l.Value)
		}
		key := [2]int{e.From, l.Socket}
		if l.SocketType != "" {
			sockets[key] = l.SocketType
		}
		e.Via = Via{Socket: sockets[key], Number: l.Socket}
	default:
		return e, fmt.Errorf("type %q, want %q, %q or %q", l.Type, Send, Recv, Socket)
	}
	for _, f := range l.Frames {
		b, err := hex.DecodeString(f.Hex)
		if err != nil {
			return e, fmt.Errorf("frame %s: %w", f.Kind, err)
		}
		if f.Hex == "" && (f.Len > 0 || l.Type == Recv) {
			b = nil
		}
		if b != nil && !f.Truncated && len(b) != f.Len {
			return e, fmt.Errorf("frame %s: %d bytes, want %d", f.Kind, len(b), f.Len)
		}
		e.Frames = append(e.Frames, Frame{Kind: f.Kind, Len: f.Len, Bytes: b, Truncated: f.Truncated})
	}
	return e, nil
}
