package membership

// Policies: what the scheduler tells nodes of this library at run time about what they send, and
// how it is written.

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/van"
)

// Policy is what nodes are told about data for one peer, or of one application. What is not
// set has its zero value.
type Policy struct {
	Peer  int    // node id of who gets the data; 0: the policy is of App
	App   int32  // application id
	Rate  int64  // bytes in a second, of each node to each peer that it is about
	Class int    // traffic class, as Class0 + 0 to 63, the DSCP
	Order string // of a communicator's application: in which order it asks ranks
}

// Limits of what a policy says.
const (
	Class0   = 1 << 8 // Policy.Class of class 0
	MaxClass = 63
	MinRate  = 1000
	MaxRate  = 1_000_000_000_000
)

// Target names what the policy is about: "peer=9", "app=7".
func (p *Policy) Target() string {
	if p.Peer != 0 {
		return "peer=" + strconv.Itoa(p.Peer)
	}
	return "app=" + strconv.Itoa(int(p.App))
}

// String is the policy as ParsePolicy reads it.
func (p *Policy) String() string {
	s := p.Target()
	if p.Rate != 0 {
		s += ",rate=" + strconv.FormatInt(p.Rate, 10)
	}
	if p.Class != 0 {
		s += ",class=" + strconv.Itoa(p.Class-Class0)
	}
	if p.Order != "" {
		s += ",order=" + p.Order
	}
	return s
}

// Orders of a communicator.
var Orders = []string{"ring", "rank"}

// ParsePolicy reads a policy: a target, then what is set for it.
func ParsePolicy(s string) (p Policy, err error) {
	for i, word := range strings.Split(s, ",") {
		key, value, _ := strings.Cut(word, "=")
		bad := func(want string) error {
			return wrong(key, value, want)
		}
		n, whole := number(value)
		ok, want := false, ""
		switch {
		case i == 0 && key == "peer":
			ok, want = whole && n >= 8 && n < van.Empty, "the id of a worker or server"
			p.Peer = n
		case i == 0 && key == "app":
			ok, want = whole && n < 1<<31, "an application id, 0 to 2147483647"
			p.App = int32(n)
		case i == 0:
			key, value, want = "target", word, "peer=ID or app=ID"
		case key == "rate" && p.Rate == 0:
			ok, want = whole && n >= MinRate && n <= MaxRate, fmt.Sprintf("%d to %d bytes in a second", MinRate, MaxRate)
			p.Rate = int64(n)
		case key == "class" && p.Class == 0 && p.Peer != 0:
			ok, want = whole && n <= MaxClass, fmt.Sprintf("0 to %d (DSCP)", MaxClass)
			p.Class = n + Class0
		case key == "class" && p.Peer == 0:
			want = "none: applications share the connection to a peer, so only a peer has a traffic class"
		case key == "order" && p.Order == "" && p.Peer == 0:
			ok, want = slices.Contains(Orders, value), strings.Join(Orders, " or ")
			p.Order = value
		default:
			want = "rate, class of a peer, or order of a communicator, each once"
		}
		if !ok {
			return Policy{}, bad(want)
		}
	}
	return p, nil
}

func wrong(field, value, want string) error {
	return fmt.Errorf("%s %q: want %s: %w", field, head(value), want, van.ErrInvalid)
}

// State is how far a node has a policy.
type State byte

// States of a policy on a node.
const (
	InForce State = 'y'
	Pending State = 'p' // it has an effect once there is a connection, or the application
	Unfit   State = 'n' // the transport, or the node, has no such thing
	Apart   State = '-' // the policy is not about what this node does
)

// Policies says that the node's policies may have changed, and that the answer to the
// scheduler, Machine.PoliciesAre, is due.
type Policies struct {
	Version uint32
	List    []Policy
}

func (Policies) output() {}

// policies are those of the cluster, as far as this node knows.
type policies struct {
	version uint32
	list    []Policy
}

func (p *policies) text() string {
	var w []string
	for i := range p.list {
		w = append(w, p.list[i].String())
	}
	return strings.TrimSpace(strconv.FormatUint(uint64(p.version), 10) + " " + strings.Join(w, " "))
}

// maxPolicies bounds the text of a list, so that it fits into one notice.
const maxPolicies = maxNotice - 100

func parsePolicies(text string) (version uint32, list []Policy, err error) {
	words := strings.Split(text, " ")
	n, ok := number(words[0])
	if !ok || n < 1 || n >= 1<<32 {
		return 0, nil, wrong("version", words[0], "a number from 1")
	}
	for _, w := range words[1:] {
		p, err := ParsePolicy(w)
		if err != nil {
			return 0, nil, err
		}
		list = append(list, p)
	}
	return uint32(n), list, nil
}

// notice is how one node sends the list to another.
func (p *policies) notice() notice { return notice{verb: verbPolicies, text: p.text()} }
