package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/inproc"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// tree is the root directory of a simulated machine.
type tree fstest.MapFS

func (t tree) file(name, text string) { t[name] = &fstest.MapFile{Data: []byte(text + "\n")} }

func (t tree) link(name, to string) {
	t[name] = &fstest.MapFile{Data: []byte(strings.Repeat("../", strings.Count(name, "/")) + to), Mode: fs.ModeSymlink}
}

// plain is a machine without RDMA.
func plain(environ ...string) (*Machine, tree) {
	t := tree{}
	t.file("proc/sys/kernel/osrelease", "6.1.0-test")
	t.file("proc/meminfo", "MemTotal:       131072000 kB\nMemFree:         1000 kB\nMemAvailable:   65536000 kB")
	t.file("proc/self/status", "Name:\tstepaf\nCapEff:\t0000000000000000")
	return &Machine{
		Root: fstest.MapFS(t), Env: env.FromList(environ),
		Version: "v1.2.3", Go: "go1.26 linux/amd64", LibZMQ: "4.3.5", HasCurve: true, Transports: []string{"ibverbs", "zmq"}, Backends: []string{"CPU"}, CPUs: 16,
		Interfaces: func() ([]choose.Interface, error) {
			return []choose.Interface{
				{Name: "lo", Up: true, Loopback: true, Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}},
				{Name: "eth0", Up: true, Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.1")}},
				{Name: "eth1", Up: true, Addrs: []netip.Addr{netip.MustParseAddr("10.1.1.1")}},
			}, nil
		},
		Source: func(dest netip.Addr) (netip.Addr, error) {
			if dest.String() == "192.0.2.1" {
				return netip.Addr{}, syscall.ENETUNREACH
			}
			return netip.MustParseAddr("10.1.0.1"), nil
		},
		Resolve: Resolve,
		Open:    func(string) error { return nil },
		Limits: limits.System{
			Files:   func() (uint64, uint64, error) { return 1024, 4096, nil },
			Open:    func() int { return ofDoctor },
			Memlock: func() (uint64, error) { return math.MaxUint64, nil },
		},
		ZMQ:   inproc.NewNetwork().Factory(),
		Verbs: func() (verbs.Stack, error) { return nil, fmt.Errorf("%w: no libibverbs.so.1", verbs.ErrUnavailable) },
	}, t
}

// withGPUs is a machine with two GPUs, an old one and a new one.
func withGPUs(environ ...string) *Machine {
	m, _ := plain(environ...)
	m.Backends = []string{"CPU", "GPU"}
	m.GPUs = func() ([]backend.Info, error) {
		return []backend.Info{
			{Device: backend.Device{Type: backend.GPU}, Name: "NVIDIA H200", UUID: "GPU-1", PCIBusID: "0000:18:00.0", Memory: 141 << 30, Driver: "CUDA 13.0",
				DMABuf: true, ComputeMajor: 9, Peers: []int{1}},
			{Device: backend.Device{Type: backend.GPU, ID: 1}, Name: "Tesla P100", UUID: "GPU-2", PCIBusID: "0000:19:00.0", Memory: 16 << 30, Driver: "CUDA 13.0",
				ComputeMajor: 6},
		}, nil
	}
	return m
}

var fakeAddrs = []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.1.1")}

// equipped is a machine with two RDMA devices, and a GPU close to the second one.
func equipped(t testing.TB, environ ...string) (*Machine, tree, *fakeverbs.Net) {
	m, root := plain(environ...)
	n := fakeverbs.NewNet()
	t.Cleanup(func() {
		if l := n.Leaks(); len(l) > 0 {
			t.Errorf("left behind: %v", l)
		}
		for _, err := range n.Errors() {
			t.Error(err)
		}
		n.Close()
	})
	stack := n.Stack(fakeAddrs...)
	m.Verbs = func() (verbs.Stack, error) { return stack, nil }
	for k, a := range fakeAddrs {
		dir := fmt.Sprintf("sys/devices/pci0000:%d0/0000:%d0:01.0/0000:%d1:00.0/0000:%d2:00.0", k, k, k, k)
		root.file(dir+"/0000:03:00.0/numa_node", fmt.Sprint(k))
		root.link(fmt.Sprintf("sys/class/infiniband/fake%d", k), dir)
		root.file(fmt.Sprintf("sys/class/infiniband_verbs/uverbs%d/ibdev", k), fmt.Sprintf("fake%d", k))
		n.Info(a, func(d *verbs.DeviceInfo) {
			d.Path = "/" + dir + "/0000:03:00.0/infiniband/" + d.Name
			for i := range d.Ports[0].GIDs {
				d.Ports[0].GIDs[i].Iface = fmt.Sprintf("eth%d", k)
			}
		})
	}
	gpu := "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0"
	root.link("sys/bus/pci/devices/0000:14:00.0", gpu)
	root.file(gpu+"/vendor", "0x10de")
	root.file(gpu+"/class", "0x030200")
	root.file(gpu+"/numa_node", "1")
	root.file("sys/module/ib_uverbs/refcnt", "1")
	root.file("sys/module/mlx5_ib/refcnt", "1")
	root.file("proc/self/maps", "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libibverbs.so.1.14\n7f01-7f02 r-xp 00000000 08:01 1 /usr/lib/libibverbs.so.1.14\n"+
		"7f03-7f04 r-xp 00000000 08:01 2 /usr/lib/librdmacm.so.1.3\n7f05-7f06 r-xp 00000000 08:01 3 /usr/lib/libibverbs/libmlx5-rdmav34.so\n7ffe-7fff rw-p 00000000 00:00 0 [stack]")
	return m, root, n
}

func port(n *fakeverbs.Net, k int, edit func(*verbs.PortInfo)) {
	n.Info(fakeAddrs[k], func(d *verbs.DeviceInfo) {
		for i := range d.Ports[0].GIDs {
			d.Ports[0].GIDs[i].Iface = fmt.Sprintf("eth%d", k)
		}
		edit(&d.Ports[0])
	})
}

func examine(t *testing.T, m *Machine) Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var seen []Finding
	r, err := Run(ctx, m, func(f Finding) { seen = append(seen, f) })
	if err != nil {
		t.Fatal(err)
	}
	if len(seen) != len(r.Findings) {
		t.Errorf("told of %d findings, the report has %d", len(seen), len(r.Findings))
	}
	for _, f := range r.Findings {
		if (f.Remedy != "") != (f.Status != OK) {
			t.Errorf("%s is %s with remedy %q", f.Name, f.Status, f.Remedy)
		}
		if strings.Contains(f.Text+f.Remedy, "\n") || f.Text == "" {
			t.Errorf("%s: want one line, got %q", f.Name, f.Text)
		}
	}
	return r
}

// The parts of a report that differ between runs.
var (
	times = regexp.MustCompile(`\b[0-9.]+(ns|µs|ms|s)\b`)
	nanos = regexp.MustCompile(`("(?:p50_|p99_)?ns": )[0-9]+`)
	ports = regexp.MustCompile(`127\.0\.0\.1:[0-9]+`)
)

func TestGolden(t *testing.T) {
	ill := errors.New("no RDMA today")
	for _, x := range []struct {
		name    string
		healthy bool
		m       func(t testing.TB) *Machine
	}{
		{"plain", true, func(testing.TB) *Machine { m, _ := plain(); return m }},
		{"plain_ibverbs", false, func(testing.TB) *Machine { m, _ := plain("DMLC_ENABLE_RDMA=ibverbs"); return m }},
		{"nordma", true, func(testing.TB) *Machine { m, _ := plain(); m.Verbs = nil; return m }},
		{"nordma_ibverbs", false, func(testing.TB) *Machine {
			m, _ := plain("DMLC_ENABLE_RDMA=ibverbs")
			m.Verbs = nil
			return m
		}},
		{"no_transport", false, func(t testing.TB) *Machine {
			m, _, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs")
			m.Transports = []string{"zmq"}
			return m
		}},
		{"equipped", true, func(t testing.TB) *Machine { m, _, _ := equipped(t); return m }},
		{"equipped_ibverbs", true, func(t testing.TB) *Machine {
			m, _, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_INTERFACE=auto", "DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1",
				"DMLC_PS_ROOT_URI=10.1.0.1", "DMLC_PS_ROOT_PORT=8123")
			return m
		}},
		{"scheduler", false, func(t testing.TB) *Machine {
			m, _, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_INTERFACE=auto", "DMLC_ROLE=scheduler", "DMLC_NUM_WORKER=1",
				"DMLC_PS_ROOT_URI=10.9.9.9", "DMLC_PS_ROOT_PORT=8123")
			return m
		}},
		{"environment", false, func(testing.TB) *Machine {
			m, _ := plain("PS_VERBOSE=yes", "DMLC_NUM_SEVER=2", "DMLC_GROUP_SIZE=0", "STEPAF_BUSY_POLL_ENABLE=1")
			m.CPUs = 2
			return m
		}},
		{"files", false, func(t testing.TB) *Machine {
			m, root, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs")
			delete(root, "sys/class/infiniband_verbs/uverbs1/ibdev")
			m.Open = func(name string) error {
				err := fs.ErrPermission
				if strings.HasSuffix(name, "rdma_cm") {
					err = fs.ErrNotExist
				}
				return &fs.PathError{Op: "open", Path: name, Err: err}
			}
			return m
		}},
		{"one_file", true, func(t testing.TB) *Machine {
			m, _, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs")
			m.Open = func(name string) error {
				if strings.HasSuffix(name, "uverbs1") {
					return &fs.PathError{Op: "open", Path: name, Err: syscall.ENXIO}
				}
				return nil
			}
			return m
		}},
		{"ports", false, func(t testing.TB) *Machine {
			m, _, n := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_INTERFACE=eth0")
			port(n, 0, func(p *verbs.PortInfo) { p.Active, p.State = false, "DOWN" })
			port(n, 1, func(p *verbs.PortInfo) { p.GIDs = p.GIDs[:1] })
			return m
		}},
		{"slow", false, func(t testing.TB) *Machine {
			m, root, n := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_INTERFACE=eth9")
			m.Limits.Memlock = func() (uint64, error) { return 65536, nil }
			root.file("proc/meminfo", "MemTotal: 900000 kB\nMemAvailable: 1000 kB")
			port(n, 0, func(p *verbs.PortInfo) { p.MTU = 1024 })
			port(n, 1, func(p *verbs.PortInfo) { p.Active, p.State, p.LinkLayer = false, "INIT", "InfiniBand" })
			return m
		}},
		{"devices", false, func(t testing.TB) *Machine {
			m, _, n := equipped(t, "DMLC_ENABLE_RDMA=ibverbs")
			n.Fail(fakeverbs.FailNth(fakeverbs.OpDevices, 1, errors.Join(ill, ill)))
			return m
		}},
		{"no_provider", true, func(t testing.TB) *Machine {
			m, _, n := equipped(t)
			for _, a := range fakeAddrs {
				n.RemoveDevice(a)
			}
			return m
		}},
		{"zmq", false, func(testing.TB) *Machine {
			m, _ := plain()
			m.ZMQ = func(van.Options) (van.Van, error) { return nil, errors.New("no ZeroMQ today") }
			return m
		}},
		{"zmq_ibverbs", true, func(t testing.TB) *Machine {
			m, _, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_NODE_HOST=10.1.1.1")
			m.ZMQ = func(van.Options) (van.Van, error) { return nil, errors.New("no ZeroMQ today") }
			return m
		}},
		{"no_gpu", false, func(testing.TB) *Machine {
			m, root := plain("STEPMESH_BAKCEND=GPU")
			m.Backends = []string{"CPU", "GPU"}
			m.GPUs = func() ([]backend.Info, error) { return nil, errors.New("GPUs: backend not available: no driver today") }
			root.file("proc/sys/kernel/yama/ptrace_scope", "3")
			return m
		}},
		{"gpu_unbuilt", false, func(testing.TB) *Machine { m, _ := plain("STEPMESH_BAKCEND=GPU", "BYTEPS_ENABLE_IPC=0"); return m }},
		{"gpus", true, func(testing.TB) *Machine { return saying(2, answerOf, "STEPMESH_GPU=1") }},
		{"gpus_many", false, func(testing.TB) *Machine { return saying(8, eightGPUs) }},
		{"gpus_no_ipc", true, func(testing.TB) *Machine { return withGPUs("BYTEPS_ENABLE_IPC=0", "DMLC_ENABLE_RDMA=zmq") }},
		{"gpus_ibverbs", false, func(testing.TB) *Machine {
			return saying(2, answerOf, "STEPMESH_GPU=2", "STEPMESH_BAKCEND=GPU", "DMLC_ENABLE_RDMA=ibverbs")
		}},
		{"gpus_unused", true, func(testing.TB) *Machine { return withGPUs("STEPMESH_BAKCEND=CPU") }},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := examine(t, x.m(t))
			if r.Healthy != x.healthy {
				t.Errorf("healthy: %v, want %v", r.Healthy, x.healthy)
			}
			var text, js bytes.Buffer
			for _, f := range r.Findings {
				PrintFinding(&text, f, true)
			}
			r.PrintSummary(&text)
			golden(t, x.name+".txt", text.String())
			if err := r.JSON(&js); err != nil {
				t.Fatal(err)
			}
			var back Report
			if err := json.Unmarshal(js.Bytes(), &back); err != nil || len(back.Findings) != len(r.Findings) || back.Healthy != r.Healthy {
				t.Errorf("JSON reads back as %+v, %v", back, err)
			}
			if x.name == "equipped_ibverbs" || x.name == "plain" {
				golden(t, x.name+".json", js.String())
			}
		})
	}
}

// TestAbsentNames: a variable that names something that this build or machine does not have is a failed check, since a
// node would be refused at its start.
func TestAbsentNames(t *testing.T) {
	for _, x := range []struct{ environ, want string }{
		{"DMLC_ENABLE_RDMA=abc", `DMLC_ENABLE_RDMA="abc": want one of those of this build, ibverbs, zmq`},
		{"DMLC_PS_VAN_TYPE=abc", `DMLC_PS_VAN_TYPE="abc": want one of those`},
		{"STEPMESH_BAKCEND=ABACUS", `STEPMESH_BAKCEND="ABACUS": want one of those of this build, CPU`},
		{"STEPAF_BACKEND=ABACUS", `STEPAF_BACKEND="ABACUS": want one of those`},
		{"DMLC_INTERFACE=nope", `DMLC_INTERFACE="nope": want one interface with an IPv4 address of this host, which has lo (127.0.0.1), eth0 (10.1.0.1)`},
		{"DMLC_INTERFACE=eth", `DMLC_INTERFACE="eth": want one interface`},
		{"DMLC_INTERFACE=six0", `DMLC_INTERFACE="six0": want one interface`},
		{"DMLC_INTERFACE=eth1", ""},
		{"DMLC_INTERFACE=l", ""}, // only lo begins with l
		{"DMLC_INTERFACE=auto", ""},
		{"DMLC_NODE_HOST=10.9.9.9", `DMLC_NODE_HOST="10.9.9.9": want an address of this host, which has lo`},
		{"DMLC_NODE_HOST=nowhere", `DMLC_NODE_HOST="nowhere": no such host; want an address of this host`},
		{"DMLC_NODE_HOST=10.1.1.1", ""},
		{"DMLC_NODE_HOST=127.0.0.5", ""},
		{"DMLC_PS_ROOT_URI=10.9.9.9", ""}, // the address of another host
		{"DMLC_PS_ROOT_URI=nowhere", `DMLC_PS_ROOT_URI="nowhere": no such host; want the name or an address of the scheduler's host`},
		{"DMLC_PS_ROOT_URI=192.0.2.1", `DMLC_PS_ROOT_URI="192.0.2.1": this host has no route to 192.0.2.1: network is unreachable`},
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_INTERFACE=lo", `DMLC_INTERFACE="lo": a node would listen at 127.0.0.1, which the scheduler at 10.9.9.9 cannot reach: it is a loopback address; the route there uses 10.1.0.1 (eth0); set DMLC_NODE_HOST or DMLC_INTERFACE`},
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_INTERFACE=docker0", `DMLC_INTERFACE="docker0": a node would listen at 172.17.0.1, which the scheduler at 10.9.9.9 cannot reach: it belongs to docker0`},
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_INTERFACE=usb0", `DMLC_INTERFACE="usb0": a node would listen at 169.254.1.1, which the scheduler at 10.9.9.9 cannot reach: it is link-local`},
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_NODE_HOST=0.0.0.0", `DMLC_NODE_HOST="0.0.0.0": a node would listen at 0.0.0.0, which the scheduler at 10.9.9.9 cannot reach: it is the unspecified address`},
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_NODE_HOST=127.0.0.1", `DMLC_NODE_HOST="127.0.0.1": a node would listen at 127.0.0.1`},
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_INTERFACE=eth1", ""}, // another network for data
		{"DMLC_PS_ROOT_URI=10.9.9.9 DMLC_INTERFACE=auto", ""},
		{"DMLC_PS_ROOT_URI=10.1.0.1 DMLC_INTERFACE=lo", ""}, // the scheduler is on this host
		{"DMLC_PS_ROOT_URI=127.0.0.1 DMLC_NODE_HOST=127.0.0.1", ""},
		{"DMLC_ROLE=scheduler DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=debian", `DMLC_PS_ROOT_URI="debian": it is 127.0.1.1 on this host, which no other host can reach`},
		{"DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=nowhere", `DMLC_PS_ROOT_URI="nowhere": no such host`},
		{"DMLC_ROLE=scheduler DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=nowhere", `DMLC_PS_ROOT_URI="nowhere": no such host; want an address of this host`},
		{"DMLC_ROLE=scheduler DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=nowhere DMLC_USE_KUBERNETES=1", `DMLC_PS_ROOT_URI="nowhere": no such host`},
		{"DMLC_ROLE=scheduler DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=10.9.9.9", `DMLC_PS_ROOT_URI="10.9.9.9": want an address of this host`},
		{"DMLC_ROLE=scheduler DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=10.9.9.9 DMLC_USE_KUBERNETES=1", ""},
		{"DMLC_ROLE=scheduler DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_PORT=1 DMLC_PS_ROOT_URI=10.1.0.1", ""},
	} {
		t.Run(x.environ, func(t *testing.T) {
			m, _ := plain(strings.Fields(x.environ)...)
			interfaces, _ := m.Interfaces()
			interfaces[1].Addrs = append(interfaces[1].Addrs, netip.MustParseAddr("fd00::2"))
			interfaces = append(interfaces, choose.Interface{Name: "six0", Up: true, Addrs: interfaces[1].Addrs[1:]},
				choose.Interface{Name: "docker0", Up: true, Addrs: []netip.Addr{netip.MustParseAddr("172.17.0.1")}},
				choose.Interface{Name: "usb0", Up: true, Addrs: []netip.Addr{netip.MustParseAddr("169.254.1.1")}})
			m.Interfaces = func() ([]choose.Interface, error) { return interfaces, nil }
			m.Resolve = func(_ context.Context, host string) (netip.Addr, error) {
				a, err := netip.ParseAddr(host)
				if host == "debian" {
					return netip.MustParseAddr("127.0.1.1"), nil
				}
				if err != nil {
					err = errors.New("no such host")
				}
				return a, err
			}
			r := examine(t, m)
			f := find(t, r, "environment")
			if r.Healthy != (x.want == "") || !strings.HasPrefix(f.Text, x.want) || (f.Status == Fail) == r.Healthy {
				t.Errorf("healthy: %v, %v %q; want %q", r.Healthy, f.Status, f.Text, x.want)
			}
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	got = ports.ReplaceAllString(nanos.ReplaceAllString(times.ReplaceAllString(got, "TIME"), "${1}0"), "127.0.0.1:PORT")
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (rewrite with -update):\n%s\nwant\n%s", file, got, want)
	}
}

func find(t *testing.T, r Report, name string) Finding {
	t.Helper()
	for _, f := range r.Findings {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("no finding %q in %+v", name, r.Findings)
	return Finding{}
}

// TestLoopbackFails: every error is reported with a remedy, and no resource is left.
func TestLoopbackFails(t *testing.T) {
	once := func(k fakeverbs.OpKind, n int, err error) func(*fakeverbs.Net) {
		return func(net *fakeverbs.Net) { net.Fail(fakeverbs.FailNth(k, n, err)) }
	}
	for _, x := range []struct {
		name         string
		make         func(*fakeverbs.Net)
		text, remedy string
	}{
		{"channel", once(fakeverbs.OpNewChannel, 1, syscall.EACCES), "event channel", "/dev/infiniband"},
		{"listener", once(fakeverbs.OpNewID, 1, syscall.ENODEV), "no such device", "rdma link"},
		{"bind", once(fakeverbs.OpBind, 1, syscall.EADDRNOTAVAIL), "bind", "network namespace"},
		{"listen", once(fakeverbs.OpListen, 1, syscall.EADDRINUSE), "listen", "rping"},
		{"client", once(fakeverbs.OpNewID, 2, syscall.ENOMEM), "cannot allocate", "ulimit"},
		{"address", once(fakeverbs.OpResolveAddr, 1, fakeverbs.EventError(-110)), "resolve the address: address error: connection timed out", "ip route get"},
		{"address at once", once(fakeverbs.OpResolveAddr, 1, syscall.ENODEV), "resolve the address: no such device", "rdma link"},
		{"route", once(fakeverbs.OpResolveRoute, 1, fakeverbs.EventError(-19)), "resolve the route: route error", "ip route get"},
		{"route at once", once(fakeverbs.OpResolveRoute, 1, syscall.ENODEV), "resolve the route: no such device", "rdma link"},
		{"register", once(fakeverbs.OpRegister, 1, syscall.ENOMEM), "register 4.0 KiB of memory", "ulimit"},
		{"register nothing", once(fakeverbs.OpRegister, 1, syscall.EPERM), "register 4.0 KiB of memory", "ulimit"},
		{"reserve", once(fakeverbs.OpReserve, 1, syscall.EINVAL), "completion queue", "dmesg"},
		{"queue pair", once(fakeverbs.OpCreateQP, 1, syscall.EPERM), "create a queue pair", "access"},
		{"second queue pair", once(fakeverbs.OpCreateQP, 2, syscall.ENOMEM), "create a queue pair", "ulimit"},
		{"connect", once(fakeverbs.OpConnect, 1, fakeverbs.EventError(-110)), "connect: unreachable", "rping"},
		{"connect at once", once(fakeverbs.OpConnect, 1, syscall.EINVAL), "connect: invalid argument", "rping"},
		{"rejected", func(n *fakeverbs.Net) { n.RejectNext(1, 8) }, "connect: rejected (reason 8)", "run it again"},
		{"accept", once(fakeverbs.OpAccept, 1, syscall.EINVAL), "accept: invalid argument", "rping"},
		{"post", once(fakeverbs.OpPost, 3, syscall.EINVAL), "round 2: post: invalid argument", "rping"},
		{"poll", once(fakeverbs.OpPoll, 3, syscall.EIO), "poll: input/output error", "rping"},
		{"write", func(n *fakeverbs.Net) {
			n.FailWR(func(fakeverbs.WR) verbs.Status { return verbs.StatusRetryExceeded })
		}, "round 1: a write failed: transport retries exceeded", "UDP port 4791"},
		{"access", func(n *fakeverbs.Net) {
			n.FailWR(func(fakeverbs.WR) verbs.Status { return verbs.StatusRemoteAccess })
		}, "a write failed: remote access error", "ib_write_lat"},
	} {
		t.Run(x.name, func(t *testing.T) {
			m, _, n := equipped(t, "DMLC_ENABLE_RDMA=ibverbs")
			x.make(n)
			f := find(t, examine(t, m), "rdma loopback fake0/1")
			if f.Status != Fail || !strings.Contains(f.Text, x.text) || !strings.Contains(f.Remedy, x.remedy) {
				t.Errorf("%+v; want %q and remedy %q", f, x.text, x.remedy)
			}
		})
	}
}

// TestOtherPortFails: an error of a port that a node would not use is not a failure.
func TestOtherPortFails(t *testing.T) {
	m, _, n := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_INTERFACE=eth1")
	n.Fail(fakeverbs.FailNth(fakeverbs.OpConnect, 1, syscall.EINVAL))
	r := examine(t, m)
	if f := find(t, r, "rdma loopback fake0/1"); f.Status != Warn || !r.Healthy {
		t.Errorf("%+v, healthy %v; want a warning", f, r.Healthy)
	}
}

// TestLoopbackHeld: the wait for a write that never arrives ends with the time limit.
func TestLoopbackHeld(t *testing.T) {
	_, _, n := equipped(t)
	stack := n.Stack(fakeAddrs[0])
	n.Hold()
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() { // the time is up when a write is held
		for tick := time.Tick(time.Millisecond); len(n.Pending()) == 0 && t.Context().Err() == nil; <-tick {
		}
		cancel(context.DeadlineExceeded)
	}()
	_, err := loopback(ctx, stack, fakeAddrs[0], 10)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "a write does not arrive") {
		t.Errorf("%v, want a deadline", err)
	}
	if r := remedyFor(err); !strings.Contains(r, "4791") {
		t.Errorf("remedy %q does not speak of the firewall", r)
	}
}

// TestOtherDevice: an address whose connections use another device is detected.
func TestOtherDevice(t *testing.T) {
	m, _, n := equipped(t)
	port(n, 0, func(p *verbs.PortInfo) { p.GIDs[1].Addr = fakeAddrs[1] })
	f := find(t, examine(t, m), "rdma loopback fake0/1")
	if f.Status != Warn || !strings.Contains(f.Text, "10.1.1.1 belongs to fake0, but connections from there use fake1") {
		t.Errorf("%+v", f)
	}
}

// TestMemlock: the limit matters only for processes to which it applies.
func TestMemlock(t *testing.T) {
	for _, x := range []struct {
		limit  uint64
		caps   string
		err    error
		status Status
		text   string
	}{
		{math.MaxUint64, "0", nil, OK, "no limit"},
		{65536, "0000000000004000", nil, OK, "CAP_IPC_LOCK"},
		{65536, "0000000000002000", nil, Warn, "the limit is 64.0 KiB, and a node with one peer registers 1.5 MiB"},
		{65536, "nonsense", nil, Warn, "64.0 KiB"},
		{1 << 30, "0", nil, Warn, "beyond it cannot be registered"},
		{limits.LeastLocked, "0", nil, Warn, "beyond it cannot be registered"},
		{0, "0", syscall.EINVAL, Warn, "invalid argument"},
	} {
		m, root, _ := equipped(t)
		root.file("proc/self/status", "CapEff:\t"+x.caps)
		m.Limits.Memlock = func() (uint64, error) { return x.limit, x.err }
		if f := find(t, examine(t, m), "locked memory"); f.Status != x.status || !strings.Contains(f.Text, x.text) {
			t.Errorf("%d with %s: %+v; want %s, %q", x.limit, x.caps, f, x.status, x.text)
		}
	}
}

// TestMemlockOfTheNode: a limit of locked memory with which the node starts is no failure.
func TestMemlockOfTheNode(t *testing.T) {
	for limit, want := range map[uint64]Status{2 << 20: Warn, 1 << 20: Fail} {
		m, root, _ := equipped(t, "DMLC_ENABLE_RDMA=ibverbs", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_ROLE=worker")
		root.file("proc/self/status", "CapEff:\t0")
		m.Limits.Memlock = func() (uint64, error) { return limit, nil }
		node := OK
		for _, f := range examine(t, m).Findings {
			switch f.Name {
			case "locked memory":
				if f.Status != want {
					t.Errorf("%d bytes: %+v, want %s", limit, f, want)
				}
			case "limits":
				node = f.Status
			}
		}
		if starts := want != Fail; starts != (node == OK) {
			t.Errorf("%d bytes: the limits of the node are %s", limit, node)
		}
	}
}

// TestThreads: a limit of threads fails as it does for a node. A tight limit is a warning, also if the size of the
// cluster is not known.
func TestThreads(t *testing.T) {
	for _, environ := range [][]string{nil, {"DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_ROLE=worker"}} {
		for _, x := range []struct {
			most   uint64
			status Status
			text   string
		}{{1000, OK, "open files"}, {17, Fail, "too few threads for a "}, {20, Warn, "few threads for a "}} {
			m, _ := plain(environ...)
			m.Limits.Threads = func() []limits.Room {
				return []limits.Room{{Name: "RLIMIT_NPROC", Used: 10, Max: x.most, Raise: "ulimit -u"}}
			}
			f := find(t, examine(t, m), "limits")
			if f.Status != x.status || !strings.Contains(f.Text, x.text) || x.status != OK && f.Remedy != "ulimit -u" {
				t.Errorf("%q, %d threads: %+v; want %s, %q", environ, x.most, f, x.status, x.text)
			}
		}
	}
}

// TestTimeout: a check that hangs is left running, and later checks are not made.
func TestTimeout(t *testing.T) {
	m, _ := plain("DMLC_ENABLE_RDMA=ibverbs")
	hang := make(chan struct{})
	defer close(hang)
	ctx, cancel := context.WithCancelCause(t.Context())
	m.Verbs = func() (verbs.Stack, error) {
		cancel(context.DeadlineExceeded) // the time is up, however long the checks before have taken
		<-hang
		return nil, verbs.ErrUnavailable
	}
	r, err := Run(ctx, m, func(Finding) {})
	if err != nil || r.Healthy {
		t.Errorf("healthy %v, %v", r.Healthy, err)
	}
	if f := find(t, r, "rdma libraries"); f.Status != Fail || f.Text != "does not end: the time is up" {
		t.Errorf("%+v", f)
	}
	if f := find(t, r, "rdma devices"); f.Status != Fail || f.Text != "not checked: the time is up; nor rdma port, locked memory, rdma address, rdma loopback, gpu, gpu pairs, same host, exposed" {
		t.Errorf("%+v", f)
	}
}

// TestInterrupted: the cause of the context's end is the error.
func TestInterrupted(t *testing.T) {
	m, _ := plain()
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	m.ZMQ = func(van.Options) (van.Van, error) { cancel(why); return nil, why }
	r, err := Run(ctx, m, func(Finding) {})
	if !errors.Is(err, why) {
		t.Errorf("%v, want %v", err, why)
	}
	if f := find(t, r, "rdma build"); f.Status != Warn || !strings.HasPrefix(f.Text, "not checked: enough; nor rdma libraries,") {
		t.Errorf("%+v", f)
	}
}

// TestThisMachine: doctor runs on the real machine.
func TestThisMachine(t *testing.T) {
	m := Host("test", nil)
	m.Env = env.FromList(nil)
	r := examine(t, m)
	if f := find(t, r, "zmq loopback"); f.Status != OK {
		t.Errorf("%+v", f)
	}
	if f := find(t, r, "system"); f.Status == Fail || !strings.Contains(f.Text, "Linux") {
		t.Errorf("%+v", f)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1 << 20: "1.0 MiB", 3 << 29: "1.5 GiB", math.MaxUint64: "16.0 EiB"} {
		if got := size(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

// TestLimits: a limit that a node of the configured cluster would exceed is a failed check.
func TestLimits(t *testing.T) {
	shape := func(more ...string) []string {
		return append([]string{"DMLC_NUM_WORKER=300", "DMLC_NUM_SERVER=500", "DMLC_PS_ROOT_URI=10.1.0.1", "DMLC_PS_ROOT_PORT=9000"}, more...)
	}
	for _, x := range []struct {
		name    string
		environ []string
		status  Status
		text    string
	}{
		{"no cluster", nil, OK, "4096 open files, enough for 585 peers"},
		{"no cluster, no shared memory", []string{"BYTEPS_ENABLE_IPC=0"}, OK, "4096 open files, enough for 585 peers"},
		{"server, shared memory", shape("DMLC_ROLE=server"), Warn, "it needs 2145 at least and may need 4245 (7 for the scheduler, 7 for shared memory with each of 300 peers, 30 of its own"},
		{"server", shape("DMLC_ROLE=server", "BYTEPS_ENABLE_IPC=0"), OK, "enough for a node of this cluster"},
		{"worker", shape("DMLC_ROLE=worker", "BYTEPS_ENABLE_IPC=0"), Warn, "few open files for a worker: RLIMIT_NOFILE is 4096, and it needs 1043 at least and may need 4543 (7 for the scheduler"},
		{"any", shape(), Fail, "too few open files for a scheduler"},
		{"sockets", shape("DMLC_ROLE=server", "BYTEPS_ENABLE_IPC=0", "BYTEPS_ZMQ_MAX_SOCKET=300"), Warn, "BYTEPS_ZMQ_MAX_SOCKET is 300, and it needs 2 at least and may need 302"},
	} {
		m, _ := plain(x.environ...)
		if f := find(t, examine(t, m), "limits"); f.Status != x.status || !strings.Contains(f.Text, x.text) || f.Status == Fail && f.Remedy == "" {
			t.Errorf("%s: %+v; want %s, %q", x.name, f, x.status, x.text)
		}
	}
}
