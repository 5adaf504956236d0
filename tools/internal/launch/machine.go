package launch

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	_ "github.com/stepaf/stepaf-go/van/stack" // the transports of this build
)

// Address is an IPv4 address of this machine.
type Address struct {
	Interface, IP string
	Loopback, Up  bool
}

// Machine is the hardware and network that a plan may use. Detect fills it in; tests fill it in by hand.
type Machine struct {
	Addresses []Address
	GPUs      int  // CUDA devices that may be used
	GPUBuild  bool // this build has a GPU backend
	RDMA      bool // there is an RDMA device
	RDMABuild bool // this build has the ibverbs transport
	Cores     int  // of the machine

	// Toward returns the address of this machine from which packets to a host leave, or the zero Address if there is
	// none.
	Toward func(host string) Address
	// Free returns the reason why a node cannot listen at a port of an address of this machine, or nil.
	Free func(host string, port int) error
}

// Detect describes this machine.
func Detect(lookup func(string) (string, bool), cores int) *Machine {
	devices, _ := os.ReadDir("/sys/class/infiniband") // without the directory there are no devices
	m := &Machine{
		GPUs:      countGPUs(lookup),
		GPUBuild:  slices.Contains(backend.Names(), "GPU"),
		RDMA:      len(devices) > 0,
		RDMABuild: slices.Contains(van.Transports(), "ibverbs"),
		Cores:     cores,
		Free:      free,
	}
	here := hostaddr.This() // without interfaces the machine has no addresses
	for _, i := range here.Interfaces {
		for _, a := range i.Addrs {
			if a.Is4() {
				m.Addresses = append(m.Addresses, Address{Interface: i.Name, IP: a.String(), Loopback: i.Loopback, Up: i.Up})
			}
		}
	}
	m.Toward = func(host string) Address { return m.toward(here, host) }
	return m
}

// lookupTime limits the resolution of a scheduler's name.
const lookupTime = 5 * time.Second

// toward returns the address of this machine from which packets to host leave. here describes this machine.
func (m *Machine) toward(here hostaddr.Host, host string) Address {
	ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
	defer cancel()
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", host)
	if err != nil || len(all) == 0 {
		return Address{}
	}
	addr, _, ok := here.Toward(all[0].Unmap())
	if !ok {
		return Address{}
	}
	return m.first(func(a Address) bool { return a.IP == addr.String() })
}

func countGPUs(lookup func(string) (string, bool)) int {
	devices, _ := filepath.Glob("/dev/nvidia[0-9]*") // the only error is a wrong pattern
	n := len(devices)
	if v, ok := lookup("CUDA_VISIBLE_DEVICES"); ok {
		visible := 0
		for f := range strings.SplitSeq(v, ",") {
			if f = strings.TrimSpace(f); f != "" && f != "-1" {
				visible++
			}
		}
		n = min(n, visible)
	}
	return n
}

// free listens at the port and closes the listener. Nothing connects in between, so the port can be used at once.
func free(host string, port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	return l.Close()
}

// on returns the address of an interface with exactly this name, the zero Address if there is none.
func (m *Machine) on(name string) Address {
	return m.first(func(a Address) bool { return a.Interface == name })
}

func (m *Machine) loopback() Address {
	return cmp.Or(m.first(func(a Address) bool { return a.Loopback }), Address{Interface: "lo", IP: "127.0.0.1", Loopback: true})
}

// outer returns the first address that other machines may reach, or the zero Address. Link-local addresses and
// addresses of container bridges come last.
func (m *Machine) outer() Address {
	inner := func(a Address) bool {
		ip, err := netip.ParseAddr(a.IP)
		return err == nil && hostaddr.Inner(a.Interface, ip)
	}
	return cmp.Or(m.first(func(a Address) bool { return !a.Loopback && a.Up && !inner(a) }), m.first(func(a Address) bool { return !a.Loopback && a.Up }))
}

// first returns the first address that fits, or the zero Address.
func (m *Machine) first(fits func(Address) bool) Address {
	if i := slices.IndexFunc(m.Addresses, fits); i >= 0 {
		return m.Addresses[i]
	}
	return Address{}
}

// list returns the names of the interfaces, for an error.
func (m *Machine) list() string {
	var l []string
	for _, a := range m.Addresses {
		l = append(l, a.Interface+" ("+a.IP+")")
	}
	if l == nil {
		return "none with an IPv4 address"
	}
	return strings.Join(l, ", ")
}

// noGPU returns the reason why no GPU can be used, or "".
func (m *Machine) noGPU() string {
	switch {
	case m.GPUs == 0:
		return "no CUDA device"
	case !m.GPUBuild:
		return "no GPU support in this build"
	}
	return ""
}

func (m *Machine) noRDMA() string {
	switch {
	case !m.RDMA:
		return "no RDMA device"
	case !m.RDMABuild:
		return "no RDMA transport in this build"
	}
	return ""
}
