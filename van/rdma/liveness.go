package rdma

import (
	"net/netip"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/liveness"
)

// This file owns who answers for a process that lets no goroutine run, and who is asked: see
// package liveness.

// livenessState is the van's part in that. A pointer is nil where there is none.
type livenessState struct {
	van       *node
	real      bool // addresses are this machine's; in memory nobody listens at them
	responder *liveness.Responder
	prober    *liveness.Prober
}

// start begins to answer where the van listens, and to ask. What cannot be had is missed only
// by those who are too busy for heartbeats.
func (b *livenessState) start(at netip.AddrPort) {
	v := b.van
	if !b.real || v.local.incarnation == 0 {
		return
	}
	var err error
	if b.responder, err = liveness.StartResponder(at, v.local.incarnation); err != nil {
		v.log.Info("rdma: no thread answers for this node while it is busy", "addr", "udp "+at.String(), "err", err)
	}
	_, limit := v.cfg.Heartbeats()
	if limit <= 0 {
		return
	}
	if b.prober, err = liveness.StartProber(v.cm.Source, v.cfg.RootPort, limit, b.probedProcesses); err != nil {
		v.log.Info("rdma: busy nodes are not asked whether they are there", "from", v.cm.Source.String(), "err", err)
	}
}

func (b *livenessState) stop() {
	if b.responder != nil {
		b.responder.Close()
	}
	if b.prober != nil {
		b.prober.Close()
	}
}

// probedProcesses lists the processes that this node could take for dead since they are silent: all, if
// it is the scheduler, else the scheduler.
func (b *livenessState) probedProcesses() (all []liveness.Process) {
	for id, p := range *b.van.tables.peers.Load() {
		if x, ok := remoteProcess(p); ok && (id == van.SchedulerID || b.van.local.id.Load() == van.SchedulerID) {
			all = append(all, x)
		}
	}
	return all
}

// remoteProcess is the process at the other end of p's connection. There is none to be asked without
// a connection, or when it is one of the original.
func remoteProcess(p *peer) (liveness.Process, bool) {
	x := liveness.Process{Addr: p.addr, Incarnation: p.remoteIncarnation.Load()}
	return x, x.Incarnation != 0
}

// Alive implements van.LivenessProber.
func (v *rvan) Alive(id int) bool {
	p, prober := (*v.tables.peers.Load())[id], v.liveness.prober
	if p == nil || prober == nil {
		return false
	}
	x, ok := remoteProcess(p)
	return ok && prober.Alive(x)
}
