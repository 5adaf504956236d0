package membership

// Policies: settings that the scheduler sends to nodes of this library at run time about the data that they send. The
// scheduler keeps the list, with a version that grows with each change. It sends the whole list to nodes that have
// not confirmed it, at the latest after their next heartbeat. A node answers with the state of each policy. A
// scheduler that was started again takes the list from the nodes. Processes that are not nodes list the policies and
// change them.

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Policy is a setting for data to one peer, or of one application. Fields that are not set have their zero value.
type Policy struct {
	Peer  int    // node id of the receiver of the data; 0: the policy is of App
	App   int32  // application id
	Rate  int64  // bytes in a second, of each node to each peer that the policy is about
	Class int    // traffic class, as Class0 + 0 to 63, the DSCP
	Order string // of a communicator's application: the order in which it asks ranks
}

// Limits of the values in a policy.
const (
	Class0   = 1 << 8 // Policy.Class of class 0
	MaxClass = 63
	MinRate  = 1000
	MaxRate  = 1_000_000_000_000
)

// Target names the subject of the policy: "peer=9", "app=7".
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

// ParsePolicy parses a policy: a target, then its settings.
func ParsePolicy(s string) (p Policy, err error) {
	for i, word := range strings.Split(s, ",") {
		key, value, _ := strings.Cut(word, "=")
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
			return Policy{}, invalidField(key, value, want)
		}
	}
	return p, nil
}

func invalidField(field, value, want string) error {
	return fmt.Errorf("%s %q: want %s: %w", field, truncated(value), want, van.ErrInvalid)
}

// State is the state of a policy on one node.
type State byte

// States of a policy on a node.
const (
	InForce       State = 'y'
	Pending       State = 'p' // it has an effect once there is a connection, or the application
	Unsupported   State = 'n' // the transport, or the node, has no such setting
	NotApplicable State = '-' // the policy does not concern this node
)

// Policies is the output that reports new policies. The caller answers the scheduler with Machine.PoliciesAre.
type Policies struct {
	Version uint32
	List    []Policy
}

func (Policies) output() {}

// policies are the policies of the cluster, as far as this node knows them.
type policies struct {
	version uint32
	list    []Policy
}

// sendTo sends the list to a node of this library.
func (p *policies) sendTo(to int, b *core) {
	if p.version > 0 && b.table.native(to) {
		b.out.notify(to, notice{verb: verbPolicies, text: p.text()})
	}
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
		return 0, nil, invalidField("version", words[0], "a number from 1")
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

// policyList is the scheduler's list of policies.
type policyList struct {
	core
	policies
	refusals  *refusals
	changed   bool               // this process has changed the list itself
	waitUntil time.Duration      // until then the nodes' lists from an earlier scheduler may arrive
	states    map[int]nodeStates // by node
}

// nodeStates are the states of the policies on one node, as it reported them.
type nodeStates struct {
	incarnation, version uint32
	states               string
}

func (p *policyList) sendToAll() {
	for _, id := range p.table.ids() {
		p.sendTo(id, &p.core)
	}
}

// heartbeat sends the list to a node that has sent a heartbeat, unless the node has it.
func (p *policyList) heartbeat(id int) {
	if h := p.states[id]; h.version != p.version || h.incarnation != p.table.incs[id] {
		p.sendTo(id, &p.core)
	}
}

// maxAdoptedVersion bounds the version that a scheduler takes from a node, so that higher versions are left.
const maxAdoptedVersion = 1 << 31

// adopt takes the list of an earlier scheduler from a node, on a scheduler that has resumed its cluster.
func (p *policyList) adopt(from int, msg *van.Meta, n notice) error {
	version, list, err := parsePolicies(n.text)
	switch {
	case err != nil:
		return p.table.bad(from, msg, "body "+n.verb, err, "policies")
	case version >= maxAdoptedVersion:
		return p.table.bad(from, msg, "body "+n.verb, version, fmt.Sprintf("a version below %d", uint32(maxAdoptedVersion)))
	case p.table.native(from) && p.life.recovered && !p.changed && version > p.version:
		p.version, p.list = version, list
		p.sendToAll()
	}
	return nil
}

// recordStates records the states that a node reports.
func (p *policyList) recordStates(from int, n notice) {
	version, states, _ := strings.Cut(n.text, " ")
	if v, ok := number(version); ok && p.table.native(from) && v == int(p.version) && len(states) == len(p.list) {
		p.states[from] = nodeStates{p.table.incs[from], p.version, states}
	}
}

func (p *policyList) set(q Policy) error {
	if q.Rate == 0 && q.Class == 0 && q.Order == "" {
		return invalidField("policy", q.String(), "a rate, a class or an order as well")
	}
	if q.Peer != 0 && !p.table.has(q.Peer) {
		return invalidField("peer", van.NodeName(q.Peer), fmt.Sprintf("a node of this cluster, which has %d workers and %d servers",
			p.cfg.instances(van.Worker), p.cfg.instances(van.Server)))
	}
	list := slices.Clone(p.list)
	i := slices.IndexFunc(list, func(o Policy) bool { return o.Target() == q.Target() })
	if i < 0 {
		i, list = len(list), append(list, Policy{Peer: q.Peer, App: q.App})
	}
	o := &list[i]
	if q.Rate != 0 {
		o.Rate = q.Rate
	}
	if q.Class != 0 {
		o.Class = q.Class
	}
	if q.Order != "" {
		o.Order = q.Order
	}
	if full := (&policies{version: 1<<32 - 1, list: list}).text(); len(full) > maxPolicies {
		return invalidField("policies", strconv.Itoa(len(list)), "fewer: all of them must fit into one message; clear some")
	}
	p.change(list)
	return nil
}

// change makes list the policies, and sends them to all nodes.
func (p *policyList) change(list []Policy) {
	if slices.Equal(list, p.list) {
		return
	}
	p.version, p.list, p.changed = p.version+1, list, true
	p.sendToAll()
}

// lines is the list of policies, each with the ids of the nodes in each state: in force, pending, unsupported, not
// answered yet, dead, and C++ StepMesh.
func (p *policyList) lines() (lines []string) {
	for i := range p.list {
		groups := map[string][]string{}
		for _, id := range p.table.ids() {
			group := "asked"
			switch h := p.states[id]; {
			case id == p.list[i].Peer:
				continue
			case p.alive.isDead(id):
				group = "dead"
			case !p.table.native(id):
				group = "original"
			case h.version == p.version && h.incarnation == p.table.incs[id] && len(h.states) == len(p.list):
				if group = stateNames[State(h.states[i])]; group == "" {
					continue
				}
			}
			groups[group] = append(groups[group], strconv.Itoa(id))
		}
		line := []byte(p.list[i].String())
		for _, g := range []string{"in-force", "pending", "unfit", "asked", "dead", "original"} {
			first := " " + g + "="
			sep := first
			for _, id := range groups[g] {
				if len(line)+len(sep)+len(id) > maxPolicies {
					lines, line, sep = append(lines, string(line)), []byte(p.list[i].String()), first
				}
				line = append(append(line, sep...), id...)
				sep = ","
			}
		}
		lines = append(lines, string(line))
	}
	return lines
}

var stateNames = map[State]string{InForce: "in-force", Pending: "pending", Unsupported: "unfit"}

// Question is the body of a message to the scheduler from a process that is not a node of the cluster. It listens at
// addr, which is numeric.
func Question(incarnation uint32, addr, question string) []byte {
	return notice{verb: verbAsk, text: fmt.Sprintf("%d %s %s", incarnation, addr, question)}.body()
}

// Answer parses the body of one of the scheduler's answers. They are numbered from 0, and the last one is "end".
func Answer(body []byte) (number int, text string, ok bool) {
	n, err := parseNotice(body)
	if err != nil || n.verb != verbAnswer {
		return 0, "", false
	}
	word, text, _ := strings.Cut(n.text, " ")
	number, err = strconv.Atoi(word)
	return number, text, err == nil && strings.TrimSpace(text) != ""
}

// ask answers a process that is not a node: "<incarnation> <host:port> <question>". Each answer costs a connection.
// The number of answers is therefore bounded like that of refusals. No question is answered before the nodes had time
// to report the policies of an earlier scheduler. A process without an answer asks again.
func (p *policyList) ask(now time.Duration, from int, msg *van.Meta, n notice, report func(time.Duration) Report) error {
	rec, question, err := p.table.parseProcess(from, msg, n)
	switch {
	case err != nil:
		return err
	case question == "":
		return p.table.bad(from, msg, "body "+n.verb, strconv.Quote(truncated(n.text)), "an incarnation, an address and a question")
	}
	if now < p.waitUntil || !p.refusals.mayAnswer(now) {
		return nil
	}
	answers, err := p.execute(question, report)
	if err != nil {
		answers = []string{"error " + err.Error()}
	}
	temp := p.out.connectTemp(rec)
	for i, a := range append(answers, "end") {
		p.out.notify(temp, notice{verb: verbAnswer, text: strconv.Itoa(i) + " " + a})
	}
	p.out.disconnect(temp)
	return nil
}

// execute executes a question: "list", "set POLICY", "clear TARGET", "clear all". Each of the answers is a policy,
// and nodes in each state; consecutive ones may be about the same policy.
func (p *policyList) execute(question string, report func(time.Duration) Report) ([]string, error) {
	what, arg, _ := strings.Cut(question, " ")
	switch {
	case p.life.phase != ready:
		return nil, fmt.Errorf("the cluster has not formed yet: waiting for %s", list(report(p.life.started).Missing))
	case what == "list" && arg == "":
	case what == "set":
		o, err := ParsePolicy(arg)
		if err != nil {
			return nil, err
		}
		if err := p.set(o); err != nil {
			return nil, err
		}
	case what == "clear":
		p.change(slices.DeleteFunc(slices.Clone(p.list), func(o Policy) bool { return arg == "all" || o.Target() == arg }))
	default:
		return nil, invalidField("question", question, "list, set POLICY, clear TARGET or clear all")
	}
	return p.lines(), nil
}

// nodePolicies are the policies that a worker or server has received.
type nodePolicies struct {
	core
	policies
	scheduler uint32 // the scheduler's incarnation
	reported  string // the last answer
}

// take takes the list from the scheduler.
func (p *nodePolicies) take(from int, msg *van.Meta, n notice) error {
	version, list, err := parsePolicies(n.text)
	if err != nil {
		return p.table.bad(from, msg, "body "+n.verb, err, "policies")
	}
	if sender := p.table.incs[van.SchedulerID]; sender != p.scheduler || version >= p.version {
		p.policies, p.scheduler, p.reported = policies{version, list}, sender, ""
		p.out.emit(Policies{version, list})
	}
	return nil
}

func (p *nodePolicies) reportStates(version uint32, states string) {
	if said := strconv.FormatUint(uint64(version), 10) + " " + states; version == p.version && said != p.reported && p.life.phase == ready {
		p.reported = said
		p.out.notify(van.SchedulerID, notice{verb: verbHave, text: said})
	}
}
