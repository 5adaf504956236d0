//go:build linux && cgo && !nordma

package verbs

// This file converts addresses to and from the shim's form.

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"unsafe"
)

func toAddr(a netip.AddrPort) (C.sv_addr, error) {
	var out C.sv_addr
	if !a.IsValid() {
		return out, fmt.Errorf("address is %v, want an IPv4 or IPv6 address and a port", a)
	}
	out.port = C.uint16_t(a.Port())
	ip := a.Addr().Unmap()
	b := (*[16]byte)(unsafe.Pointer(&out.ip))
	if ip.Is4() {
		v4 := ip.As4()
		copy(b[:], v4[:])
		out.family = 4
		return out, nil
	}
	*b = ip.As16()
	out.family = 6
	if zone := ip.Zone(); zone != "" {
		n, err := strconv.ParseUint(zone, 10, 32)
		if err != nil {
			iface, err := net.InterfaceByName(zone)
			if err != nil {
				return out, fmt.Errorf("address %v: zone %q: %w", a, zone, err)
			}
			n = uint64(iface.Index)
		}
		out.scope = C.uint32_t(n)
	}
	return out, nil
}

func fromAddr(a *C.sv_addr) netip.AddrPort {
	b := *(*[16]byte)(unsafe.Pointer(&a.ip))
	switch a.family {
	case 4:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), uint16(a.port))
	case 6:
		ip := netip.AddrFrom16(b)
		if a.scope != 0 {
			ip = ip.WithZone(strconv.FormatUint(uint64(a.scope), 10))
		}
		return netip.AddrPortFrom(ip, uint16(a.port))
	}
	return netip.AddrPort{}
}
