package tcp

import (
	"errors"

	"github.com/stepaf/stepaf-go/van/losses"
)

// errBroke is the cause of a loss that the peer reports.
var errBroke = errors.New("its connection broke, and messages may be lost")

// Process implements losses.Peer.
func (n *peer) Process() (id int, incarnation uint32) { return int(n.id.Load()), n.incarnation }

// Loss implements losses.Peer.
func (n *peer) Loss() *losses.State { return &n.loss }

// inside passes the events of peer id from the van inside to watch. It drops a return while the connection for data is broken,
// since a message would fail then. The watcher is notified when the connection for data is made again.
func (p *peers) inside(watch func(id int, up bool, cause error), id int, up bool, cause error) {
	if !up {
		p.lostInside(id, cause)
	}
	if n := p.of(id); up && n != nil && p.losses.Down(n) {
		return
	}
	watch(id, up, cause)
}
