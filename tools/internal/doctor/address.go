package doctor

// The check whether other hosts can reach a node of this host.

import (
	"context"
	"fmt"
	"net/netip"
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
	addr, name := namedAddress(ctx, cfg, h, scheduler, resolve)
	if why := h.Doubt(addr, scheduler); addr.IsValid() && why != "" {
		return []error{fmt.Errorf("%s: a node would listen at %s, which the scheduler at %s cannot reach: %s; %s", name, addr, scheduler, why, setOther)}
	}
	return nil
}

// namedAddress returns the address that the configuration names for a worker or server of host h, and the variable that names it. The
// address is invalid if the name has none, and the variable is "" if the configuration names none. scheduler is the scheduler's address.
func namedAddress(ctx context.Context, cfg *env.Config, h hostaddr.Host, scheduler netip.Addr,
	resolve func(context.Context, string) (netip.Addr, error)) (addr netip.Addr, variable string) {
	switch {
	case cfg.NodeHost != "":
		addr, _ = resolve(ctx, cfg.NodeHost) // absentNames reports the error
		return addr, fmt.Sprintf("DMLC_NODE_HOST=%q", cfg.NodeHost)
	case cfg.Interface != "" && !strings.EqualFold(cfg.Interface, "auto"):
		if match := hostaddr.Named(h.Interfaces, cfg.Interface); len(match) == 1 {
			addr = h.Of(match[0], scheduler)
		}
		return addr, fmt.Sprintf("DMLC_INTERFACE=%q", cfg.Interface)
	}
	return addr, ""
}
