package doctor

// The check whether other hosts can reach a node of this host.

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van/env"
)

const setOther = "set DMLC_NODE_HOST or DMLC_INTERFACE"

// Unreachable returns the reasons why nodes of other hosts cannot reach a node that starts on host h with cfg: an
// address that they cannot reach, or no route to the scheduler. Names without an address are not reported here.
func Unreachable(ctx context.Context, cfg *env.Config, h hostaddr.Host, resolve func(context.Context, string) (netip.Addr, error)) []error {
	scheduler, err := resolve(ctx, cfg.RootURI)
	if cfg.RootURI == "" || err != nil || cfg.Local {
		return nil
	}
	if cfg.Role == "scheduler" {
		if scheduler.IsLoopback() && cfg.RootURI != scheduler.String() && !strings.HasPrefix(cfg.RootURI, "localhost") && !cfg.Kubernetes {
			return []error{fmt.Errorf("DMLC_PS_ROOT_URI=%q: it is %s on this host, which no other host can reach; want an address, or a name whose line in /etc/hosts has one",
				cfg.RootURI, scheduler)}
		}
		return nil
	}
	if scheduler.Is4() && !h.Has(scheduler) {
		if _, err := h.Source(scheduler); err != nil {
			return []error{fmt.Errorf("DMLC_PS_ROOT_URI=%q: this host has no route to %s: %w", cfg.RootURI, scheduler, err)}
		}
	}
	name, addr := "", netip.Addr{}
	switch named := !strings.EqualFold(cfg.Interface, "auto") && cfg.Interface != ""; {
	case cfg.NodeHost != "":
		name = fmt.Sprintf("DMLC_NODE_HOST=%q", cfg.NodeHost)
		addr, _ = resolve(ctx, cfg.NodeHost)
	case named:
		name = fmt.Sprintf("DMLC_INTERFACE=%q", cfg.Interface)
		match := slices.DeleteFunc(slices.Clone(h.Interfaces), func(i hostaddr.Interface) bool { return !strings.HasPrefix(i.Name, cfg.Interface) })
		if k := slices.IndexFunc(match, func(i hostaddr.Interface) bool { return i.Name == cfg.Interface }); k >= 0 {
			match = match[k : k+1]
		}
		if len(match) == 1 {
			addr = h.Of(match[0], scheduler)
		}
	}
	if why := h.Doubt(addr, scheduler); addr.IsValid() && why != "" {
		return []error{fmt.Errorf("%s: a node would listen at %s, which the scheduler at %s cannot reach: %s; %s", name, addr, scheduler, why, setOther)}
	}
	return nil
}
