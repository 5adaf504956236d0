// Package choose decides which address of this host a node uses, and with it the RDMA device, port and GID, and says why. It uses only its
// input: the devices, the network interfaces, and sysfs for the topology of devices.
package choose

import (
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Request holds the settings of a node.
type Request struct {
	// Interface is DMLC_INTERFACE: the name of a network interface or a unique prefix of one, "auto" in upper or lower case, or "".
	Interface string
	// Host is DMLC_NODE_HOST as an IPv4 address, invalid if the variable is not set.
	Host netip.Addr
	// GPU is the PCI address of the node's GPU, as the kernel or NVIDIA writes it, or "" if there is none or it is not known. See GPUAddress.
	GPU string
	// Toward is the local address of the route to the scheduler, invalid if it is not known.
	Toward netip.Addr
}

// Machine describes the hardware to choose from.
type Machine struct {
	Devices    []verbs.DeviceInfo
	Interfaces []Interface
	// Root is the root of the file system; sys and proc are read. It should implement fs.ReadLinkFS, as os.DirFS does. If it is nil,
	// nothing is known of the topology.
	Root fs.FS
}

// Interface is a network interface of this host.
type Interface = hostaddr.Interface

// Result is the chosen address.
type Result struct {
	Host     netip.Addr
	Iface    string // "" if not known
	Device   string
	Port     int // from 1
	GIDIndex int
	GIDType  string   // "RoCE v2", "RoCE v1", "IB"
	Why      string   // which setting or rule decided
	Others   []string // the other ports, with the reason if they cannot be used
}

// String describes the choice, its reason and the alternatives in one line.
func (r Result) String() string {
	on := ""
	if r.Iface != "" {
		on = " on " + r.Iface
	}
	s := fmt.Sprintf("%s%s, %s port %d, GID %d (%s): %s", r.Host, on, r.Device, r.Port, r.GIDIndex, r.GIDType, r.Why)
	if len(r.Others) > 0 {
		s += "; not taken: " + strings.Join(r.Others, ", ")
	}
	return s
}

// Choose chooses an address by the first of these rules that applies:
//
//   - Interface is auto: the usable port nearest to the GPU in the PCI topology. Equally near ones are ordered by the device's name. If
//     the GPU is not known, the first usable port. If no port is usable, Host applies.
//   - Host is set: that address, on whichever device has it.
//   - Interface is set: the IPv4 address of that interface.
//   - Neither is set: the usable port whose address leads to the scheduler, else the first usable port.
//
// A port is usable if it is active and has an IPv4 address of this host: as a GID (RoCE, version 2 before 1), or on an IP-over-InfiniBand
// interface. Errors are of type *Error and wrap ErrNoDevice, ErrPortDown, ErrNoAddress or ErrNoInterface.
func Choose(m Machine, r Request) (Result, error) {
	l := m.survey()
	switch {
	case strings.EqualFold(r.Interface, "auto"):
		res, err := l.nearest(r.GPU)
		if err != nil && r.Host.IsValid() {
			if res, herr := l.host(r.Host); herr == nil {
				res.Why += ", because DMLC_INTERFACE=auto found nothing"
				return res, nil
			}
		}
		return res, err
	case r.Host.IsValid():
		return l.host(r.Host.Unmap())
	case r.Interface != "":
		return l.named(r.Interface)
	}
	if len(l.usable) == 0 {
		return Result{}, l.noPort("", "")
	}
	if i := slices.IndexFunc(l.usable, func(e *endpoint) bool { return e.addr == r.Toward }); i >= 0 {
		return l.result(l.usable[i], "its address leads to DMLC_PS_ROOT_URI", nil), nil
	}
	why := "first active RDMA port"
	if len(l.usable) > 1 {
		why += "; DMLC_INTERFACE=auto would take the one nearest to the GPU"
	}
	return l.result(l.usable[0], why, nil), nil
}

// nearest chooses by distance to the GPU.
func (l *survey) nearest(gpu string) (Result, error) {
	const setting = "DMLC_INTERFACE=auto: "
	if len(l.usable) == 0 {
		return Result{}, l.noPort("DMLC_INTERFACE", "auto")
	}
	first := func(why string) (Result, error) {
		return l.result(l.usable[0], setting+"first active RDMA port, "+why, nil), nil
	}
	if gpu == "" {
		return first("because the GPU's place is not known")
	}
	at := l.locate(gpu)
	if at.path == nil {
		return first("because GPU " + gpu + " is not in /sys")
	}
	near := func(e *endpoint) distance { return distanceBetween(at, e.location) }
	ends := slices.Clone(l.usable)
	slices.SortStableFunc(ends, func(a, b *endpoint) int { return near(a).compare(near(b)) })
	best := near(ends[0])
	why := fmt.Sprintf("%snearest to GPU %s (%s)", setting, at.path[len(at.path)-1], best)
	equal := 0
	for _, e := range ends {
		if near(e).compare(best) == 0 && e.device != ends[0].device {
			equal++
		}
	}
	if equal > 0 {
		why += ", the first of several"
	}
	return l.result(ends[0], why, near), nil
}

// host finds the device with an address.
func (l *survey) host(addr netip.Addr) (Result, error) {
	const setting = "DMLC_NODE_HOST"
	fail := func(err error, problem string) (Result, error) {
		return Result{}, &Error{setting, addr.String(), problem, l.inventory(), err}
	}
	if !addr.Is4() {
		return fail(ErrNoAddress, "want an IPv4 address")
	}
	if e := l.endpointWith(addr, ""); e != nil {
		if !e.port.Active {
			return fail(ErrPortDown, fmt.Sprintf("%s is %s", e, e.port.State))
		}
		return l.result(e, setting, nil), nil
	}
	problem := "no RDMA port has this address"
	if addr.IsLoopback() {
		problem = "RDMA does not work over the loopback interface"
	}
	return fail(ErrNoDevice, problem)
}

// named finds the device of an interface.
func (l *survey) named(name string) (Result, error) {
	const setting = "DMLC_INTERFACE"
	fail := func(err error, format string, args ...any) (Result, error) {
		return Result{}, &Error{setting, name, fmt.Sprintf(format, args...), l.inventory(), err}
	}
	var match []Interface
	for _, i := range l.m.Interfaces {
		if i.Name == name {
			match = []Interface{i}
			break
		}
		if strings.HasPrefix(i.Name, name) {
			match = append(match, i)
		}
	}
	switch len(match) {
	case 0:
		return fail(ErrNoInterface, "no such interface")
	case 1:
	default:
		return fail(ErrNoInterface, "%d interfaces begin so", len(match))
	}
	i := match[0]
	var found *endpoint
	v4 := 0
	for _, a := range i.Addrs {
		if !a.Is4() {
			continue
		}
		v4++
		// Take the first address on an active port, else the first one on any port.
		if e := l.endpointWith(a, i.Name); e != nil && (found == nil || !found.port.Active && e.port.Active) {
			found = e
		}
	}
	switch {
	case found != nil && !found.port.Active:
		return fail(ErrPortDown, "%s is %s", found, found.port.State)
	case found != nil:
		return l.result(found, setting+"="+name, nil), nil
	case v4 == 0:
		return fail(ErrNoAddress, "%s has no IPv4 address", i.Name)
	}
	return fail(ErrNoDevice, "%s is not on an RDMA port", i.Name)
}

// endpointWith returns the endpoint with an address, preferably an active one, and one whose interface is known to be iface.
func (l *survey) endpointWith(addr netip.Addr, iface string) *endpoint {
	var best *endpoint
	score := func(e *endpoint) int {
		n := 0
		if e.port.Active {
			n = 2
		}
		if iface != "" && e.iface == iface {
			n++
		}
		return n
	}
	for _, e := range l.endpoints {
		if e.addr == addr && (best == nil || score(e) > score(best)) {
			best = e
		}
	}
	return best
}

// result describes the choice of e. If near is not nil, it gives the distance of the alternatives.
func (l *survey) result(e *endpoint, why string, near func(*endpoint) distance) Result {
	r := Result{Host: e.addr, Iface: e.iface, Device: e.device, Port: e.port.Num, GIDIndex: e.gid.Index, GIDType: e.gid.Type, Why: why}
	for _, o := range l.usable {
		switch {
		case o == e:
		case near != nil:
			r.Others = append(r.Others, fmt.Sprintf("%s %s (%s)", o, o.addr, near(o)))
		default:
			r.Others = append(r.Others, fmt.Sprintf("%s %s", o, o.addr))
		}
	}
	for _, u := range l.unusable {
		r.Others = append(r.Others, u.name+" ("+u.why+")")
	}
	return r
}

// noPort returns the error for a machine without a usable port.
func (l *survey) noPort(setting, value string) error {
	if len(l.m.Devices) == 0 {
		return &Error{setting, value, "no RDMA device; " + verbs.DeviceRemedy, l.inventory(), ErrNoDevice}
	}
	err := ErrNoAddress
	if !slices.ContainsFunc(l.m.Devices, func(d verbs.DeviceInfo) bool {
		return slices.ContainsFunc(d.Ports, func(p verbs.PortInfo) bool { return p.Active })
	}) {
		err = ErrPortDown
	}
	return &Error{setting, value, "no usable RDMA port", l.inventory(), err}
}
