package doctor

// This file owns the checks of the cluster's secret and of the ports that a node of this configuration opens. A port's
// finding says whether other hosts reach the port, and names the rights of a process without the secret there.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van/env"
)

const makeSecret = `"stepaf secret FILE" creates a secret; set STEPAF_SECRET_FILE to it on all nodes`

// secret returns the finding about the protection in force and the source of the secret. The finding shows nothing of the secret.
func (x *exam) secret(context.Context) []Finding {
	c := x.cfg
	mode := c.AuthMode()
	data := map[string]any{"mode": mode, "source": "", "curve": x.m.HasCurve}
	from := ""
	switch {
	case c.SecretFile != "":
		from = fmt.Sprintf("from STEPAF_SECRET_FILE=%q", c.SecretFile)
		data["source"] = "STEPAF_SECRET_FILE"
	case c.Secret != "":
		from = "from STEPAF_SECRET"
		data["source"] = "STEPAF_SECRET"
	}
	f := Finding{Data: data}
	_, err := c.ReadSecret()
	switch {
	case err != nil:
		f.Status, f.Text, f.Remedy = Fail, err.Error(), secretRemedy(err, c.SecretFile)
	case from == "" && mode != env.AuthOff:
		f.Status, f.Text, f.Remedy = Fail, fmt.Sprintf("STEPAF_AUTH=%s, and no secret is set", mode), makeSecret
	case from == "":
		f.Text = "none is set: a node serves every process that reaches it (STEPAF_AUTH is off)"
	case mode == env.AuthOff:
		f.Status, f.Text, f.Remedy = Warn, from+", and STEPAF_AUTH=off: the secret is not used", "unset STEPAF_AUTH, or the secret"
	case !x.m.HasCurve && c.VanType == "zmq":
		f.Status, f.Text = Fail, from+": libzmq "+x.m.LibZMQ+" was built without CURVE, which a node with a secret needs"
		f.Remedy = "install a libzmq that is built with libsodium (Debian's libzmq5 is)"
	case mode == env.AuthWarn:
		f.Status, f.Text, f.Remedy = Warn, from+", and STEPAF_AUTH=warn: processes without it are admitted, counted and named", "unset STEPAF_AUTH as soon as all nodes have the secret"
	default:
		f.Text = from + ": processes without it are refused (STEPAF_AUTH is require)"
	}
	if c.Secret != "" {
		f.Details = append(f.Details, "other processes of this user can read STEPAF_SECRET in /proc/PID/environ; STEPAF_SECRET_FILE names a file instead")
	}
	return []Finding{f}
}

const (
	sharedMemory = "shared memory"
	dataPort     = "data over TCP"
)

// secretRemedy returns the remedy for a secret that a node refuses with err. file is STEPAF_SECRET_FILE.
func secretRemedy(err error, file string) string {
	why := ""
	if e, ok := errors.AsType[*env.Error](err); ok {
		why = e.Why
	}
	switch {
	case strings.HasPrefix(why, "mode"):
		return "chmod 600 " + file + "; if another user may have read it, replace the secret on all nodes"
	case strings.HasPrefix(why, "owned by"):
		return "copy it as the user who runs the node (install -m 600), or chown it"
	case strings.HasSuffix(why, "bytes"):
		return makeSecret
	case strings.HasSuffix(why, "is set too"):
		return "unset one of the two"
	}
	return "set STEPAF_SECRET_FILE to the file with the secret; " + makeSecret
}

// door is an address at which a node of this configuration accepts connections.
type door struct {
	Role      string `json:"role"`
	Transport string `json:"transport"`
	Address   string `json:"address"`
	Port      int    `json:"port,omitempty"` // 0 means any free port
	Network   bool   `json:"network"`        // other hosts may reach it
	Mode      string `json:"mode"`           // the mode of STEPAF_AUTH in force
	where     string
}

// exposed lists the ports that a node of this configuration opens.
func (x *exam) exposed(ctx context.Context) []Finding {
	if x.cfg.RootURI == "" {
		return []Finding{{Status: Skip, Text: "no cluster is configured (DMLC_PS_ROOT_URI is not set)", Remedy: "run it with the variables of a node: then it lists the ports that the node opens, and who reaches them"}}
	}
	interfaces, err := x.m.Interfaces()
	if err != nil {
		return []Finding{{Status: Warn, Text: err.Error(), Remedy: "see that this process may list the interfaces (ip addr)"}}
	}
	h := hostaddr.Host{Interfaces: interfaces, Source: x.m.Source}
	var found []Finding
	for _, d := range x.doors(ctx, h) {
		found = append(found, x.judgeDoor(d))
	}
	return found
}

// doors returns the ports of the node, or of all nodes that may start here if DMLC_ROLE is not set.
func (x *exam) doors(ctx context.Context, h hostaddr.Host) []door {
	root, rootErr := x.m.Resolve(ctx, x.cfg.RootURI)
	var all []door
	for i, role := range x.roles(rootErr == nil && h.Has(root)) {
		d := door{Role: role, Transport: x.cfg.VanType, Mode: x.cfg.AuthMode()}
		var addr netip.Addr
		switch {
		case role == scheduler && x.cfg.Kubernetes:
			addr, d.Port = netip.IPv4Unspecified(), x.cfg.RootPort
		case role == scheduler:
			addr, d.Port = root, x.cfg.RootPort
		default:
			addr, d.Port = x.nodeAddress(ctx, h, root), x.cfg.Port
			if d.Port != 0 && x.cfg.Role == "joint" {
				d.Port += i
			}
		}
		d.Address = "an address that is not known"
		if addr.IsValid() {
			d.Address = addr.String()
		}
		d.Network = !addr.IsLoopback() && !x.cfg.Local
		kind := map[string]string{"zmq": "TCP", ibverbs: "RDMA"}[d.Transport]
		if d.where = cmp.Or(kind, d.Transport) + " " + d.Address; d.Port != 0 {
			d.where += ":" + strconv.Itoa(d.Port)
		} else {
			d.where += ", any free port"
		}
		if x.cfg.Local && d.Transport == "zmq" {
			d.Address, d.where = "/tmp", "a Unix socket in /tmp that only this user may open"
		}
		all = append(all, d)
		if role != scheduler && d.Transport == "zmq" && x.cfg.Data == env.DataTCP && !x.cfg.Local {
			all = append(all, door{Role: role, Transport: dataPort, Address: d.Address, Mode: d.Mode, Network: d.Network, where: "TCP " + d.Address + ", any free port, for data"})
		}
		if role != scheduler && x.cfg.EnableIPC != 0 {
			all = append(all, door{Role: role, Transport: sharedMemory, Address: "abstract Unix socket", Mode: d.Mode,
				where: "an abstract Unix socket, for processes of this user in this container"})
		}
	}
	return all
}

// nodeAddress returns the address at which a worker or server of this configuration listens, or an invalid one if none is found.
func (x *exam) nodeAddress(ctx context.Context, h hostaddr.Host, root netip.Addr) netip.Addr {
	if x.needRDMA && (x.cfg.NodeHost == "" || strings.EqualFold(x.cfg.Interface, "auto")) && x.rdma.chosen != nil {
		return x.rdma.chosen.Host
	}
	if addr, variable := namedAddress(ctx, x.cfg, h, root, x.m.Resolve); variable != "" {
		return addr
	}
	if addr, _, ok := h.Toward(root); ok {
		return addr
	}
	if addr, _ := h.First(); addr.IsValid() {
		return addr
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// judgeDoor returns the finding about d: whether other hosts reach it, and the rights of a process without the secret there.
func (x *exam) judgeDoor(d door) Finding {
	f := Finding{Name: "exposed " + d.Role, Data: d}
	reach := "from this host only"
	if d.Network {
		reach = "from other hosts"
	}
	can := map[string]string{
		env.AuthRequire: "a process without the secret is refused in the handshake",
		env.AuthWarn:    "a process without the secret is admitted, and logged",
		env.AuthOff:     "any process can join the cluster there, and read and change tensors",
	}[d.Mode]
	switch {
	case d.Transport == dataPort && d.Mode == env.AuthOff:
		f.Text = fmt.Sprintf("%s, reached %s: a process that has read a member's incarnation can send tensors in its name", d.where, reach)
	case d.Transport != sharedMemory:
		f.Text = fmt.Sprintf("%s, reached %s: %s", d.where, reach, can)
	case d.Mode == env.AuthOff:
		f.Text = d.where + ": any of them can read and change tensors"
	default:
		f.Text = d.where + ": " + can
	}
	switch {
	case d.Mode == env.AuthRequire && d.Transport == dataPort && x.cfg.TLS:
		f.Text += "; tensors are encrypted (STEPAF_TLS=1)"
	case d.Mode == env.AuthRequire && d.Transport == dataPort:
		f.Text += "; tensors are not encrypted, unless STEPAF_TLS=1"
	case d.Mode == env.AuthRequire && d.Transport == ibverbs:
		f.Text += "; tensors are not encrypted"
	case d.Transport == dataPort: // the other port has the remedy
	case d.Network && d.Mode == env.AuthOff && x.cfg.Auth == "":
		f.Status, f.Remedy = Warn, makeSecret+"; or STEPAF_AUTH=off if only trusted hosts reach the address"
	}
	return f
}
