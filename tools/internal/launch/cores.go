package launch

// Binding to CPU cores.

import (
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van/env"
)

// clash says why binding as the children would do it on a machine with so many cores is no good.
func clash(children []Child, cores int) string {
	owner := map[int]string{}
	for i := range children {
		c := &children[i]
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
		var used []int
		for _, o := range offsets {
			used = append(used, cfg.Core(o))
		}
		slices.Sort(used)
		for _, core := range slices.Compact(used) {
			if core >= cores {
				return fmt.Sprintf("%s would need core %d of %d", c.Name(), core, cores)
			}
			if other := owner[core]; other != "" {
				return fmt.Sprintf("%s and %s would share core %d", other, c.Name(), core)
			}
			owner[core] = c.Name()
		}
	}
	return ""
}
