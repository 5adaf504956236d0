package rdma

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns the resolution of addresses: those of peers, and the one that this node listens on.

// ChooseHost implements van.HostChooser. It returns the address of the RDMA port that the configuration names, or else of the port
// nearest to the node's GPU.
func (v *rvan) ChooseHost() (host, why string, err error) {
	devices, err := v.stack.Devices()
	if err != nil && len(devices) == 0 {
		return "", "", err
	}
	nets, err := choose.Interfaces()
	if err != nil {
		return "", "", err
	}
	root := os.DirFS("/")
	ask := choose.Request{Interface: v.cfg.Interface, GPU: v.gpu(root)}
	if v.cfg.NodeHost != "" {
		ask.Host, _ = netip.ParseAddr(v.cfg.NodeHost)
	}
	if v.cfg.Interface == "" {
		ask.Toward = toward(v.cfg.RootURI)
	}
	r, err := choose.Choose(choose.Machine{Devices: devices, Interfaces: nets, Root: root}, ask)
	if err != nil {
		return "", "", err
	}
	return r.Host.String(), r.String(), nil
}

// lookupTime is how long ChooseHost waits for the resolution of the scheduler's name.
const lookupTime = 5 * time.Second

// toward returns the local address of the route to the scheduler. The address is invalid if the route is not known.
func toward(scheduler string) netip.Addr {
	ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
	defer cancel()
	at, err := resolve(ctx, van.Node{Hostname: scheduler})
	if err != nil || scheduler == "" {
		return netip.Addr{}
	}
	addr, _, _ := hostaddr.This().Toward(at.Addr())
	return addr
}

// gpu returns the PCI address of the node's GPU, "" if it has none.
func (v *node) gpu(root fs.FS) string {
	if d, ok := v.backend.(backend.Describer); ok {
		if i, _, err := d.Describe(); err == nil {
			return i.PCIBusID
		}
	}
	if v.cfg.GPU < 0 || v.cfg.Backend != "GPU" {
		return ""
	}
	return choose.GPUAddress(root, v.cfg.GPU, "", false)
}

var lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// resolve turns a node's host and port into an address.
func resolve(ctx context.Context, n van.Node) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(n.Hostname); err == nil {
		return netip.AddrPortFrom(a.Unmap(), uint16(n.Port)), nil
	}
	all, err := lookup(ctx, n.Hostname)
	if err != nil {
		return netip.AddrPort{}, err
	}
	for _, a := range all {
		if a = a.Unmap(); a.Is4() {
			return netip.AddrPortFrom(a, uint16(n.Port)), nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("host %q has no IPv4 address: %v", n.Hostname, all)
}

// depths returns the depths of one queue pair. They are StepMesh's, and large enough for at least one message.
func depths(cfg *env.Config) (send, recv int) {
	start, rx := cfg.RDMADepths()
	return max(start+rx, conn.MaxWRs), max(rx/cfg.QPNum, 1)
}
