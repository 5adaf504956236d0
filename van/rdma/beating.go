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
	real     bool // addresses are this machine's; in memory nobody listens at them
	answerer *beat.Answerer
	asker    *beat.Asker
}

// beginBeating begins to answer where the van listens, and to ask. What cannot be had is
// missed only by those who are too busy for heartbeats.
func (v *rvan) beginBeating(at netip.AddrPort) {
	if !v.real || v.incarnation == 0 {
		return
	}
	var err error
	if v.answerer, err = beat.Answer(at, v.incarnation); err != nil {
		v.answerer = nil
		v.log.Info("rdma: no thread answers for this node while it is busy", "addr", "udp "+at.String(), "err", err)
	}
	_, limit := v.cfg.Heartbeats()
	if limit <= 0 {
		return
	}
	if v.asker, err = beat.Ask(v.cm.Source, limit, v.judged); err != nil {
		v.asker = nil
		v.log.Info("rdma: busy nodes are not asked whether they are there", "from", v.cm.Source.String(), "err", err)
	}
}

func (b *beating) endBeating() {
	if b.answerer != nil {
		b.answerer.Close()
	}
	if b.asker != nil {
		b.asker.Close()
	}
}

// judged lists the processes that this node could take for dead since they are silent: all, if
// it is the scheduler, else the scheduler.
func (v *rvan) judged() (all []beat.Process) {
	for id, p := range *v.peers.Load() {
		if x := p.otherEnd(); x.Incarnation != 0 && (id == van.SchedulerID || v.id.Load() == van.SchedulerID) {
			all = append(all, x)
		}
	}
	return all
}

// otherEnd is the process at the other end of p's connection. It has no incarnation when there
// is no connection, or the process is one of the original.
func (p *peer) otherEnd() beat.Process {
	return beat.Process{Addr: p.addr, Incarnation: p.beats.Load()}
}

// Beating implements van.Beater.
func (v *rvan) Beating(id int) bool {
	p := (*v.peers.Load())[id]
	if p == nil || v.asker == nil {
		return false
	}
	x := p.otherEnd()
	return x.Incarnation != 0 && v.asker.Beating(x)
}
