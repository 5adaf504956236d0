package core

// The addresses of the sockets that a forked child must close.

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/wake"
)

// Sockets are the addresses of a node's sockets, by which peers notice that its process has
// ended. A forked child inherits the sockets, and while it keeps them open the connections do
// not end.
type Sockets struct {
	Ports []int            // the node listens at these ports, and has accepted connections there
	Peers []netip.AddrPort // the connected peers; an entry has no address if the host's name has none
}

// lookUpTime limits the resolution of a peer's host name.
const lookUpTime = time.Second

// watchSockets calls publish with the node's sockets before it returns, and from a goroutine whenever
// the peers change. When the node leaves, the goroutine calls publish for the last time, with no sockets.
func (s *Session) watchSockets(publish func(Sockets)) {
	app := (*cluster.Node)(s.node).App()
	changed := make(chan struct{}, 1)
	app.OnPeers(func() { wake.Put(changed) })
	publish(socketsOf(app.Addresses()))
	go func() {
		for {
			select {
			case <-changed:
				publish(socketsOf(app.Addresses()))
			case <-app.Ended():
				publish(Sockets{})
				return
			}
		}
	}()
}

// socketsOf resolves the peers' hosts.
func socketsOf(ports []int, peers []string) Sockets {
	found := Sockets{Ports: ports}
	for _, p := range peers {
		host, service, err := net.SplitHostPort(p)
		n, err2 := strconv.ParseUint(service, 10, 16)
		if err != nil || err2 != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), lookUpTime)
		addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		cancel()
		if len(addrs) == 0 {
			addrs = []netip.Addr{{}}
		}
		for _, a := range addrs {
			found.Peers = append(found.Peers, netip.AddrPortFrom(a.Unmap().WithZone(""), uint16(n)))
		}
	}
	slices.SortFunc(found.Peers, netip.AddrPort.Compare)
	return found
}
