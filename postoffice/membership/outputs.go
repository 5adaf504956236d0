package membership

// Outputs of this node: the list of outputs, the connections that they lead to, and the control counter.

import (
	"maps"
	"math"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// outputs collects the outputs of a Machine.
type outputs struct {
	table      *table
	out        []Output
	conns      map[int]bool // ids that Send may name, besides this node's
	startConns map[int]bool // ids whose connections must open for start-up to complete
	temps      temporaryIDs
	stamp      int32 // the control counter: timestamp of the next control message
}

// temporaryIDs are the negative ids of connections to nodes without an id.
type temporaryIDs struct {
	last    int
	renamed map[int]int // by temporary id, the present id of its connection, see currentID
}

func (s *outputs) emit(o Output) { s.out = append(s.out, o) }

// Take removes and returns the outputs since the last call, oldest first. Node lists of several messages may share
// memory: do not modify them.
func (s *outputs) Take() []Output {
	out := s.out
	s.out = nil
	return out
}

// nextStamp returns the timestamp of the next control message.
func (s *outputs) nextStamp() int32 {
	if s.stamp == van.Empty {
		s.stamp++
	}
	t := s.stamp
	s.stamp = (s.stamp + 1) & math.MaxInt32
	return t
}

// newer compares timestamps, which wrap at 1<<31.
func newer(a, b int32) bool { return (b-a)&math.MaxInt32 >= 1<<30 }

// maxLateness bounds how late a message can arrive after a later one of the same sender. Timestamps of messages
// that arrive further apart are not compared: newer is wrong from 2^30 messages on, which the scheduler of 1000 nodes
// sends in 25 days.
const maxLateness = time.Hour

// control returns a control message with the next timestamp.
func (s *outputs) control(cmd van.Command) van.Meta { return controlAt(s.nextStamp(), cmd) }

func controlAt(stamp int32, cmd van.Command) van.Meta {
	var meta van.Meta
	meta.Reset()
	meta.Timestamp, meta.Control.Cmd = stamp, cmd
	return meta
}

// send emits a message if there is a connection to the node.
func (s *outputs) send(to int, meta van.Meta) {
	if s.conns[to] || to == s.table.self.ID {
		if inc := s.table.incs[to]; inc != 0 {
			meta.SetIncarnations(s.table.own.Incarnation, inc)
		}
		s.emit(Send{to, meta})
	}
}

func (s *outputs) notify(id int, n notice) { s.notifyAbout(id, n, 0) }

// notifyAbout sends a notice with a key: the request that it answers, or the incarnation of
// the node that it is about.
func (s *outputs) notifyAbout(id int, n notice, key uint64) {
	meta := s.control(van.Heartbeat)
	meta.Key = key
	meta.Body = n.body()
	s.send(id, meta)
}

// heartbeatKey is the key of a heartbeat to a scheduler of this library: the generation of the
// node's table, and the milliseconds between its heartbeats, 0 for none.
func heartbeatKey(generation uint32, interval time.Duration) uint64 {
	return uint64(min(interval.Milliseconds(), math.MaxUint32))<<32 | uint64(generation)
}

func parseHeartbeatKey(key uint64) (generation uint32, interval time.Duration) {
	return uint32(key), time.Duration(key>>32) * time.Millisecond
}

// release ends a barrier of a node; request is the key of the request that it answers, see requestKey.
func (s *outputs) release(id int, instance bool, app, customer int32, request uint64) {
	meta := s.control(barrierCommand(instance))
	meta.AppID, meta.CustomerID, meta.Key = app, customer, request
	s.send(id, meta)
}

func (s *outputs) connect(id int, n van.Node) {
	s.forgetRenamed(id)
	s.conns[id] = true
	if id < 0 {
		s.table.learn(id, &n)
	}
	s.emit(Connect{id, n})
}

// connectTemp connects to a node without an id, and returns the temporary id.
func (s *outputs) connectTemp(n van.Node) int {
	s.temps.last--
	s.connect(s.temps.last, n)
	return s.temps.last
}

// rename gives the connection with a temporary id the id of a member.
func (s *outputs) rename(temp, id int) {
	delete(s.conns, temp)
	delete(s.table.incs, temp)
	s.conns[id] = true
	s.temps.renamed[temp] = id
	s.emit(Rename{temp, id})
}

// currentID returns the present id of the connection that the transport names with id, which may be temporary until
// Rename is performed.
func (s *outputs) currentID(id int) int {
	if member, ok := s.temps.renamed[id]; ok {
		return member
	}
	return id
}

// forgetRenamed forgets the temporary id of a connection that is closed or replaced.
func (s *outputs) forgetRenamed(id int) {
	maps.DeleteFunc(s.temps.renamed, func(_, member int) bool { return member == id })
}

func (s *outputs) disconnect(id int) {
	if s.conns[id] {
		s.forgetRenamed(id)
		delete(s.conns, id)
		delete(s.table.incs, id)
		s.emit(Disconnect{id})
	}
}
