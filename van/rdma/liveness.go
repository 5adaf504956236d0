package rdma

import (
	"net/netip"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/liveness"
)

// This file owns the probes of processes that are too busy to run goroutines, and the answers to such probes: see package liveness.

// livenessState is the van's prober and responder. Either may be nil.
type livenessState struct {
	van       *node
	real      bool // addresses are this machine's; emulated devices have none at which a socket could listen
	responder *liveness.Responder
	prober    *liveness.Prober
}

// start starts the responder at the van's address, and the prober. If either fails, busy nodes must rely on heartbeats.
func (b *livenessState) start(at netip.AddrPort) {
	v := b.van
	if !b.real || v.local.incarnation == 0 {
		return
	}
	var err error
	if b.responder, err = liveness.StartResponder(at, v.local.incarnation); err != nil {
		v.log.Info("rdma: no thread answers probes while this node is busy", "addr", "udp "+at.String(), "err", err)
	}
	_, limit := v.cfg.Heartbeats()
	if limit <= 0 {
		return
	}
	if b.prober, err = liveness.StartProber(v.cm.Source, v.cfg.RootPort, limit, b.probedProcesses); err != nil {
		v.log.Info("rdma: busy nodes are not probed", "from", v.cm.Source.String(), "err", err)
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

// probedProcesses returns the processes that this node could declare dead for their silence: all if it is the scheduler, else the
// scheduler.
func (b *livenessState) probedProcesses() (all []liveness.Process) {
	for id, p := range *b.van.tables.peers.Load() {
		if x, ok := remoteProcess(p); ok && (id == van.SchedulerID || b.van.local.id.Load() == van.SchedulerID) {
			all = append(all, x)
		}
	}
	return all
}

// remoteProcess returns the process at the other end of p's connection. ok is false without a connection, or if it is a StepMesh node.
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
