package fakeverbs_test

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// A connect request to a host without a listener, then one without a free queue pair.
func Example() {
	net := fakeverbs.NewNet()
	defer net.Close()
	client := net.Stack(netip.MustParseAddr("10.0.0.1"))
	net.Stack(netip.MustParseAddr("10.0.0.2"))

	channel, _ := client.NewChannel()
	connect := func() error {
		id, _ := channel.NewID(1)
		defer id.Destroy()
		if err := id.ResolveAddr(netip.Addr{}, netip.MustParseAddrPort("10.0.0.2:5000"), time.Second); err != nil {
			return err
		}
		channel.Next()
		if err := id.ResolveRoute(time.Second); err != nil {
			return err
		}
		channel.Next()
		if _, err := id.CreateQP(verbs.QPOptions{SendDepth: 16, RecvDepth: 16}); err != nil {
			return err
		}
		if err := id.Connect(verbs.ConnParam{RetryCount: 6, RNRRetryCount: 7}); err != nil {
			return err
		}
		ev, err := channel.Next()
		fmt.Println(ev.Type, ev.Status)
		return err
	}
	fmt.Println(connect())
	net.Fail(fakeverbs.FailNth(fakeverbs.OpCreateQP, 2, syscall.ENOMEM))
	fmt.Println(connect())
	fmt.Println(client.Leaks())
	// Output:
	// rejected 8
	// <nil>
	// cannot allocate memory
	// [a channel]
}
