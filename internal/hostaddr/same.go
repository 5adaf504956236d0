package hostaddr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Canonical returns the form of host in which hosts are compared: its address, as IPv4 if it is an IPv4-mapped address.
// A name is converted to lower case.
func Canonical(host string) string {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap().String()
	}
	return strings.ToLower(host)
}

// Same reports whether a and b are forms of the same address or name.
func Same(a, b string) bool { return a == b || Canonical(a) == Canonical(b) }

var errNoHost = errors.New("it names no host that others can connect to")

// Check returns an error if host cannot be the address of one host: if it is unspecified or multicast, or if it is a
// number that the system's resolver reads as an address in another notation, such as 127.1 or 0x7f000001.
func Check(host string) error {
	a, err := netip.ParseAddr(host)
	switch {
	case err == nil && (a.Unmap().IsUnspecified() || a.Unmap().IsMulticast() || a.Unmap() == netip.AddrFrom4([4]byte{255, 255, 255, 255})):
		return errNoHost
	case err != nil && isNumber(host):
		return fmt.Errorf("an address in an unusual notation: want four decimal numbers without leading zeros")
	}
	return nil
}

// Choose returns one of a name's addresses: an IPv4 address, unmapped, or IPv6 if the name has no other. It ignores
// addresses that Check refuses, such as the 0.0.0.0 of a filtering name service.
func Choose(all []netip.Addr) (netip.Addr, error) {
	var other netip.Addr
	for _, a := range all {
		a = a.Unmap()
		switch {
		case Check(a.String()) != nil:
		case a.Is4():
			return a, nil
		case !other.IsValid():
			other = a
		}
	}
	switch {
	case other.IsValid():
		return other, nil
	case len(all) == 0:
		return other, errors.New("it has no address")
	}
	return other, fmt.Errorf("it has the address %s: %w", all[0].Unmap(), errNoHost)
}

// Resolve returns the address of a host. If host is a name, the name service lists its addresses, of which Choose
// selects one: IPv4 addresses if network is ip4, both versions if it is ip. An address of either version is returned unmapped.
func Resolve(ctx context.Context, network, host string) (netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap(), nil
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, network, host)
	if err != nil {
		return netip.Addr{}, err
	}
	return Choose(all)
}

// isNumber reports whether the last part of host is a decimal, octal or hexadecimal number. No host name ends with a
// number.
func isNumber(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	last := host[strings.LastIndexByte(host, '.')+1:]
	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return last != "" && strings.Trim(last, "0123456789") == ""
}
