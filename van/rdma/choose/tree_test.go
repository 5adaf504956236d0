package choose_test

import (
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"strings"
	"testing/fstest"

	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// tree is a file system with an artificial sysfs.
type tree fstest.MapFS

func (t tree) file(name, text string) { t[name] = &fstest.MapFile{Data: []byte(text + "\n")} }

func (t tree) link(name, to string) {
	up := strings.Repeat("../", strings.Count(name, "/"))
	t[name] = &fstest.MapFile{Data: []byte(up + to), Mode: fs.ModeSymlink}
}

// pci adds a PCI device at the end of a path of bridges and returns its directory.
func (t tree) pci(bridges, address, vendor, class string, numa int) string {
	dir := "sys/devices/" + bridges + "/" + address
	t.link("sys/bus/pci/devices/"+address, dir)
	t.file(dir+"/vendor", vendor)
	t.file(dir+"/class", class)
	t.file(dir+"/numa_node", fmt.Sprint(numa))
	return dir
}

// net adds a network interface to a device, "" for a virtual one.
func (t tree) net(dir, name string, port int) {
	if dir == "" {
		dir = "sys/devices/virtual"
	}
	dir = path.Join(dir, "net", name)
	t.file(dir+"/dev_port", fmt.Sprint(port))
	t.link("sys/class/net/"+name, dir)
}

func iface(name, addr string) choose.Interface {
	i := choose.Interface{Name: name, Up: true, Loopback: name == "lo"}
	if addr != "" {
		i.Addrs = []netip.Addr{netip.MustParseAddr(addr)}
	}
	return i
}

func roce(index int, kind, addr, iface string) verbs.GID {
	return verbs.GID{Index: index, Addr: netip.MustParseAddr(addr), Type: kind, Iface: iface}
}

// ethernet returns an active RoCE port with the GIDs that a driver makes for an interface.
func ethernet(num int, iface, addr string) verbs.PortInfo {
	p := verbs.PortInfo{Num: num, Active: true, State: "ACTIVE", LinkLayer: "Ethernet", MTU: 4096, Rate: 400}
	p.GIDs = []verbs.GID{roce(0, "RoCE v1", "fe80::1", iface), roce(1, "RoCE v2", "fe80::1", iface)}
	if addr != "" {
		p.GIDs = append(p.GIDs, roce(2, "RoCE v1", addr, iface), roce(3, "RoCE v2", addr, iface))
	}
	return p
}

// eight returns a host with two sockets, two root complexes on each, two switches on each of those, and a GPU and a NIC at every switch. The NICs are mlx5_2 to
// mlx5_9 with interfaces eth0 to eth7 and addresses 10.1.K.1; GPU k is next to NIC k. On a root complex of its own at socket 0 is a bonded NIC, mlx5_bond_0, for
// other traffic.
func eight() choose.Machine {
	t := tree{}
	m := choose.Machine{Root: fstest.MapFS(t)}
	m.Interfaces = append(m.Interfaces, iface("lo", "127.0.0.1"))
	for k := range 8 {
		bus := []int{0x17, 0x3d, 0x97, 0xbd}[k/2]
		first := bus + 1 + k%2*0x10
		bridges := fmt.Sprintf("pci0000:%02x/0000:%02x:%02x.0/0000:%02x:00.0", bus, bus, 1+k%2*2, first)
		t.pci(fmt.Sprintf("%s/0000:%02x:00.0", bridges, first+1), fmt.Sprintf("0000:%02x:00.0", first+2), "0x10de", "0x030200", k/4)
		dir := t.pci(fmt.Sprintf("%s/0000:%02x:01.0", bridges, first+1), fmt.Sprintf("0000:%02x:00.0", first+3), "0x15b3", "0x020700", k/4)
		name, addr := fmt.Sprintf("eth%d", k), fmt.Sprintf("10.1.%d.1", k)
		t.net(dir, name, 0)
		m.Interfaces = append(m.Interfaces, iface(name, addr))
		m.Devices = append(m.Devices, verbs.DeviceInfo{Name: fmt.Sprintf("mlx5_%d", k+2), Ports: []verbs.PortInfo{ethernet(1, name, addr)},
			Path: "/" + dir + fmt.Sprintf("/infiniband/mlx5_%d", k+2)})
	}
	dir := t.pci("pci0000:00/0000:00:02.0", "0000:01:00.0", "0x15b3", "0x020000", 0)
	t.net("", "bond0", 0)
	m.Interfaces = append(m.Interfaces, iface("bond0", "192.168.7.1"))
	m.Devices = append(m.Devices, verbs.DeviceInfo{Name: "mlx5_bond_0", Ports: []verbs.PortInfo{ethernet(1, "bond0", "192.168.7.1")}, Path: "/" + dir})
	return m
}

// gpu returns the address of GPU k of eight.
func gpu(k int) string {
	return fmt.Sprintf("0000:%02x:00.0", []int{0x17, 0x3d, 0x97, 0xbd}[k/2]+3+k%2*0x10)
}

// infiniband returns a host with one card of two ports; ib0 uses the first.
func infiniband() choose.Machine {
	t := tree{}
	dir := t.pci("pci0000:00/0000:00:01.0", "0000:01:00.0", "0x15b3", "0x020700", -1)
	t.net(dir, "ib0", 0)
	t.net(dir, "ib1", 1)
	t.file(dir+"/infiniband/mlx5_0/fw_ver", "28.1")
	port := func(num int, active bool, state string) verbs.PortInfo {
		return verbs.PortInfo{Num: num, Active: active, State: state, LinkLayer: "InfiniBand", MTU: 4096, Rate: 400,
			GIDs: []verbs.GID{roce(0, "IB", fmt.Sprintf("fe80::%d", num), "")}}
	}
	return choose.Machine{
		Root:       fstest.MapFS(t),
		Interfaces: []choose.Interface{iface("lo", "127.0.0.1"), iface("ib0", "10.2.0.1"), iface("ib1", "10.2.1.1"), iface("eth0", "10.3.0.1")},
		Devices:    []verbs.DeviceInfo{{Name: "mlx5_0", Path: "/" + dir, Ports: []verbs.PortInfo{port(1, true, "ACTIVE"), port(2, false, "DOWN")}}},
	}
}

// soft returns a host with Soft-RoCE over eth0, a virtual device.
func soft() choose.Machine {
	t := tree{}
	t.net("", "eth0", 0)
	return choose.Machine{
		Root:       fstest.MapFS(t),
		Interfaces: []choose.Interface{iface("lo", "127.0.0.1"), iface("eth0", "10.77.0.1")},
		Devices: []verbs.DeviceInfo{{Name: "rxe0", Path: "/sys/devices/virtual/infiniband/rxe0", Ports: []verbs.PortInfo{{
			Num: 1, Active: true, State: "ACTIVE", LinkLayer: "Ethernet", MTU: 1024, Rate: 2.5,
			GIDs: []verbs.GID{roce(0, "RoCE v2", "fe80::1", "eth0"), roce(1, "RoCE v2", "10.77.0.1", "eth0"), roce(2, "RoCE v2", "fd77::1", "eth0")},
		}}}},
	}
}

func root(t tree) fs.FS { return fstest.MapFS(t) }
