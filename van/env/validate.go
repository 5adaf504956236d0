package env

// Checks of a whole Config before a node starts.

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
)

// Validate checks all that can be checked before a node connects: values that are
// missing, out of range or contradictory. It repeats the errors of Load, except where the
// program has set another value since. The error joins an *Error for each finding, and then names that
// are perhaps misspelt.
func (c *Config) Validate() error {
	var errs []error
	add := func(e *Error) { errs = append(errs, e) }
	bad := map[string]bool{} // fields with an error
	for i := range table {
		v := &table[i]
		if v.name == vanType { // the same field as DMLC_ENABLE_RDMA
			continue
		}
		for _, p := range c.problems {
			if p.variable == v.name && v.get(c) == c.loaded[v.name] {
				add(p.err)
				bad[v.name] = true
			}
		}
		if bad[v.name] {
			continue
		}
		if e := v.validate(c); e != nil {
			add(e)
			bad[v.name] = true
		}
	}
	good := func(names ...string) bool {
		return !slices.ContainsFunc(names, func(n string) bool { return bad[n] })
	}

	for _, name := range []string{"DMLC_PS_ROOT_URI", "DMLC_NODE_HOST", "DMLC_INTERFACE"} {
		if value := find(name).get(c); good(name) && strings.ContainsAny(value, "\"'`$*{}[]") {
			add(&Error{Name: name, Value: value, Want: notAName(name, value)})
			bad[name] = true
		}
	}
	for _, h := range []struct{ name, want string }{
		{"DMLC_PS_ROOT_URI", "the name or an address of the scheduler's host"},
		{"DMLC_NODE_HOST", "the name or an address of this host, or unset it"},
	} {
		addr, err := netip.ParseAddr(find(h.name).get(c))
		if err != nil || !good(h.name) || h.name == "DMLC_PS_ROOT_URI" && addr.Unmap().IsUnspecified() {
			continue // a name; or a scheduler that listens on every address, and nodes of its host
		}
		if err := hostaddr.Check(addr.String()); err != nil {
			add(&Error{Name: h.name, Value: addr.String(), Why: err.Error(), Want: h.want})
			bad[h.name] = true
		}
	}
	if good("DMLC_ROLE", "DMLC_GROUP_SIZE") {
		for _, r := range c.parts() {
			if good(r.variable) {
				c.validateRank(r, good("DMLC_NODE_RANK", "DMLC_RANK_OFFSET", "STEPMESH_GPU", "DMLC_INSTANCE_ID"), add)
			}
		}
	}
	if good(secret, secretFile, authMode) {
		c.validateSecret(add)
		if good(tlsSwitch, enableRDMA) {
			c.validateTLS(add)
		}
	}
	if good("DMLC_NUM_PORTS", enableRDMA) && c.NumPorts > 1 && slices.Contains(vanWords, c.VanType) {
		add(&Error{Name: "DMLC_NUM_PORTS", Value: strconv.Itoa(c.NumPorts), Why: "transport " + c.VanType, Want: "1"})
	}
	if good("PS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_TIMEOUT") &&
		c.HeartbeatInterval > 0 && c.HeartbeatTimeout > 0 && c.HeartbeatTimeout <= c.HeartbeatInterval {
		add(&Error{Name: "PS_HEARTBEAT_TIMEOUT", Value: find("PS_HEARTBEAT_TIMEOUT").get(c),
			Want: fmt.Sprintf("more than PS_HEARTBEAT_INTERVAL (%v), or 0", c.HeartbeatInterval)})
	}
	if c.VanType == "ibverbs" && good("BYTEPS_RDMA_START_DEPTH", "BYTEPS_RDMA_RX_DEPTH", "BYTEPS_RDMA_MAX_CONCURR_WR", "STEPAF_QP_NUM") {
		start, rx := c.RDMADepths()
		if need := start + 2*rx; c.RDMAMaxConcurrWR < need {
			add(&Error{Name: "BYTEPS_RDMA_MAX_CONCURR_WR", Value: strconv.Itoa(c.RDMAMaxConcurrWR),
				Want: fmt.Sprintf("at least %d = BYTEPS_RDMA_START_DEPTH %d + 2 * BYTEPS_RDMA_RX_DEPTH %d", need, start, rx)})
		}
		if rx < c.QPNum {
			add(&Error{Name: "BYTEPS_RDMA_RX_DEPTH", Value: strconv.Itoa(rx),
				Want: fmt.Sprintf("at least STEPAF_QP_NUM (%d)", c.QPNum)})
		}
	}
	return c.join(errs)
}

// validate checks one field by itself.
func (v *variable) validate(c *Config) *Error {
	text := v.get(c)
	fail := func(want string) *Error { return &Error{Name: v.name, Value: text, Want: want} }
	if text == "" {
		switch {
		case v.needed:
			want := v.want()
			if v.kind == String {
				want = "a host name or address"
			}
			return &Error{Name: v.name, Why: c.meant[v.name], Want: want}
		case v.def != "":
			return fail(v.want())
		}
		return nil
	}
	canon, want := v.parse(text)
	switch {
	case want != "":
		return fail(want)
	case v.name == enableRDMA && canon != text: // van.New compares exactly
		return fail(strconv.Quote(canon))
	case v.name == "BYTEPS_ENABLE_IPC" && canon != text:
		return fail(v.want())
	}
	return nil
}

// part is one of the instances that a process starts.
type part struct {
	role, variable string
	groups         int
}

// parts returns the worker or server instances of this process: none for a
// scheduler, two for joint.
func (c *Config) parts() []part {
	w := part{roleWorker, "DMLC_NUM_WORKER", c.NumWorkers}
	s := part{roleServer, "DMLC_NUM_SERVER", c.NumServers}
	switch c.Role {
	case roleWorker:
		return []part{w}
	case roleServer:
		return []part{s}
	case roleJoint:
		return []part{w, s}
	}
	return nil
}

func (c *Config) validateRank(p part, rankKnown bool, add func(*Error)) {
	n := p.groups * c.GroupSize
	if n > MaxInstances {
		add(&Error{Name: p.variable, Value: strconv.Itoa(p.groups), Why: fmt.Sprintf("DMLC_GROUP_SIZE=%d", c.GroupSize),
			Want: fmt.Sprintf("at most %d instances, not %d", MaxInstances, n)})
		return
	}
	if !rankKnown {
		return
	}
	rank := c.Rank()
	formula := fmt.Sprintf("DMLC_GROUP_SIZE %d * DMLC_NODE_RANK %d + STEPMESH_GPU %d + DMLC_RANK_OFFSET %d",
		c.GroupSize, max(c.NodeRank, 0), c.GPU, c.RankOffset)
	if rank < 0 || rank >= n {
		add(&Error{Name: "rank", Value: strconv.Itoa(rank), Why: formula,
			Want: fmt.Sprintf("0 to %d for one of %d %s instances (%s %d * DMLC_GROUP_SIZE %d)", n-1, n, p.role, p.variable, p.groups, c.GroupSize)})
		return
	}
	if c.InstanceID >= 0 && c.InstanceID != rank%c.GroupSize {
		add(&Error{Name: "DMLC_INSTANCE_ID", Value: strconv.Itoa(c.InstanceID), Why: "rank " + strconv.Itoa(rank) + " = " + formula,
			Want: fmt.Sprintf("%d = rank %d mod DMLC_GROUP_SIZE %d, or leave it unset", rank%c.GroupSize, rank, c.GroupSize)})
	}
}

// notAName says what is wanted instead of value, which has characters that only a shell gives a meaning.
func notAName(variable, value string) string {
	want := "a host name or an address"
	if variable == "DMLC_INTERFACE" {
		want = "the name of a network interface, or auto"
	}
	if unquote(value) != value {
		want += "; write it without quotes"
	}
	if strings.HasPrefix(value, "[") {
		want += "; write it without brackets"
	}
	return want
}
