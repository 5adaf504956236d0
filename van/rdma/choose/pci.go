package choose

// This file finds the topology of devices in sysfs.

import (
	"cmp"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// location is the place of a device in the PCI topology.
type location struct {
	path []string // from the host bridge to the device
	numa int      // NUMA node, negative if not known
}

// nearness is the kind of path between two devices, the shortest first. The kinds differ in the cost of peer-to-peer transfers, which may have
// to pass the host bridge or the link between sockets.
type nearness int

const (
	sameSwitch nearness = iota
	sameRoot
	sameNode
	elsewhere
	unknown
)

func (n nearness) String() string {
	return [...]string{"same PCIe switch", "same root complex", "same NUMA node", "other NUMA node", "unknown place"}[n]
}

// distance is a kind of path, and the number of shared elements, which orders paths of one kind.
type distance struct {
	nearness
	shared int // number of host bridges, bridges and switches in common
}

// compare orders the shorter distance first.
func (c distance) compare(d distance) int {
	return cmp.Or(cmp.Compare(c.nearness, d.nearness), -cmp.Compare(c.shared, d.shared))
}

// distanceBetween returns the distance from a to b.
func distanceBetween(a, b location) distance {
	if a.path == nil || b.path == nil {
		return distance{unknown, 0}
	}
	n := 0
	for n < min(len(a.path), len(b.path)) && a.path[n] == b.path[n] {
		n++
	}
	switch {
	case n >= 2: // they share a bridge below the host bridge
		return distance{sameSwitch, n}
	case n == 1:
		return distance{sameRoot, n}
	case a.numa >= 0 && a.numa == b.numa:
		return distance{sameNode, 0}
	}
	return distance{elsewhere, 0}
}

var (
	hostBridge = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
	pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
)

// pciPath returns the PCI devices along a path of sysfs, and the directory of the last one.
func pciPath(dir string) (devices []string, at string) {
	parts := strings.Split(path.Clean(strings.TrimPrefix(dir, "/")), "/")
	begin := slices.IndexFunc(parts, hostBridge.MatchString)
	if begin < 0 {
		return nil, ""
	}
	end := begin + 1
	for end < len(parts) && pciAddress.MatchString(parts[end]) {
		end++
	}
	if end == begin+1 {
		return nil, ""
	}
	return parts[begin:end], path.Join(parts[:end]...)
}

// locationOf returns the location of an RDMA device: from its own path, or from that of its interface if it has none, as with Soft-RoCE.
func (l *survey) locationOf(dir, iface string) location {
	devices, at := pciPath(dir)
	if devices == nil && iface != "" {
		devices, at = pciPath(l.netDir(iface))
	}
	return l.locationAt(devices, at)
}

// locate finds a PCI device by its address.
func (l *survey) locate(address string) location {
	address, ok := normalizePCI(address)
	if !ok {
		return location{numa: -1}
	}
	return l.locationAt(pciPath(l.link("sys/bus/pci/devices/" + address)))
}

func (l *survey) locationAt(devices []string, at string) location {
	if devices == nil {
		return location{numa: -1}
	}
	return location{devices, l.number(path.Join(at, "numa_node"))}
}

// normalizePCI writes a PCI address as the kernel does. NVIDIA writes eight digits for the domain, and capital letters. Some tools omit the
// domain.
func normalizePCI(address string) (string, bool) {
	parts := strings.Split(strings.ToLower(strings.TrimSpace(address)), ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	if len(parts) != 3 {
		return "", false
	}
	domain, err := strconv.ParseUint(parts[0], 16, 32)
	if err != nil {
		return "", false
	}
	s := fmt.Sprintf("%04x:%s:%s", domain, parts[1], parts[2])
	return s, pciAddress.MatchString(s)
}

// netDir returns the directory of a network interface, "" if it is not known.
func (l *survey) netDir(iface string) string {
	if iface == "" || strings.ContainsAny(iface, "/") {
		return ""
	}
	return l.link("sys/class/net/" + iface)
}

// link returns the target of a symbolic link in sysfs, "" if there is none.
func (l *survey) link(name string) string {
	to, err := fs.ReadLink(l.m.Root, name)
	if err != nil {
		return ""
	}
	if path.IsAbs(to) {
		return strings.TrimPrefix(to, "/")
	}
	return path.Join(path.Dir(name), to)
}

func (l *survey) exists(name string) bool {
	_, err := fs.Stat(l.m.Root, name)
	return err == nil
}

// read returns the content of a file, "" if it cannot be read.
func (l *survey) read(name string) string {
	b, err := fs.ReadFile(l.m.Root, name)
	if err != nil {
		return ""
	}
	return string(b)
}

// number returns the number in a file, -1 if it cannot be read.
func (l *survey) number(file string) int {
	n, err := strconv.ParseInt(strings.TrimSpace(l.read(file)), 0, 32)
	if err != nil {
		return -1
	}
	return int(n)
}
