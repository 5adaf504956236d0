//go:build linux && cgo && !nordma

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Devices lists the devices. A device that cannot be opened is listed with its name only, and the error says why.
func (s *stack) Devices() ([]DeviceInfo, error) {
	found, _ := os.ReadDir(s.opt.sysfs) // not readable: no devices
	if len(found) == 0 {
		return nil, nil
	}
	var n, rc C.int
	l := C.sv_list_new(s.c, &n, &rc)
	if l == nil {
		return nil, s.diagnose(failure(rc, "list devices", "", ""))
	}
	defer C.sv_list_free(l)
	var errs []error
	var out []DeviceInfo
	for i := range n {
		name := C.GoString(C.sv_list_name(l, i))
		q := new(query)
		rc := C.sv_list_query(l, i, &q.info, &q.ports[0])
		if rc != 0 {
			errs = append(errs, failure(rc, "open and query the device", name, ""))
			out = append(out, DeviceInfo{Name: name, Path: s.path(name)})
			continue
		}
		out = append(out, s.describe(q))
	}
	for _, e := range found {
		if !slices.ContainsFunc(out, func(d DeviceInfo) bool { return d.Name == e.Name() }) {
			errs = append(errs, fmt.Errorf("%w: the kernel has the device %s, but libibverbs does not: load the kernel module ib_uverbs, "+
				"install its driver (Debian, Ubuntu: apt install ibverbs-providers), and look for %s/uverbs*", ErrUnavailable, e.Name(), s.opt.dev))
		}
	}
	return out, errors.Join(errs...)
}

// query holds the results of a query in C.
type query struct {
	info  C.sv_devinfo
	ports [C.SV_MAX_PORTS]C.sv_portinfo
}

var portStates = [...]string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}

// describe combines the device's answers with the data in sysfs.
func (s *stack) describe(q *query) DeviceInfo {
	d := DeviceInfo{
		Name: C.GoString(&q.info.name[0]), Firmware: C.GoString(&q.info.firmware[0]),
		MaxQP: int(q.info.max_qp), MaxCQE: int(q.info.max_cqe), MaxMR: int(q.info.max_mr), MaxWR: int(q.info.max_wr),
	}
	d.Path = s.path(d.Name)
	for i, p := range q.ports[:q.info.ports] {
		dir := filepath.Join(s.opt.sysfs, d.Name, "ports", strconv.Itoa(i+1))
		port := PortInfo{Num: i + 1, LinkLayer: "InfiniBand", MTU: int(p.mtu), MaxMsg: uint32(p.max_msg), Rate: rate(read(dir, "rate"))}
		if p.ethernet != 0 {
			port.LinkLayer = "Ethernet"
		}
		if int(p.state) < len(portStates) {
			port.State = portStates[p.state]
		} else {
			port.State = fmt.Sprintf("state %d", p.state)
		}
		port.Active = port.State == "ACTIVE"
		port.GIDs = gids(dir, p.ethernet != 0)
		d.Ports = append(d.Ports, port)
	}
	return d
}

// path returns the device's own directory in sysfs.
func (s *stack) path(name string) string {
	p, _ := filepath.EvalSymlinks(filepath.Join(s.opt.sysfs, name, "device"))
	return p // "" for a software device
}

// read returns the content of a file in sysfs without the newline, "" if it cannot be read.
func read(elem ...string) string {
	b, err := os.ReadFile(filepath.Join(elem...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// rate parses Gbit/s in "100 Gb/sec (4X EDR)".
func rate(s string) float64 {
	n, _, _ := strings.Cut(s, " ")
	f, err := strconv.ParseFloat(n, 64)
	if err != nil {
		return 0
	}
	return f
}

// gids reads the GID table of a port. Unused entries have no type.
func gids(dir string, ethernet bool) []GID {
	files, _ := os.ReadDir(filepath.Join(dir, "gids")) // not readable: no addresses
	var out []GID
	for _, f := range files {
		i, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		a, err := netip.ParseAddr(read(dir, "gids", f.Name()))
		if err != nil || a.IsUnspecified() {
			continue
		}
		g := GID{Index: i, Addr: a.Unmap(), Type: read(dir, "gid_attrs", "types", f.Name()),
			Iface: read(dir, "gid_attrs", "ndevs", f.Name())}
		if g.Type == "IB/RoCE v1" {
			g.Type = "IB"
			if ethernet {
				g.Type = "RoCE v1"
			}
		}
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b GID) int { return a.Index - b.Index })
	return out
}
