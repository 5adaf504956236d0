package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// rdmaExam has the checks of RDMA, from the lowest layer upwards. If a layer is missing, its check reports that, and
// the checks of higher layers report nothing.
type rdmaExam struct {
	*subject
	stack      verbs.Stack // nil until loaded
	interfaces []choose.Interface
	found      []verbs.DeviceInfo // the devices that the verbs library lists
	chosen     *choose.Result     // nil if a node could not choose
}

func (x *rdmaExam) build(context.Context) []Finding {
	switch {
	case x.m.Verbs == nil:
		return []Finding{{Status: x.orFail(Skip), Text: "this stepaf was built without RDMA",
			Remedy: "build it on Linux with cgo and without the tag nordma" + x.useZMQ()}}
	case x.needRDMA && !slices.Contains(x.m.Transports, ibverbs):
		return []Finding{{Status: Fail, Text: "this stepaf has no transport ibverbs, only " + strings.Join(x.m.Transports, ", "),
			Remedy: "use DMLC_ENABLE_RDMA=zmq on all nodes"}}
	}
	return []Finding{{Text: "built in; libraries are opened at run time"}}
}

func (x *rdmaExam) libraries(context.Context) []Finding {
	if x.m.Verbs == nil {
		return nil
	}
	stack, err := x.m.Verbs()
	if err != nil {
		status := x.orFail(Skip)
		if len(x.sysDevices()) > 0 {
			status = x.orFail(Warn)
		}
		return []Finding{{Status: status, Text: err.Error(),
			Remedy: "install libibverbs, its providers and librdmacm (Debian: libibverbs1 ibverbs-providers librdmacm1; Red Hat: libibverbs librdmacm)" + x.useZMQ()}}
	}
	x.stack = stack
	libs := x.mapped("libibverbs.so", "librdmacm.so", "libmlx5.so")
	f := Finding{Text: "loaded", Details: x.mapped("-rdmav"), Data: map[string]any{"paths": libs}}
	if len(libs) > 0 {
		f.Text = strings.Join(libs, ", ")
	}
	return []Finding{f}
}

// mapped lists the mapped files of this process whose names contain one of the parts.
func (x *rdmaExam) mapped(parts ...string) []string {
	var list []string
	for line := range strings.SplitSeq(x.text("proc/self/maps"), "\n") {
		i := strings.IndexByte(line, '/')
		if i < 0 {
			continue
		}
		file := line[i:]
		if slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(path.Base(file), p) }) && !slices.Contains(list, file) {
			list = append(list, file)
		}
	}
	return list
}

// sysDevices lists the RDMA devices of the kernel.
func (x *rdmaExam) sysDevices() []string { return x.names("sys/class/infiniband") }

// modules are the kernel modules that RDMA from user space needs, or that explain a problem.
var modules = []string{"ib_core", "ib_uverbs", "rdma_ucm", "mlx5_ib", "bnxt_re", "irdma", "efa", "hns_roce", "rdma_rxe", "siw", "nvidia_peermem"}

// devices checks the kernel's devices, and the files through which a process uses them.
func (x *rdmaExam) devices(context.Context) []Finding {
	if x.m.Verbs == nil {
		return nil
	}
	devices := x.sysDevices()
	if len(devices) == 0 {
		return []Finding{{Status: x.orFail(Skip), Text: "none: /sys/class/infiniband is empty",
			Remedy: "load the NIC's driver (modprobe mlx5_ib), or make a Soft-RoCE device (rdma link add rxe0 type rxe netdev eth0)" + x.useZMQ()}}
	}
	ofDevice := map[string]string{}
	for _, u := range x.names("sys/class/infiniband_verbs") {
		if d := x.line("sys/class/infiniband_verbs/" + u + "/ibdev"); d != "" {
			ofDevice[d] = "/dev/infiniband/" + u
		}
	}
	var good []string
	found := x.deviceFile("/dev/infiniband/rdma_cm", &good, nil)
	cm, first := len(good), len(found)
	for _, d := range devices {
		if file := ofDevice[d]; file != "" {
			found = x.deviceFile(file, &good, found)
		} else {
			found = append(found, Finding{Status: x.orFail(Warn), Text: d + " has no /dev/infiniband/uverbs file", Remedy: "modprobe ib_uverbs"})
		}
	}
	if len(good) > cm { // one device is enough
		for i := range found[first:] {
			found[first+i].Status = Warn
		}
	}
	var loaded []string
	for _, m := range modules {
		if _, err := fs.Stat(x.m.Root, "sys/module/"+m); err == nil {
			loaded = append(loaded, m)
		}
	}
	f := Finding{Text: strings.Join(devices, ", "), Details: []string{"modules: " + cmp.Or(strings.Join(loaded, ", "), "none known")},
		Data: map[string]any{"devices": devices, "files": good, "modules": loaded}}
	if len(good) > 0 {
		f.Text += "; can open " + strings.Join(good, ", ")
	}
	return append([]Finding{f}, found...)
}

// deviceFile opens a file. It adds the file to good, or a finding to found.
func (x *rdmaExam) deviceFile(file string, good *[]string, found []Finding) []Finding {
	err := x.m.Open(file)
	if err == nil {
		*good = append(*good, file)
		return found
	}
	f := Finding{Status: x.orFail(Warn), Text: err.Error(), Remedy: "see dmesg: the driver refuses to open " + file}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Text, f.Remedy = file+" is missing", "modprobe ib_uverbs rdma_ucm; give a container --device=/dev/infiniband and the host's network"
	case errors.Is(err, fs.ErrPermission):
		f.Remedy = "chmod 666 " + file + " (udev: MODE=\"0666\"), or give a container --device=" + file
	}
	return append(found, f)
}

// portData are the properties of a port, for programs.
type portData struct {
	Device    string    `json:"device"`
	Firmware  string    `json:"firmware"`
	Port      int       `json:"port"`
	Active    bool      `json:"active"`
	State     string    `json:"state"`
	LinkLayer string    `json:"link_layer"`
	MTU       int       `json:"mtu"`
	Rate      float64   `json:"gbit_per_s"`
	GIDs      []gidData `json:"gids"`
}

type gidData struct {
	Index int        `json:"index"`
	Addr  netip.Addr `json:"addr"`
	Type  string     `json:"type"`
	Iface string     `json:"interface,omitempty"`
}

// ports describes each port that the verbs library lists.
func (x *rdmaExam) ports(context.Context) []Finding {
	if x.stack == nil || len(x.sysDevices()) == 0 {
		return nil
	}
	devices, err := x.stack.Devices()
	x.found = devices
	var found []Finding
	if err != nil { // of all devices, or of some
		f := Finding{Status: x.orFail(Warn), Text: "not every device can be queried: " + err.Error(), Remedy: "see the files above, ibv_devinfo -v, and dmesg"}
		if len(devices) > 0 {
			f.Status = Warn
		}
		found = append(found, f)
	} else if len(devices) == 0 {
		return []Finding{{Status: x.orFail(Warn), Text: "the kernel has devices, but libibverbs finds none",
			Remedy: "install the provider of the device (Debian: ibverbs-providers), and see that /dev/infiniband can be opened"}}
	}
	for _, d := range devices {
		for _, p := range d.Ports {
			found = append(found, x.port(d, p))
		}
	}
	return found
}

// fastLink is the rate in Gb/s from which a small MTU costs bandwidth.
const fastLink = 100

func (x *rdmaExam) port(d verbs.DeviceInfo, p verbs.PortInfo) Finding {
	f := Finding{Name: fmt.Sprintf("rdma port %s/%d", d.Name, p.Num)}
	data := portData{d.Name, d.Firmware, p.Num, p.Active, p.State, p.LinkLayer, p.MTU, p.Rate, nil}
	parts := []string{p.State, p.LinkLayer, strconv.FormatFloat(p.Rate, 'f', -1, 64) + " Gb/s", fmt.Sprintf("MTU %d", p.MTU), "firmware " + cmp.Or(d.Firmware, "unknown")}
	v4, iface := "", "its interface"
	for _, g := range p.GIDs {
		data.GIDs = append(data.GIDs, gidData(g))
		line := fmt.Sprintf("GID %d: %s, %s", g.Index, g.Addr, g.Type)
		if g.Iface != "" {
			line += ", " + g.Iface
			iface = g.Iface
		}
		f.Details = append(f.Details, line)
		if g.Addr.Unmap().Is4() && (v4 == "" || g.Type == "RoCE v2") {
			v4 = fmt.Sprintf("%s %s (GID %d, %s)", cmp.Or(g.Iface, "interface unknown"), g.Addr.Unmap(), g.Index, g.Type)
		}
	}
	if v4 != "" {
		parts = append(parts, v4)
	}
	f.Details = append(f.Details, fmt.Sprintf("at most %d queue pairs, %d completions in a queue, %d regions, %d requests in a queue, %s in a message",
		d.MaxQP, d.MaxCQE, d.MaxMR, d.MaxWR, size(uint64(p.MaxMsg))))
	f.Text, f.Data = strings.Join(parts, ", "), data
	ethernet := p.LinkLayer == "Ethernet"
	switch {
	case !p.Active && ethernet:
		f.Status, f.Remedy = Warn, "set "+iface+" up (ip link set ... up), and see the cable and the switch"
	case !p.Active:
		f.Status, f.Remedy = Warn, "see the cable, and that a subnet manager runs in the InfiniBand network"
	case ethernet && v4 == "":
		f.Status, f.Remedy, f.Text = Warn, "give "+iface+" an IPv4 address (ip addr add ...)", f.Text+", no IPv4 address"
	case ethernet && p.Rate >= fastLink && p.MTU < 4096:
		f.Status, f.Remedy = Warn, "for full speed give "+iface+" and the switch an MTU of 9000, which makes that of RDMA 4096"
	}
	return f
}

// lockedMemory compares the limit of locked memory with the need of a node with one peer. The finding "limits" compares it with the need
// in the configured cluster.
func (x *rdmaExam) lockedMemory(context.Context) []Finding {
	if x.stack == nil || len(x.sysDevices()) == 0 {
		return nil
	}
	var f Finding
	limit, err := x.m.Limits.Memlock()
	const remedy = "ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
	switch {
	case err != nil:
		f.Status, f.Text, f.Remedy = Warn, err.Error(), remedy
	case limit == math.MaxUint64:
		f.Text = "no limit"
	case x.capable(capIPCLock):
		f.Text = "the limit of " + size(limit) + " does not apply: this process has CAP_IPC_LOCK"
	case limit < limits.LeastLocked:
		f.Status, f.Text, f.Remedy = x.orFail(Warn), fmt.Sprintf("the limit is %s, and a node with one peer registers %s besides its tensors", size(limit), size(limits.LeastLocked)), remedy
	default:
		f.Status, f.Text, f.Remedy = Warn, "the limit is "+size(limit)+": tensors and buffers beyond it cannot be registered", remedy
	}
	if err == nil && limit != math.MaxUint64 {
		f.Data = map[string]any{"limit_bytes": limit}
	}
	return []Finding{f}
}

// address returns the finding about the address, device, port and GID that a node would use.
func (x *rdmaExam) address(ctx context.Context) []Finding {
	if len(x.found) == 0 {
		return nil
	}
	var f Finding
	r, err := x.choose(ctx)
	if err != nil {
		f.Status, f.Text, f.Remedy = x.orFail(Warn), err.Error(), "set DMLC_INTERFACE to auto or to an interface with RDMA, or DMLC_NODE_HOST to its address"+x.useZMQ()
		switch {
		case x.cfg.Role == scheduler:
			f.Remedy = "DMLC_PS_ROOT_URI must be an address of an RDMA port of the scheduler's host" + x.useZMQ()
		case errors.Is(err, choose.ErrPortDown):
			f.Remedy = "see the port above" + x.useZMQ()
		}
		return []Finding{f}
	}
	x.chosen = &r
	f.Text = r.String()
	f.Data = map[string]any{"host": r.Host, "interface": r.Iface, "device": r.Device, "port": r.Port, "gid_index": r.GIDIndex, "gid_type": r.GIDType, "why": r.Why}
	return []Finding{f}
}

const scheduler = "scheduler"

func (x *rdmaExam) choose(ctx context.Context) (choose.Result, error) {
	var err error
	if x.interfaces, err = x.m.Interfaces(); err != nil {
		return choose.Result{}, fmt.Errorf("interfaces: %w", err)
	}
	q := choose.Request{Interface: x.cfg.Interface}
	if x.cfg.Backend != "CPU" {
		visible, set := x.m.Env.Lookup("CUDA_VISIBLE_DEVICES")
		q.GPU = choose.GPUAddress(x.m.Root, x.cfg.GPU, visible, set)
	}
	setting, host := "DMLC_NODE_HOST", x.cfg.NodeHost
	if x.cfg.Role == scheduler {
		setting, host = "DMLC_PS_ROOT_URI", x.cfg.RootURI
		q.Interface = ""
	}
	if host != "" {
		if q.Host, err = x.m.Resolve(ctx, host); err != nil {
			return choose.Result{}, fmt.Errorf("%s=%q: %w", setting, host, err)
		}
	}
	r, err := choose.Choose(choose.Machine{Devices: x.found, Interfaces: x.interfaces, Root: x.m.Root}, q)
	if x.cfg.Role == scheduler {
		r.Why = setting
		if e, ok := errors.AsType[*choose.Error](err); ok {
			e.Setting = setting
		}
	}
	return r, err
}

// addresses returns one IPv4 address for each active port.
func (x *rdmaExam) addresses() []choose.Result {
	var list []choose.Result
	for _, d := range x.found {
		for _, p := range d.Ports {
			if !p.Active {
				continue
			}
			d.Ports = []verbs.PortInfo{p}
			m := choose.Machine{Devices: []verbs.DeviceInfo{d}, Interfaces: x.interfaces, Root: x.m.Root}
			r, err := choose.Choose(m, choose.Request{})
			if err != nil {
				r = choose.Result{Device: d.Name, Port: p.Num}
			}
			list = append(list, r)
		}
	}
	return list
}

// loopback connects each active port with itself. Only a failure of the port that a node would use is a failure of the
// check.
func (x *rdmaExam) loopback(ctx context.Context) []Finding {
	var found []Finding
	for _, at := range x.addresses() {
		f := Finding{Name: fmt.Sprintf("rdma loopback %s/%d", at.Device, at.Port)}
		if at.Host == (netip.Addr{}) {
			f.Status, f.Text, f.Remedy = Skip, "the port has no IPv4 address of this host", "give its interface one (ip addr add ...)"
			found = append(found, f)
			continue
		}
		bad := Warn
		if x.chosen != nil && x.chosen.Device == at.Device && x.chosen.Port == at.Port {
			bad = x.orFail(Warn)
		}
		ctx, cancel := context.WithTimeout(ctx, portTime)
		trips, err := loopback(ctx, x.stack, at.Host, loopbackRounds)
		cancel()
		switch {
		case err != nil:
			f.Status, f.Text, f.Remedy = bad, fmt.Sprintf("%s: %v", at.Host, err), remedyFor(err)
		case trips.device != at.Device:
			f.Status, f.Text = bad, fmt.Sprintf("%s belongs to %s, but connections from there use %s", at.Host, at.Device, trips.device)
			f.Remedy = "see that every RDMA interface has a network of its own, or policy routes (ip route get " + at.Host.String() + ")"
		default:
			f.Text = fmt.Sprintf("%s: round trip of a write with immediate %s (p50 of %d, p99 %s)", at.Host, round(trips.p50), trips.rounds, round(trips.p99))
			f.Data = map[string]any{"p50_ns": trips.p50.Nanoseconds(), "p99_ns": trips.p99.Nanoseconds(), "rounds": trips.rounds}
		}
		found = append(found, f)
	}
	return found
}
