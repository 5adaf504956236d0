package choose_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// with changes a copy of a machine for one case.
func with(m choose.Machine, change func(*choose.Machine)) choose.Machine {
	change(&m)
	return m
}

func down(m *choose.Machine, devices ...string) {
	for i, d := range m.Devices {
		if slices.Contains(devices, d.Name) {
			d.Ports[0].Active, d.Ports[0].State = false, "DOWN"
			m.Devices[i] = d
		}
	}
}

func without(m *choose.Machine, device string) {
	m.Devices = slices.DeleteFunc(m.Devices, func(d verbs.DeviceInfo) bool { return d.Name == device })
}

// unplaced removes the NUMA nodes of PCI devices.
func unplaced(m *choose.Machine, addresses ...string) {
	root := m.Root.(fstest.MapFS)
	for name := range root {
		for _, a := range addresses {
			if strings.HasSuffix(name, "/"+a+"/numa_node") {
				tree(root).file(name, "-1")
			}
		}
	}
}

// place describes a result as "address interface device port gid".
func place(r choose.Result) string {
	return fmt.Sprintf("%s %s %s %d %d", r.Host, r.Iface, r.Device, r.Port, r.GIDIndex)
}

func TestChoose(t *testing.T) {
	for _, x := range []struct {
		name    string
		m       choose.Machine
		iface   string
		host    string
		gpu     string
		want    string
		why     string // in the log line
		not     string // not in the log line
		err     error
		problem []string // in the error
	}{
		{name: "nothing set", m: eight(), want: "10.1.0.1 eth0 mlx5_2 1 3", why: "DMLC_INTERFACE=auto would take"},
		{name: "nothing set, one port", m: soft(), want: "10.77.0.1 eth0 rxe0 1 1", why: "first active RDMA port", not: "auto"},
		{name: "nothing set, first port down", m: with(eight(), func(m *choose.Machine) { down(m, "mlx5_2") }), want: "10.1.1.1 eth1 mlx5_3 1 3",
			why: "mlx5_2 port 1 (DOWN)"},

		{name: "name", m: eight(), iface: "eth5", want: "10.1.5.1 eth5 mlx5_7 1 3", why: "DMLC_INTERFACE=eth5"},
		{name: "name of a bond", m: eight(), iface: "bond0", want: "192.168.7.1 bond0 mlx5_bond_0 1 3", why: "DMLC_INTERFACE=bond0"},
		{name: "beginning of a name", m: eight(), iface: "bo", want: "192.168.7.1 bond0 mlx5_bond_0 1 3", why: "DMLC_INTERFACE=bo"},
		{name: "name and host", m: eight(), iface: "eth5", host: "10.1.6.1", want: "10.1.6.1 eth6 mlx5_8 1 3", why: "DMLC_NODE_HOST"},
		{name: "several names", m: eight(), iface: "eth", err: choose.ErrNoInterface, problem: []string{`DMLC_INTERFACE="eth"`, "8 interfaces begin so", "eth3 10.1.3.1 (mlx5_5 port 1, ACTIVE)"}},
		{name: "no such name", m: infiniband(), iface: "ib7", err: choose.ErrNoInterface,
			problem: []string{`DMLC_INTERFACE="ib7": no such interface`, "ib0 10.2.0.1 (mlx5_0 port 1, ACTIVE), ib1 10.2.1.1 (mlx5_0 port 2, DOWN)", "interfaces without RDMA: lo (127.0.0.1), eth0 (10.3.0.1)"}},
		{name: "name without RDMA", m: infiniband(), iface: "eth0", err: choose.ErrNoDevice, problem: []string{`"eth0": eth0 is not on an RDMA port`}},
		{name: "name without address", m: with(soft(), func(m *choose.Machine) { m.Interfaces = append(m.Interfaces, iface("eth1", "")) }),
			iface: "eth1", err: choose.ErrNoAddress, problem: []string{"eth1 has no IPv4 address"}},
		{name: "name of a port that is down", m: infiniband(), iface: "ib1", err: choose.ErrPortDown, problem: []string{`"ib1": mlx5_0 port 2 is DOWN`}},

		{name: "auto without GPU", m: eight(), iface: "auto", want: "10.1.0.1 eth0 mlx5_2 1 3", why: "GPU's place is not known"},
		{name: "auto, unknown GPU", m: eight(), iface: "auto", gpu: "0000:99:00.0", want: "10.1.0.1 eth0 mlx5_2 1 3", why: "GPU 0000:99:00.0 is not in /sys"},
		{name: "auto, nonsense for a GPU", m: eight(), iface: "auto", gpu: "MIG-1", want: "10.1.0.1 eth0 mlx5_2 1 3", why: "GPU MIG-1 is not in /sys"},
		{name: "auto, NVIDIA's spelling", m: eight(), iface: "AUTO", gpu: "00000000:AA:00.0", want: "10.1.5.1 eth5 mlx5_7 1 3", why: "nearest to GPU 0000:aa:00.0 (same PCIe switch);"},
		{name: "auto, no domain", m: eight(), iface: "auto", gpu: "9a:00.0", want: "10.1.4.1 eth4 mlx5_6 1 3", why: "same PCIe switch"},
		{name: "auto, own NIC down", m: with(eight(), func(m *choose.Machine) { down(m, "mlx5_7") }), iface: "auto", gpu: gpu(5),
			want: "10.1.4.1 eth4 mlx5_6 1 3", why: "(same root complex);"},
		{name: "auto, own NIC without address", m: with(eight(), func(m *choose.Machine) { m.Devices[5].Ports[0] = ethernet(1, "eth5", "") }), iface: "auto", gpu: gpu(5),
			want: "10.1.4.1 eth4 mlx5_6 1 3", why: "mlx5_7 port 1 (no IPv4 address)"},
		{name: "auto, address of another namespace", m: with(eight(), func(m *choose.Machine) { m.Devices[5].Ports[0] = ethernet(1, "", "10.9.9.9") }), iface: "auto", gpu: gpu(5),
			want: "10.1.4.1 eth4 mlx5_6 1 3", why: "mlx5_7 port 1 (10.9.9.9 is not on an interface of this host)"},
		{name: "auto, root complex without NIC", m: with(eight(), func(m *choose.Machine) { without(m, "mlx5_7"); without(m, "mlx5_6") }), iface: "auto", gpu: gpu(5),
			want: "10.1.6.1 eth6 mlx5_8 1 3", why: "(same NUMA node), the first of several;"},
		{name: "auto, socket without NIC", m: with(eight(), func(m *choose.Machine) { down(m, "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9") }), iface: "auto", gpu: gpu(5),
			want: "10.1.0.1 eth0 mlx5_2 1 3", why: "(other NUMA node), the first of several;"},
		{name: "auto, NUMA nodes unknown", m: with(eight(), func(m *choose.Machine) {
			without(m, "mlx5_7")
			without(m, "mlx5_6")
			unplaced(m, gpu(5), "0000:c1:00.0") // and mlx5_8
		}), iface: "auto", gpu: gpu(5), want: "10.1.0.1 eth0 mlx5_2 1 3", why: "(other NUMA node), the first of several;"},
		{name: "auto, device on no bus", m: soft(), iface: "auto", gpu: gpu(0), want: "10.77.0.1 eth0 rxe0 1 1", why: "not in /sys"},
		{name: "auto before host", m: eight(), iface: "auto", host: "10.1.0.1", gpu: gpu(7), want: "10.1.7.1 eth7 mlx5_9 1 3", why: "nearest"},
		{name: "auto fails, host", m: with(soft(), func(m *choose.Machine) { m.Interfaces = nil }), iface: "auto", host: "10.77.0.1", want: "10.77.0.1 eth0 rxe0 1 1",
			why: "DMLC_NODE_HOST, because DMLC_INTERFACE=auto found nothing"},
		{name: "auto, no device", iface: "auto", err: choose.ErrNoDevice, problem: []string{`DMLC_INTERFACE="auto": no RDMA device`, "load the kernel module", "no RDMA port"}},
		{name: "auto, all down", m: with(soft(), func(m *choose.Machine) { down(m, "rxe0") }), iface: "auto", err: choose.ErrPortDown,
			problem: []string{"no usable RDMA port", "eth0 10.77.0.1 (rxe0 port 1, DOWN)"}},
		{name: "auto, no address", m: with(soft(), func(m *choose.Machine) { m.Devices[0].Ports[0] = ethernet(1, "eth0", "") }), iface: "auto", err: choose.ErrNoAddress,
			problem: []string{"no usable RDMA port", "rxe0 port 1 (no IPv4 address)", "eth0 (10.77.0.1)"}},
		{name: "no device", m: choose.Machine{Interfaces: []choose.Interface{iface("eth0", "10.0.0.1")}}, err: choose.ErrNoDevice, problem: []string{"no RDMA device; load the kernel module of the network card", "rdma link add", "; this host has no RDMA port", "eth0 (10.0.0.1)"}},

		{name: "host", m: eight(), host: "10.1.3.1", want: "10.1.3.1 eth3 mlx5_5 1 3", why: "DMLC_NODE_HOST"},
		{name: "host, of no device", m: eight(), host: "10.1.3.2", err: choose.ErrNoDevice, problem: []string{`DMLC_NODE_HOST="10.1.3.2": no RDMA port has this address`, "eth3 10.1.3.1"}},
		{name: "host, loopback", m: eight(), host: "127.0.0.1", err: choose.ErrNoDevice, problem: []string{"RDMA does not work over the loopback interface"}},
		{name: "host, down", m: with(eight(), func(m *choose.Machine) { down(m, "mlx5_5") }), host: "10.1.3.1", err: choose.ErrPortDown, problem: []string{"mlx5_5 port 1 is DOWN"}},
		{name: "host, IPv6", m: soft(), host: "fd77::1", err: choose.ErrNoAddress, problem: []string{`"fd77::1": want an IPv4 address`}},
		{name: "host, mapped", m: soft(), host: "::ffff:10.77.0.1", want: "10.77.0.1 eth0 rxe0 1 1", why: "DMLC_NODE_HOST"},

		{name: "InfiniBand", m: infiniband(), iface: "auto", want: "10.2.0.1 ib0 mlx5_0 1 0", why: "(IB)"},
		{name: "InfiniBand by name", m: infiniband(), iface: "ib0", want: "10.2.0.1 ib0 mlx5_0 1 0", why: "DMLC_INTERFACE=ib0"},
		{name: "InfiniBand by host", m: infiniband(), host: "10.2.0.1", want: "10.2.0.1 ib0 mlx5_0 1 0", why: "DMLC_NODE_HOST"},

		{name: "self-assigned address last", m: with(soft(), func(m *choose.Machine) {
			m.Interfaces = append(m.Interfaces, iface("eth1", "169.254.1.1"))
			m.Devices[0].Ports[0].GIDs = append([]verbs.GID{roce(0, "RoCE v2", "169.254.1.1", "eth1")}, m.Devices[0].Ports[0].GIDs...)
		}), want: "10.77.0.1 eth0 rxe0 1 1", why: "rxe0 port 1 169.254.1.1"},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := choose.Request{Interface: x.iface, GPU: x.gpu}
			if x.host != "" {
				r.Host = netip.MustParseAddr(x.host)
			}
			got, err := choose.Choose(x.m, r)
			if x.err != nil {
				if !errors.Is(err, x.err) {
					t.Fatalf("%v, %v; want an error that wraps %q", got, err, x.err)
				}
				for _, p := range x.problem {
					if !strings.Contains(err.Error(), p) {
						t.Errorf("%q does not say %q", err, p)
					}
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if place(got) != x.want {
				t.Errorf("chose %s, want %s", place(got), x.want)
			}
			line := got.String()
			if !strings.Contains(line, x.why) || x.not != "" && strings.Contains(line, x.not) || strings.Contains(line, "\n") {
				t.Errorf("%q, want one line with %q and without %q", line, x.why, x.not)
			}
		})
	}
}

// TestEveryGPU: each of eight GPUs gets the NIC at its own switch.
func TestEveryGPU(t *testing.T) {
	m := eight()
	for k := range 8 {
		g := choose.GPUAddress(m.Root, k, "", false)
		if g != gpu(k) {
			t.Errorf("GPU %d is at %q, want %q", k, g, gpu(k))
		}
		r, err := choose.Choose(m, choose.Request{Interface: "auto", GPU: g})
		if want := fmt.Sprintf("mlx5_%d", k+2); err != nil || r.Device != want || len(r.Others) != 8 {
			t.Errorf("GPU %d: %v, %v; want %s", k, r, err, want)
		}
	}
}

func TestLine(t *testing.T) {
	m := eight()
	m.Devices = []verbs.DeviceInfo{m.Devices[8], m.Devices[6], m.Devices[1], m.Devices[0]}
	down(&m, "mlx5_8")
	r, err := choose.Choose(m, choose.Request{Interface: "auto", GPU: gpu(0)})
	const want = "10.1.0.1 on eth0, mlx5_2 port 1, GID 3 (RoCE v2): DMLC_INTERFACE=auto: nearest to GPU 0000:1a:00.0 (same PCIe switch); " +
		"not taken: mlx5_3 port 1 10.1.1.1 (same root complex), mlx5_bond_0 port 1 192.168.7.1 (same NUMA node), mlx5_8 port 1 (DOWN)"
	if err != nil || r.String() != want {
		t.Errorf("%v, %v\nwant %s", r, err, want)
	}
}

func TestNamesInOrder(t *testing.T) {
	m := choose.Machine{Interfaces: []choose.Interface{iface("eth0", "10.0.0.1"), iface("eth1", "10.0.0.2")}}
	for _, n := range []string{"mlx5_10", "mlx5_9"} {
		m.Devices = append(m.Devices, verbs.DeviceInfo{Name: n, Ports: []verbs.PortInfo{ethernet(1, "eth"+fmt.Sprint(len(m.Devices)), fmt.Sprintf("10.0.0.%d", len(m.Devices)+1))}})
	}
	if r, err := choose.Choose(m, choose.Request{}); err != nil || r.Device != "mlx5_9" {
		t.Errorf("%v, %v; want mlx5_9", r, err)
	}
}

func TestBestGID(t *testing.T) {
	addr := netip.MustParseAddr("10.0.0.1")
	all := []verbs.GID{
		roce(0, "RoCE v1", "fe80::1", ""), roce(1, "RoCE v2", "fe80::1", ""), roce(2, "RoCE v1", "2001::1", ""), roce(3, "RoCE v2", "2001::1", ""),
		roce(4, "IB", "fe80::2", ""), roce(5, "RoCE v1", "10.0.0.1", ""), roce(6, "RoCE v2", "::ffff:10.0.0.1", ""), roce(7, "RoCE v2", "10.0.0.1", ""),
	}
	// In the order of preference; each round removes the best one.
	for _, want := range []int{6, 7, 5, 4, 3, 2, 1, 0} {
		g, ok := choose.BestGID(all, addr)
		if !ok || g.Index != want {
			t.Errorf("GID %d, %v; want %d", g.Index, ok, want)
		}
		all = slices.DeleteFunc(all, func(g verbs.GID) bool { return g.Index == want })
	}
	if g, ok := choose.BestGID([]verbs.GID{roce(0, "RoCE v2", "10.0.0.2", ""), {Index: 1}}, addr); ok {
		t.Errorf("took %v, which is another address", g)
	}
}

func TestGPUAddress(t *testing.T) {
	m := eight()
	driver := tree{}
	driver.file("proc/driver/nvidia/gpus/0000:c0:00.0/information", "Model: made up")
	driver.file("proc/driver/nvidia/gpus/0000:1a:00.0/information", "Model: made up")
	for _, x := range []struct {
		index   int
		visible string
		set     bool
		want    string
	}{
		{0, "", false, gpu(0)}, {7, "", false, gpu(7)}, {8, "", false, ""}, {-1, "", false, ""},
		{0, "", true, ""}, {0, "3", true, gpu(3)}, {1, "3, 5", true, gpu(5)}, {2, "3,5", true, ""},
		{0, "GPU-1234", true, ""}, {0, "-1", true, ""},
	} {
		if got := choose.GPUAddress(m.Root, x.index, x.visible, x.set); got != x.want {
			t.Errorf("GPU %d of %q: %q, want %q", x.index, x.visible, got, x.want)
		}
	}
	for k, want := range []string{"0000:1a:00.0", "0000:c0:00.0", ""} {
		if got := choose.GPUAddress(root(driver), k, "", false); got != want {
			t.Errorf("GPU %d of the driver: %q, want %q", k, got, want)
		}
	}
	if got := choose.GPUAddress(nil, 0, "", false); got != "" {
		t.Errorf("found %q in no file system", got)
	}
}

// TestThisHost: the sysfs of a real system can be read.
func TestThisHost(t *testing.T) {
	interfaces, err := choose.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	lo := slices.IndexFunc(interfaces, func(i choose.Interface) bool { return i.Loopback })
	if lo < 0 || !slices.ContainsFunc(interfaces[lo].Addrs, netip.Addr.IsLoopback) {
		t.Errorf("%v has no loopback", interfaces)
	}
	m := soft()
	m.Root = os.DirFS("/")
	m.Interfaces = append(interfaces, iface("made-up", "10.77.0.1"))
	r, err := choose.Choose(m, choose.Request{Interface: "auto", GPU: choose.GPUAddress(m.Root, 0, "", false)})
	if err != nil || r.Device != "rxe0" {
		t.Errorf("%v, %v; want rxe0", r, err)
	}
}

// FuzzChoose: for any text, the result is a choice or an error with a reason.
func FuzzChoose(f *testing.F) {
	for _, s := range []string{"", "auto", "eth", "eth5", "00000000:AA:00.0", "9a:00.0", "../..", "/"} {
		f.Add(s, s, s)
	}
	m := eight()
	f.Fuzz(func(t *testing.T, iface, host, gpu string) {
		r := choose.Request{Interface: iface, GPU: gpu}
		r.Host, _ = netip.ParseAddr(host)
		got, err := choose.Choose(m, r)
		var e *choose.Error
		if err == nil && (!got.Host.Is4() || got.Device == "" || got.Port != 1) || err != nil && (!errors.As(err, &e) || e.Err == nil || !errors.Is(err, e.Err)) {
			t.Errorf("%q: %v, %v", r, got, err)
		}
	})
}
