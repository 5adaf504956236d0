package launch

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van/env"
)

// cores turns binding to CPU cores off for all children when two threads would
// share a core or a core does not exist, unless the user has asked for binding.
// The original's formula assumes one process for each GPU on a machine with two
// sockets of 48 cores.
func (p *planner) cores() {
	if p.has("STEPMESH_BIND_CPU_CORE") {
		return
	}
	why := p.clash()
	if why == "" {
		return
	}
	p.say("not binding threads to CPU cores: %s", why)
	for i := range p.Children {
		p.Children[i].Env = append(p.Children[i].Env, "STEPMESH_BIND_CPU_CORE=0")
	}
}

// clash says why binding as the children would do it is no good.
func (p *planner) clash() string {
	owner := map[int]string{}
	for i := range p.Children {
		c := &p.Children[i]
		if c.Role == "scheduler" {
			continue
		}
		cfg, err := env.LoadFrom(env.FromList(c.Env))
		if err != nil || !cfg.BindCPUCore {
			continue // the child will say what is wrong
		}
		offsets := []int{env.CoreReceiver, env.CorePoller, env.CoreSender}
		if c.Role == "server" {
			offsets[2] = env.CoreResponder
		}
		var cores []int
		for _, o := range offsets {
			cores = append(cores, cfg.Core(o))
		}
		slices.Sort(cores)
		for _, core := range slices.Compact(cores) {
			if core >= p.m.Cores {
				return fmt.Sprintf("%s would need core %d of %d", c.Name(), core, p.m.Cores)
			}
			if other := owner[core]; other != "" {
				return fmt.Sprintf("%s and %s would share core %d", other, c.Name(), core)
			}
			owner[core] = c.Name()
		}
	}
	return ""
}
