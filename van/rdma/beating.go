package rdma

import (
	"net/netip"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/beat"
)

// This file owns who answers for a process that lets no goroutine run, and who is asked: see
// package beat.

// beating is the van's part in that. A pointer is nil where there is none.
type beating struct {
	van      *node
	real     bool // addresses are this machine's; in memory nobody listens at them
	answerer *beat.Answerer
	asker    *beat.Asker
}

// begin begins to answer where the van listens, and to ask. What cannot be had is missed only
// by those who are too busy for heartbeats.
func (b *beating) begin(at netip.AddrPort) {
	v := b.van
	if !b.real || v.incarnation == 0 {
		return
	}
	var err error
	if b.answerer, err = beat.Answer(at, v.incarnation); err != nil {
		v.log.Info("rdma: no thread answers for this node while it is busy", "addr", "udp "+at.String(), "err", err)
	}
	_, limit := v.cfg.Heartbeats()
	if limit <= 0 {
		return
	}
	if b.asker, err = beat.Ask(v.cm.Source, v.cfg.RootPort, limit, b.judged); err != nil {
		v.log.Info("rdma: busy nodes are not asked whether they are there", "from", v.cm.Source.String(), "err", err)
	}
}

func (b *beating) end() {
	if b.answerer != nil {
		b.answerer.Close()
	}
	if b.asker != nil {
		b.asker.Close()
	}
}

// judged lists the processes that this node could take for dead since they are silent: all, if
// it is the scheduler, else the scheduler.
func (b *beating) judged() (all []beat.Process) {
	for id, p := range *b.van.peers.Load() {
		if x, ok := otherEnd(p); ok && (id == van.SchedulerID || b.van.id.Load() == van.SchedulerID) {
			all = append(all, x)
		}
	}
	return all
}

// otherEnd is the process at the other end of p's connection. There is none to be asked without
// a connection, or when it is one of the original.
func otherEnd(p *peer) (beat.Process, bool) {
	x := beat.Process{Addr: p.addr, Incarnation: p.beats.Load()}
	return x, x.Incarnation != 0
}

// Alive implements van.LivenessProber.
func (b *beating) Alive(id int) bool {
	p := (*b.van.peers.Load())[id]
	if p == nil || b.asker == nil {
		return false
	}
	x, ok := otherEnd(p)
	return ok && b.asker.Beating(x)
}
