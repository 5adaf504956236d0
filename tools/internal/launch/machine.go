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
	"unicode"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	_ "github.com/stepaf/stepaf-go/van/stack" // the transports of this build
)

// Address is an IPv4 address of this machine.
type Address struct{ Interface, IP string }

// Machine is the hardware and network that a plan may use. Detect fills it in; tests fill it in by hand.
type Machine struct {
	hostaddr.Host
	GPUs      int  // CUDA devices that may be used
	GPUBuild  bool // this build has a GPU backend
	RDMA      bool // there is an RDMA device
	RDMABuild bool // this build has the ibverbs transport
	Cores     int  // of the machine

	// Resolve returns the IPv4 address of a host name, and any address unmapped.
	Resolve func(ctx context.Context, host string) (netip.Addr, error)
	// Free returns the reason why a node cannot listen at a port of an address of this machine, or nil.
	Free func(host string, port int) error
}

// Detect describes this machine.
func Detect(lookup func(string) (string, bool), cores int) *Machine {
	devices, _ := os.ReadDir("/sys/class/infiniband") // without the directory there are no devices
	return &Machine{
		Host:      hostaddr.This(),
		GPUs:      countGPUs(lookup),
		GPUBuild:  slices.Contains(backend.Names(), "GPU"),
		RDMA:      len(devices) > 0,
		RDMABuild: slices.Contains(van.Transports(), "ibverbs"),
		Cores:     cores,
		Resolve:   func(ctx context.Context, host string) (netip.Addr, error) { return hostaddr.Resolve(ctx, "ip4", host) },
		Free:      free,
	}
}

// lookupTime limits the resolution of a scheduler's name.
const lookupTime = 5 * time.Second

// toward returns the address of this machine from which packets to host leave, or the zero Address if there is none.
func (m *Machine) toward(host string) Address {
	ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
	defer cancel()
	dest, err := m.Resolve(ctx, host)
	if err != nil {
		return Address{}
	}
	addr, _, _ := m.Toward(dest)
	return m.at(addr.String())
}

func countGPUs(lookup func(string) (string, bool)) int {
	devices, _ := filepath.Glob("/dev/nvidia[0-9]*") // the only error is a wrong pattern
	n := len(devices)
	if v, ok := lookup("CUDA_VISIBLE_DEVICES"); ok {
		visible := strings.FieldsFunc(v, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
		n = min(n, len(slices.DeleteFunc(visible, func(id string) bool { return id == "-1" })))
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
	return m.first(func(i hostaddr.Interface, _ netip.Addr) bool { return i.Name == name })
}

// at returns the address ip, the zero Address if no interface has it.
func (m *Machine) at(ip string) Address {
	return m.first(func(_ hostaddr.Interface, a netip.Addr) bool { return a.String() == ip })
}

func (m *Machine) loopback() Address {
	return cmp.Or(m.first(func(i hostaddr.Interface, _ netip.Addr) bool { return i.Loopback }), Address{"lo", "127.0.0.1"})
}

// outer returns the address that other machines may reach, the zero Address if there is none.
func (m *Machine) outer() Address {
	addr, _ := m.First()
	return m.at(addr.String())
}

// first returns the first IPv4 address that fits, or the zero Address.
func (m *Machine) first(fits func(hostaddr.Interface, netip.Addr) bool) Address {
	for _, i := range m.Interfaces {
		for _, a := range i.Addrs {
			if a.Is4() && fits(i, a) {
				return Address{i.Name, a.String()}
			}
		}
	}
	return Address{}
}

// list returns the names of the interfaces, for an error.
func (m *Machine) list() string {
	var l []string
	for _, i := range m.Interfaces {
		for _, a := range i.Addrs {
			if a.Is4() {
				l = append(l, i.Name+" ("+a.String()+")")
			}
		}
	}
	return cmp.Or(strings.Join(l, ", "), "none with an IPv4 address")
}

// lacking returns the reason why a device cannot be used, or "".
func lacking(have bool, device string, built bool, support string) string {
	switch {
	case !have:
		return "no " + device
	case !built:
		return "no " + support + " in this build"
	}
	return ""
}
