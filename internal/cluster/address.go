package cluster

// The address that a node binds and advertises.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// advertise chooses the address that a node of host h binds and advertises, and returns the reason. The scheduler's
// address is DMLC_PS_ROOT_URI. For other nodes the order is
//
//  1. DMLC_NODE_HOST,
//  2. DMLC_INTERFACE,
//  3. the address that leads to the scheduler,
//  4. the first interface that other hosts may reach,
//  5. the loopback.
//
// A van that is a HostChooser decides in place of steps 2 to 5; with DMLC_INTERFACE=auto it comes before step 1.
// scheduler is the host of the scheduler, a name if its address is not known yet.
func advertise(ctx context.Context, cfg *env.Config, role van.Role, v van.Van, h hostaddr.Host, scheduler string) (host, why string, err error) {
	if role == van.Scheduler {
		return schedulerHost(ctx, cfg)
	}
	auto := strings.EqualFold(cfg.Interface, "auto")
	var failed error
	if c, ok := van.As[van.HostChooser](v); ok && (cfg.NodeHost == "" || auto) {
		host, why, err := c.ChooseHost()
		switch {
		case err == nil && host != "":
			return host, why, nil
		case err != nil && cfg.NodeHost == "":
			return "", "", &van.Error{Op: "choose address", Err: err}
		}
		failed = err
	}
	at, _ := netip.ParseAddr(scheduler)
	switch {
	case cfg.NodeHost != "":
		host, err := resolve(ctx, cfg.NodeHost)
		if err != nil {
			return "", "", addressError("DMLC_NODE_HOST", cfg.NodeHost, err, "")
		}
		if !isLocal(host) {
			return "", "", addressError("DMLC_NODE_HOST", cfg.NodeHost, errNotLocal, "this host has "+interfaces(h))
		}
		if failed != nil {
			return host, "DMLC_NODE_HOST, because DMLC_INTERFACE=auto found nothing: " + failed.Error(), nil
		}
		return host, "DMLC_NODE_HOST", nil
	case cfg.Interface != "" && !auto:
		host, name, err := interfaceAddr(h, cfg.Interface, at)
		if err != nil {
			return "", "", addressError("DMLC_INTERFACE", cfg.Interface, err, "this host has "+interfaces(h))
		}
		return host, "DMLC_INTERFACE " + name, nil
	}
	if addr, name, ok := h.Toward(at); ok {
		return addr.String(), fmt.Sprintf("interface that leads to DMLC_PS_ROOT_URI %s: %s", scheduler, name), nil
	}
	if addr, name := h.First(); name != "" {
		return addr.String(), "first interface that is not the loopback: " + name, nil
	}
	return "127.0.0.1", "no interface but the loopback has an IPv4 address", nil
}

// unreachableReason returns the reason why other hosts cannot reach a node, or the scheduler, of this host at the
// address host, and the variables to set. It returns "" if the address has no known fault.
func unreachableReason(cfg *env.Config, role van.Role, h hostaddr.Host, host, scheduler string) string {
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return ""
	}
	if role == van.Scheduler {
		if name := cfg.RootURI; addr.IsLoopback() && name != host && !strings.HasPrefix(name, "localhost") && !cfg.Kubernetes {
			return fmt.Sprintf("DMLC_PS_ROOT_URI=%s is %s on this host, which no other host can reach: if there are nodes on others, set it to an address, "+
				"or correct /etc/hosts; this host has %s", name, host, interfaces(h))
		}
		return ""
	}
	at, _ := netip.ParseAddr(scheduler)
	if why := h.Doubt(addr, at); why != "" {
		return fmt.Sprintf("this node listens at %s, which the scheduler at %s cannot reach: %s; set DMLC_NODE_HOST or DMLC_INTERFACE", host, scheduler, why)
	}
	return ""
}

// unprotectedReason returns what other hosts can do to the node that listens at self, and the remedy. It returns ""
// if no other host reaches the address, if there is a secret, and if STEPAF_AUTH is set: then the user has decided.
func unprotectedReason(cfg *env.Config, self van.Node) string {
	at := net.JoinHostPort(self.Hostname, strconv.Itoa(self.Port))
	addr, err := netip.ParseAddr(self.Hostname)
	switch {
	case cfg.HasSecret() || cfg.Auth != "" || cfg.Local:
		return ""
	case self.Role == van.Scheduler && cfg.Kubernetes:
		at = fmt.Sprintf("port %d of any address of this host", self.Port)
	case err != nil || addr.Unmap().IsLoopback():
		return ""
	}
	return fmt.Sprintf(`no secret is set: any process that reaches %s can join the cluster, and read and change its tensors; set STEPAF_SECRET_FILE on all nodes `+
		`("stepaf secret" makes one), or STEPAF_AUTH=off if only trusted hosts reach it`, at)
}

func schedulerHost(ctx context.Context, cfg *env.Config) (string, string, error) {
	host, err := resolve(ctx, cfg.RootURI)
	if err != nil {
		return "", "", addressError("DMLC_PS_ROOT_URI", cfg.RootURI, err, "")
	}
	if !cfg.Kubernetes && !isLocal(host) {
		return "", "", addressError("DMLC_PS_ROOT_URI", cfg.RootURI, errNotLocal,
			"the scheduler must run on that host, or set DMLC_USE_KUBERNETES=1; this host has "+interfaces(hostaddr.This()))
	}
	return host, "DMLC_PS_ROOT_URI", nil
}

var errNotLocal = errors.New("not an address of this host")

func addressError(name, value string, err error, hint string) error {
	return &van.Error{Op: "choose address", Detail: fmt.Sprintf("%s=%q", name, value), Err: fmt.Errorf("%w: %w", van.ErrInvalid, err), Hint: hint}
}

// lookupTime is the limit of one name lookup.
const lookupTime = 5 * time.Second

// resolve turns a host name into a numeric IPv4 address, or IPv6 if it has no other. An address is not looked up.
func resolve(ctx context.Context, host string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	addr, err := hostaddr.Resolve(ctx, "ip", host)
	if err != nil {
		return "", err
	}
	return addr.String(), nil
}

// schedulerRecord is the scheduler's record as the configuration names it, and the reason why its name has no
// address; the transport is given the name then.
func schedulerRecord(ctx context.Context, cfg *env.Config) (van.Node, error) {
	host, err := resolve(ctx, cfg.RootURI)
	if err != nil {
		host = cfg.RootURI
	}
	return van.Node{Role: van.Scheduler, ID: van.SchedulerID, Hostname: host, Port: cfg.RootPort}, err
}

// lookupEvery is the pause before the scheduler's name is looked up again.
const lookupEvery = 2 * time.Second

// lookUpScheduler looks the scheduler's name up until it has an address or ctx ends, and passes the reason why it has
// none to the machine. In Kubernetes a name often appears later. The transport finds the address itself when it tries
// to connect again.
func (c *control) lookUpScheduler(ctx context.Context) {
	timer := time.NewTimer(lookupEvery)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		_, err := resolve(ctx, c.self.cfg.RootURI)
		if ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		c.machine.SchedulerNotFound(err)
		c.mu.Unlock()
		if err == nil {
			return
		}
		timer.Reset(lookupEvery)
	}
}

// isLocal reports whether this host has the address. All of 127.0.0.0/8 is local.
func isLocal(host string) bool {
	ip := net.ParseIP(host)
	if ip == nil {
		return false
	}
	if ip.IsLoopback() || ip.IsUnspecified() {
		return true
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true // not known; Bind fails if it is wrong
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && n.IP.Equal(ip)
	})
}

// interfaceAddr finds the IPv4 address of the interface called name, or of the only interface whose name begins with
// it. Of several addresses it chooses the one that leads to the scheduler.
func interfaceAddr(h hostaddr.Host, name string, scheduler netip.Addr) (host, full string, err error) {
	match := hostaddr.Named(h.Interfaces, name)
	switch len(match) {
	case 0:
		return "", "", errors.New("no such interface")
	case 1:
		if addr := h.Of(match[0], scheduler); addr.IsValid() {
			return addr.String(), match[0].Name, nil
		}
		return "", "", fmt.Errorf("interface %s has no IPv4 address", match[0].Name)
	default:
		return "", "", errors.New("several interface names begin so")
	}
}

// interfaces lists the interfaces of h, for errors.
func interfaces(h hostaddr.Host) string {
	var names []string
	for _, i := range h.Interfaces {
		addr := "no IPv4 address"
		if k := slices.IndexFunc(i.Addrs, netip.Addr.Is4); k >= 0 {
			addr = i.Addrs[k].String()
		}
		names = append(names, fmt.Sprintf("%s (%s)", i.Name, addr))
	}
	return strings.Join(names, ", ")
}
