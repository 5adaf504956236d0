package sim

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma"
)

// fabric is the RDMA network of a cluster: van/rdma on devices in memory. Each node has
// a device, at its host's address, and each process a stack of its own on it.
type fabric struct {
	c   *cluster
	net *fakeverbs.Net

	mu     sync.Mutex
	stacks []*fakeverbs.Stack
	addrs  map[plan.Node][]netip.Addr // all that it has had
	cuts   map[pair]bool
}

// defaultAck is the time after which an unacknowledged message breaks its connection:
// the total time of the retries that van/rdma asks for.
const defaultAck = time.Second

func newFabric(c *cluster) *fabric {
	t := &c.plan.Transport
	f := &fabric{c: c, addrs: map[plan.Node][]netip.Addr{}, cuts: map[pair]bool{}}
	f.net = fakeverbs.NewNet(func(o *fakeverbs.Config) {
		o.Jitter = t.Delay.Or(defaultDelay) + t.Jitter.D()
		o.EventDelay = t.Delay.Or(defaultDelay)
		o.Retry = t.Silence.Or(defaultAck)
		o.Seed = uint64(c.seed.of("fabric"))
	})
	f.net.OnError(func(err error) { c.check.fail("verbs", "%v", err) })
	return f
}

// rdmaLacks names a part of a plan that cannot be carried out on devices in memory.
func rdmaLacks(p *plan.Plan) error {
	lack := func(at, what string) error {
		return fmt.Errorf("plan %s: %s: %s cannot be simulated over RDMA; kill, stop, wake, join, leave, finalize, barrier, cut, heal and slow-handler can", p.Name, at, what)
	}
	t := &p.Transport
	for _, x := range []struct {
		set         bool
		field, what string
	}{
		{t.Bandwidth != 0, "transport.bandwidth", "a bandwidth"}, {t.Queue != 0, "transport.queue", "the limit of a queue"},
		{t.Loss != 0, "transport.loss", "loss of messages"}, {t.Duplicate != 0, "transport.duplicate", "a message that comes twice"},
		{t.Break != 0, "transport.break", "a connection that breaks by chance"},
		{len(p.Cluster.Foreign) > 0, "cluster.foreign", "a node of the original"},
		{p.Cluster.Stuck != "", "cluster.stuck", "a process that stands still"},
	} {
		if x.set {
			return lack(x.field, x.what)
		}
	}
	for i := range p.Phases {
		for j := range p.Phases[i].Events {
			e := &p.Phases[i].Events[j]
			at := fmt.Sprintf("phases[%d].events[%d].do", i, j)
			switch e.Do {
			case plan.Break, plan.SlowLink:
				return lack(at, string(e.Do))
			case plan.Kill:
				if e.Fork {
					return lack(at, "kill of a process whose child keeps its devices")
				}
			}
		}
	}
	return nil
}

// OverRDMA is p over RDMA instead of TCP, whole, or an error that names a part that devices in
// memory cannot do, or says that it is for another transport.
func OverRDMA(p *plan.Plan) (*plan.Plan, error) {
	if p.Transport.Kind != "" {
		return nil, fmt.Errorf("plan %s is for %s", p.Name, p.Transport.Kind)
	}
	if err := rdmaLacks(p); err != nil {
		return nil, err
	}
	return p.OverRDMA(), nil
}

// newVan makes the van of a process.
func (f *fabric) newVan(p *proc, o van.Options) (van.Van, error) {
	addr, err := netip.ParseAddr(p.host)
	if err != nil {
		return nil, fmt.Errorf("host of %s: %w", p.name, err)
	}
	s := f.net.Stack(addr)
	s.SetName(p.name)
	f.mu.Lock()
	f.stacks = append(f.stacks, s)
	if !slices.Contains(f.addrs[p.who], addr) {
		f.addrs[p.who] = append(f.addrs[p.who], addr)
	}
	for l := range f.cuts {
		if l.a == p.who || l.b == p.who {
			f.across(l, f.net.Cut)
		}
	}
	f.mu.Unlock()
	v := &rdmaVan{Van: rdma.NewOn(s, o), f: f, p: p, stack: s}
	p.opened(v)
	return v, nil
}

// across calls do for all addresses of two nodes. mu is held.
func (f *fabric) across(l pair, do func(a, b netip.Addr)) {
	for _, a := range f.addrs[l.a] {
		for _, b := range f.addrs[l.b] {
			do(a, b)
		}
	}
}

// link cuts or heals the link of two nodes.
func (f *fabric) link(a, b plan.Node, do plan.Action) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch l := pairOf(a, b); do {
	case plan.Cut:
		f.cuts[l] = true
		f.across(l, f.net.Cut)
	case plan.Heal:
		delete(f.cuts, l)
		f.across(l, f.net.Heal)
	}
}

// calm heals all links.
func (f *fabric) calm() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l := range f.cuts {
		f.across(l, f.net.Heal)
	}
	clear(f.cuts)
}

// close ends the network. All processes have ended: resources that they have not released are
// leaks.
func (f *fabric) close() {
	for _, s := range f.stacks {
		for _, l := range s.Leaks() {
			f.c.check.fail("leak", "%s has left and has not given back: %s", s.Name(), l)
		}
	}
	f.net.Close()
}

// posted counts the work requests of all processes.
func (f *fabric) posted() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.stacks {
		n += s.Counters().WRs
	}
	return n
}

// rdmaVan is the van of one process.
type rdmaVan struct {
	van.Van
	f     *fabric
	p     *proc
	stack *fakeverbs.Stack
}

var (
	_ van.HostChooser = (*rdmaVan)(nil)
	_ transport       = (*rdmaVan)(nil)
)

// Unwrap implements van.Wrapper.
func (v *rdmaVan) Unwrap() van.Van { return v.Van }

// ChooseHost implements van.HostChooser.
func (v *rdmaVan) ChooseHost() (host, why string, err error) { return v.p.host, "the plan", nil }

// kill ends the process as SIGKILL does.
func (v *rdmaVan) kill(bool) {
	v.f.c.net.note(v.p.name, "killed")
	v.f.net.KillTelling(v.stack)
}

// held is 0: fabric.close tells of everything that was not given back.
func (v *rdmaVan) held() int64 { return 0 }

func (v *rdmaVan) bury()     {}
func (v *rdmaVan) setReady() {}

func (v *rdmaVan) stop() {
	v.f.c.net.note(v.p.name, "stopped")
	v.f.net.Stop(v.stack)
}

func (v *rdmaVan) wake() {
	v.f.c.net.note(v.p.name, "woken")
	v.f.net.Wake(v.stack)
}
