// Package hostaddr finds the addresses of this host: its interfaces, the address that it uses
// toward another host, and addresses that other hosts cannot reach.
package hostaddr

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Interface is a network interface of this host.
type Interface struct {
	Name     string
	Addrs    []netip.Addr // IPv4 addresses are unmapped
	Up       bool
	Loopback bool
}

// Interfaces lists the interfaces of this host.
func Interfaces() ([]Interface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	list := make([]Interface, 0, len(all))
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue // the interface was removed in the meantime
		}
		o := Interface{Name: i.Name, Up: i.Flags&net.FlagUp != 0, Loopback: i.Flags&net.FlagLoopback != 0}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok {
					o.Addrs = append(o.Addrs, ip.Unmap())
				}
			}
		}
		list = append(list, o)
	}
	return list, nil
}

// Named returns the interface with that name, or, if there is none, all interfaces whose names begin with it.
func Named(all []Interface, name string) (match []Interface) {
	for _, i := range all {
		if i.Name == name {
			return []Interface{i}
		}
		if strings.HasPrefix(i.Name, name) {
			match = append(match, i)
		}
	}
	return match
}

// Source returns the address of this host from which packets to dest leave. It asks the kernel's routing table; no
// packet is sent.
func Source(dest netip.Addr) (netip.Addr, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dest, 9)))
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// Host is a host's interfaces and routing table. This fills it in; tests fill it in by hand.
type Host struct {
	Interfaces []Interface
	Source     func(dest netip.Addr) (netip.Addr, error)
}

// This returns the host of this process. If the interfaces cannot be listed, it has none.
func This() Host {
	all, _ := Interfaces() // Bind fails if an address is wrong
	return Host{Interfaces: all, Source: Source}
}

// Toward returns the IPv4 address that the host uses toward dest and the interface that has
// it. ok is false if dest has no IPv4 route.
func (h Host) Toward(dest netip.Addr) (addr netip.Addr, name string, ok bool) {
	if !dest.Is4() {
		return netip.Addr{}, "", false
	}
	addr, err := h.Source(dest)
	if err != nil || !addr.Is4() || addr.IsUnspecified() {
		return netip.Addr{}, "", false
	}
	if i := h.with(addr); i != nil {
		name = i.Name
	}
	return addr, name, true
}

// First returns the first IPv4 address that other hosts may reach, for a host that has no route to
// compare with. Its interface is up and is not the loopback. Link-local addresses and addresses
// of container bridges come last.
func (h Host) First() (addr netip.Addr, name string) {
	for _, inner := range []bool{false, true} {
		for _, i := range h.Interfaces {
			if k := slices.IndexFunc(i.Addrs, func(a netip.Addr) bool { return a.Is4() && Inner(i.Name, a) == inner }); k >= 0 && i.Up && !i.Loopback {
				return i.Addrs[k], i.Name
			}
		}
	}
	return netip.Addr{}, ""
}

// Of returns the IPv4 address of i to advertise: the address that leads to dest, else the first address
// that is not link-local, else the first. The result is invalid if i has no IPv4 address.
func (h Host) Of(i Interface, dest netip.Addr) netip.Addr {
	if addr, name, ok := h.Toward(dest); ok && name == i.Name {
		return addr
	}
	var first netip.Addr
	for _, a := range i.Addrs {
		switch {
		case a.Is4() && !a.IsLinkLocalUnicast():
			return a
		case a.Is4() && !first.IsValid():
			first = a
		}
	}
	return first
}

// Has reports whether addr is an address of this host. All of 127.0.0.0/8 is.
func (h Host) Has(addr netip.Addr) bool {
	return addr.IsLoopback() || addr.IsUnspecified() || h.with(addr) != nil
}

// with returns the interface that has addr, or nil.
func (h Host) with(addr netip.Addr) *Interface {
	k := slices.IndexFunc(h.Interfaces, func(i Interface) bool { return slices.Contains(i.Addrs, addr) })
	if k < 0 {
		if k = slices.IndexFunc(h.Interfaces, func(i Interface) bool { return i.Loopback }); k < 0 || !addr.IsLoopback() {
			return nil
		}
	}
	return &h.Interfaces[k]
}

// bridges are name prefixes of the bridges that connect containers or virtual machines of one host.
var bridges = []string{"docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr"}

// Inner reports whether usually only this host can reach addr, an address of the interface with that
// name. It is link-local, or belongs to a bridge for containers, whose address is the same on many hosts.
func Inner(name string, addr netip.Addr) bool {
	return addr.IsLinkLocalUnicast() || slices.ContainsFunc(bridges, func(b string) bool { return strings.HasPrefix(name, b) })
}

// Doubt returns the reason why dest, an address of another host, cannot reach addr, an address of this
// host, and the address that leads to dest. It returns "" if dest is this host, if addr leads to dest,
// or if addr has no known fault.
func (h Host) Doubt(addr, dest netip.Addr) string {
	if !dest.IsValid() || h.Has(dest) {
		return ""
	}
	toward, leads, ok := h.Toward(dest)
	if ok && toward == addr {
		return ""
	}
	what, i := "", h.with(addr)
	switch {
	case addr.IsLoopback():
		what = "it is a loopback address"
	case addr.IsUnspecified():
		what = "it is the unspecified address"
	case addr.IsLinkLocalUnicast():
		what = "it is link-local"
	case i != nil && Inner(i.Name, addr):
		what = "it belongs to " + i.Name + ", a bridge inside this host"
	case i != nil && !i.Up:
		what = "its interface " + i.Name + " is down"
	default:
		return ""
	}
	if ok {
		what += fmt.Sprintf("; the route there uses %s (%s)", toward, leads)
	}
	return what
}
