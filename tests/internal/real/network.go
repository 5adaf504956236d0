package real

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// network is a network namespace for each process, and another one with the bridge between
// them. Each lives as long as a process that does nothing but hold it.
type network struct {
	holders []*exec.Cmd // the last one has the bridge
	stdins  []io.Closer
}

// newNetwork makes a network with so many places. It needs the rights of root.
func newNetwork(places int) (*network, error) {
	n := &network{}
	for range places + 1 {
		cmd := exec.Command("unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat")
		stdin, err := cmd.StdinPipe() // which ends it
		if err != nil {
			return nil, err
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			n.close()
			return nil, fmt.Errorf("a network for each process: %w", err)
		}
		n.holders, n.stdins = append(n.holders, cmd), append(n.stdins, stdin)
		if _, err := stdout.Read(make([]byte, 16)); err != nil {
			n.close()
			return nil, errors.New("a network for each process needs the rights of root, and the commands unshare, nsenter and ip")
		}
	}
	var bridge strings.Builder
	bridge.WriteString("link add br0 type bridge\nlink set br0 up\n")
	for i := range places {
		fmt.Fprintf(&bridge, "link add port%d type veth peer name eth0 netns %d\nlink set port%d master br0\nlink set port%d up\n", i, n.holders[i].Process.Pid, i, i)
	}
	if err := n.ip(places, bridge.String()); err != nil {
		n.close()
		return nil, err
	}
	for i := range places {
		if err := n.ip(i, fmt.Sprintf("addr add %s/24 dev eth0\nlink set eth0 up\n", n.address(i))); err != nil {
			n.close()
			return nil, err
		}
	}
	return n, nil
}

func (n *network) address(place int) string { return fmt.Sprintf("10.231.7.%d", place+1) }

// inside is the command that runs argv at a place.
func (n *network) inside(place int, argv []string) []string {
	return append([]string{"nsenter", "--net=/proc/" + strconv.Itoa(n.holders[place].Process.Pid) + "/ns/net"}, argv...)
}

// ip runs commands of ip at a place.
func (n *network) ip(place int, batch string) error {
	argv := n.inside(place, []string{"ip", "-batch", "-"})
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(batch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %w: %s", err, out)
	}
	return nil
}

// nowhere is an Ethernet address that no device has.
const nowhere = "02:00:00:00:00:fe"

// cut drops all packets between two places, or ends that.
func (n *network) cut(a, b int, on bool) error {
	for _, x := range [][2]int{{a, b}, {b, a}} {
		text := fmt.Sprintf("neigh replace %s lladdr %s nud permanent dev eth0\n", n.address(x[1]), nowhere)
		if !on {
			text = fmt.Sprintf("neigh del %s dev eth0\n", n.address(x[1]))
		}
		if err := n.ip(x[0], text); err != nil {
			return err
		}
	}
	return nil
}

func (n *network) close() {
	for i, cmd := range n.holders {
		_ = n.stdins[i].Close()
		_ = cmd.Wait()
	}
}

// Privileged tells whether this process may make networks.
func Privileged() bool { return os.Geteuid() == 0 }
