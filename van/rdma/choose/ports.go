package choose

// This file finds the addresses of a machine's ports, and which of them a node may use.

import (
	"cmp"
	"embed"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// survey holds a machine with the addresses of its ports.
type survey struct {
	m         Machine
	endpoints []*endpoint // of all ports, active or not, in order
	usable    []*endpoint // may be chosen without having been asked for
	unusable  []unusable  // ports without a usable endpoint
}

// endpoint is an address on a port.
type endpoint struct {
	device   string
	port     *verbs.PortInfo
	addr     netip.Addr
	iface    string
	gid      verbs.GID
	location location
}

// String names the device and port.
func (e *endpoint) String() string { return portName(e.device, e.port.Num) }

func portName(device string, port int) string { return fmt.Sprintf("%s port %d", device, port) }

type unusable struct{ name, why string }

func (m Machine) survey() *survey {
	if m.Root == nil {
		m.Root = embed.FS{} // has no files
	}
	l := &survey{m: m}
	devices := slices.Clone(m.Devices)
	slices.SortStableFunc(devices, func(a, b verbs.DeviceInfo) int { return compareNames(a.Name, b.Name) })
	for _, d := range devices {
		for i := range d.Ports {
			l.port(&d, &d.Ports[i])
		}
	}
	return l
}

// port adds the endpoints of one port.
func (l *survey) port(d *verbs.DeviceInfo, p *verbs.PortInfo) {
	ends := l.endpointsOf(d, p)
	l.endpoints = append(l.endpoints, ends...)
	name := portName(d.Name, p.Num)
	if !p.Active {
		l.unusable = append(l.unusable, unusable{name, p.State})
		return
	}
	var good []*endpoint
	why := "no IPv4 address"
	for _, e := range ends {
		owner := l.owner(e.addr)
		switch {
		case e.addr.IsLoopback() || owner != nil && owner.Loopback:
			why = "loopback"
		case owner == nil:
			why = e.addr.String() + " is not on an interface of this host"
		default:
			good = append(good, e)
		}
	}
	// Configured addresses precede link-local ones, which the host has assigned itself.
	slices.SortStableFunc(good, func(a, b *endpoint) int {
		return cmp.Compare(linkLocal(a.addr), linkLocal(b.addr))
	})
	if len(good) == 0 {
		l.unusable = append(l.unusable, unusable{name, why})
	}
	l.usable = append(l.usable, good...)
}

func linkLocal(a netip.Addr) int {
	if a.IsLinkLocalUnicast() {
		return 1
	}
	return 0
}

// endpointsOf returns the IPv4 addresses of a port, in the order of its GIDs, each with its best GID.
func (l *survey) endpointsOf(d *verbs.DeviceInfo, p *verbs.PortInfo) []*endpoint {
	var ends []*endpoint
	add := func(addr netip.Addr, iface string) {
		if slices.ContainsFunc(ends, func(e *endpoint) bool { return e.addr == addr }) {
			return
		}
		gid, ok := BestGID(p.GIDs, addr)
		if !ok {
			return
		}
		iface = cmp.Or(iface, gid.Iface)
		if o := l.owner(addr); o != nil && iface == "" {
			iface = o.Name
		}
		ends = append(ends, &endpoint{d.Name, p, addr, iface, gid, l.locationOf(d.Path, iface)})
	}
	for _, g := range p.GIDs {
		if a := g.Addr.Unmap(); a.Is4() && !a.IsUnspecified() {
			add(a, "")
		}
	}
	if p.LinkLayer == "InfiniBand" {
		for _, i := range l.m.Interfaces {
			if l.runsIPOver(i.Name, d.Name, p) {
				for _, a := range i.Addrs {
					if a.Is4() {
						add(a, i.Name)
					}
				}
			}
		}
	}
	return ends
}

// BestGID returns the GID for connections from addr. In this order: addr itself, RoCE v2 before v1; on InfiniBand the port's own GID; an IPv6
// GID, link-local last. A GID with another IPv4 address is not used. Of equal ones it returns the first.
func BestGID(gids []verbs.GID, addr netip.Addr) (best verbs.GID, ok bool) {
	rank := func(g verbs.GID) int {
		n := 1
		if g.Type == "RoCE v2" {
			n = 0
		}
		switch a := g.Addr.Unmap(); {
		case a == addr:
			return n
		case a.Is4() || !a.IsValid() || a.IsUnspecified():
			return -1
		case g.Type == "IB":
			return 2
		case a.IsLinkLocalUnicast():
			return 5 + n
		default:
			return 3 + n
		}
	}
	found := -1
	for _, g := range gids {
		if r := rank(g); r >= 0 && (found < 0 || r < found) {
			best, found = g, r
		}
	}
	return best, found >= 0
}

// runsIPOver reports whether an interface runs IP over a port of a device.
func (l *survey) runsIPOver(iface, device string, p *verbs.PortInfo) bool {
	if slices.ContainsFunc(p.GIDs, func(g verbs.GID) bool { return g.Iface == iface }) {
		return true
	}
	dir := l.netDir(iface)
	if dir == "" || !l.exists(path.Join(path.Dir(path.Dir(dir)), "infiniband", device)) {
		return false
	}
	// dev_port numbers the ports of a device from 0. Some drivers set dev_id instead.
	num := max(l.number(path.Join(dir, "dev_port")), l.number(path.Join(dir, "dev_id")), 0)
	return num+1 == p.Num
}

// owner returns the interface with an address, or nil.
func (l *survey) owner(addr netip.Addr) *Interface {
	for i := range l.m.Interfaces {
		if slices.Contains(l.m.Interfaces[i].Addrs, addr) {
			return &l.m.Interfaces[i]
		}
	}
	return nil
}

// inventory lists the ports and interfaces, for errors.
func (l *survey) inventory() string {
	var ports, rest []string
	rdma := map[string]bool{}
	for _, e := range l.endpoints {
		rdma[e.iface] = true
		name := cmp.Or(e.iface, "?")
		ports = append(ports, fmt.Sprintf("%s %s (%s, %s)", name, e.addr, e, e.port.State))
	}
	for _, u := range l.unusable {
		if !slices.ContainsFunc(l.endpoints, func(e *endpoint) bool { return e.String() == u.name }) {
			ports = append(ports, u.name+" ("+u.why+")")
		}
	}
	for _, i := range l.m.Interfaces {
		if rdma[i.Name] {
			continue
		}
		text := "no IPv4 address"
		if k := slices.IndexFunc(i.Addrs, netip.Addr.Is4); k >= 0 {
			text = i.Addrs[k].String()
		}
		rest = append(rest, i.Name+" ("+text+")")
	}
	s := "this host has no RDMA port"
	if ports != nil {
		s = "RDMA ports of this host: " + strings.Join(ports, ", ")
	}
	if rest != nil {
		s += "; interfaces without RDMA: " + strings.Join(rest, ", ")
	}
	return s
}

// compareNames orders names with numbers numerically: mlx5_2 before mlx5_10.
func compareNames(a, b string) int {
	for a != "" && b != "" {
		na, nb := digits(a), digits(b)
		if na > 0 && nb > 0 {
			x, y := strings.TrimLeft(a[:na], "0"), strings.TrimLeft(b[:nb], "0")
			if c := cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y)); c != 0 {
				return c
			}
			a, b = a[na:], b[nb:]
			continue
		}
		if a[0] != b[0] {
			return cmp.Compare(a[0], b[0])
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Compare(len(a), len(b))
}

// digits returns the number of leading digits of s.
func digits(s string) int { return len(s) - len(strings.TrimLeft(s, "0123456789")) }
