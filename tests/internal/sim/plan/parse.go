package plan

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// FieldError is a value in a plan that makes no sense.
type FieldError struct {
	File  string // "" if not from a file
	Field string // "phases[1].events[0].node"
	Value any
	Want  string
}

// Error implements error.
func (e *FieldError) Error() string {
	v := e.Value
	if s, ok := v.(string); ok {
		v = fmt.Sprintf("%q", s)
	}
	file := ""
	if e.File != "" {
		file = e.File + ": "
	}
	return fmt.Sprintf("%s%s is %v, want %s", file, e.Field, v, e.Want)
}

// ReadFile reads and checks one file.
func ReadFile(file string) (*Plan, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return Parse(file, b)
}

// ReadDir reads all plans of a directory, by name.
func ReadDir(dir string) ([]*Plan, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no plans (*.json) there", dir)
	}
	slices.Sort(files)
	var all []*Plan
	for _, f := range files {
		p, err := ReadFile(f)
		if err != nil {
			return nil, err
		}
		if want := strings.TrimSuffix(filepath.Base(f), ".json"); p.Name != want {
			return nil, &FieldError{f, "name", p.Name, "that of the file, " + want}
		}
		all = append(all, p)
	}
	return all, nil
}

// Parse reads and checks a plan. file is for errors.
func Parse(file string, b []byte) (*Plan, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	p := &Plan{}
	if err := d.Decode(p); err != nil {
		line := 1 + bytes.Count(b[:min(int(d.InputOffset()), len(b))], []byte("\n"))
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			line = 1 + bytes.Count(b[:min(int(syntax.Offset), len(b))], []byte("\n"))
		}
		return nil, fmt.Errorf("%s:%d: %w", file, line, err)
	}
	if d.More() {
		return nil, fmt.Errorf("%s: something follows the plan", file)
	}
	if err := p.Check(); err != nil {
		if f, ok := errors.AsType[*FieldError](err); ok {
			f.File = file
		}
		return nil, err
	}
	return p, nil
}

// Limits of a plan.
const (
	maxNodes = 64
	maxPhase = 10 * time.Minute
	maxSize  = 64 << 20
)

// Check reports invalid parts of the plan.
func (p *Plan) Check() error {
	c := &checker{p: p}
	c.plan()
	return c.err
}

type checker struct {
	p   *Plan
	err error // a *FieldError
}

// need notes that field makes no sense unless ok.
func (c *checker) need(ok bool, field string, value any, want string) {
	if !ok && c.err == nil {
		c.err = &FieldError{Field: field, Value: value, Want: want}
	}
}

func (c *checker) oneOf(field, value string, words ...string) {
	c.need(slices.Contains(words, value), field, value, "one of "+strings.Join(words, ", "))
}

func (c *checker) time(field string, d Duration, most time.Duration) {
	c.need(d >= 0 && d.D() <= most, field, d.D(), fmt.Sprintf("0 to %s", most))
}

func (c *checker) share(field string, x float64) {
	c.need(x >= 0 && x <= 0.5, field, x, "0 to 0.5")
}

func (c *checker) node(field string, n Node) {
	c.need(slices.Contains(c.p.Cluster.All(), n), field, string(n), "a node of the cluster: scheduler, \"server 0\", \"worker 0\", ...")
}

func (c *checker) nodes(field string, n Nodes) {
	if n != "workers" && n != "servers" && n != "all" {
		c.node(field, Node(n))
	}
}

func (c *checker) plan() {
	p := c.p
	c.need(p.Name != "" && !strings.ContainsAny(p.Name, " /"), "name", p.Name, "a name without spaces and slashes")
	c.need(p.About != "", "about", p.About, "a sentence")
	c.oneOf("only", p.Only, "", "simulation", "processes")
	s := &p.Cluster
	c.need(s.Workers >= 1, "cluster.workers", s.Workers, "at least 1")
	c.need(s.Servers >= 1, "cluster.servers", s.Servers, "at least 1")
	c.need(s.Group >= 0, "cluster.group", s.Group, "0 (which is 1) or more")
	c.need((s.Workers+s.Servers)*max(s.Group, 1) <= maxNodes, "cluster.workers", s.Workers, fmt.Sprintf("at most %d nodes in all", maxNodes))
	if c.err != nil {
		return
	}
	c.oneOf("cluster.api", s.API, "", "python", "tensor", "kv")
	c.need(!s.PlainScheduler || s.API == "python" && len(s.Foreign) == 0, "cluster.plain_scheduler", s.PlainScheduler, `it with cluster.api "python" and no foreign nodes`)
	c.need(!s.LoopEnds || s.API == "python" && !s.FinalizeEarly && len(s.Foreign) == 0, "cluster.loop_ends", s.LoopEnds,
		`it with cluster.api "python", without finalize_early and foreign nodes`)
	for i, n := range s.Foreign {
		c.node(fmt.Sprintf("cluster.foreign[%d]", i), n)
	}
	for n := range s.Nodes {
		c.node("cluster.nodes", n)
	}
	t := &p.Transport
	c.oneOf("transport.kind", t.Kind, "", "tcp", "shm", "rdma")
	c.time("transport.delay", t.Delay, time.Minute)
	c.time("transport.jitter", t.Jitter, time.Minute)
	c.time("transport.silence", t.Silence, time.Hour)
	c.need(t.Bandwidth >= 0, "transport.bandwidth", t.Bandwidth, "0 (no limit) or more")
	c.need(t.Queue >= 0, "transport.queue", t.Queue, "0 (no limit) or more")
	c.share("transport.loss", t.Loss)
	c.share("transport.duplicate", t.Duplicate)
	c.share("transport.break", t.Break)
	c.need(t.Resend || t.Loss == 0, "transport.loss", t.Loss, "0 without resend")
	c.need(t.Resend || t.Duplicate == 0, "transport.duplicate", t.Duplicate, "0 without resend")
	if s.Stuck != "" {
		c.node("cluster.stuck", s.Stuck)
	}
	c.need((s.Stuck != "") == (s.StuckBy > 0), "cluster.stuck_by", s.StuckBy.D(), "a time if somebody is stuck")
	c.need(len(p.Phases) > 0 || s.Stuck != "", "phases", len(p.Phases), "at least one")
	for i := range p.Phases {
		c.phase(fmt.Sprintf("phases[%d]", i), &p.Phases[i])
	}
	c.time("end.settle", p.End.Settle, time.Hour)
	c.need(p.End.Rounds >= 0, "end.rounds", p.End.Rounds, "0 (which is 3) or more")
}

func (c *checker) phase(at string, ph *Phase) {
	c.need(ph.Name != "", at+".name", ph.Name, "a name")
	c.need(ph.For > 0, at+".for", ph.For.D(), "more than 0")
	c.time(at+".for", ph.For, maxPhase)
	for i := range ph.Loads {
		c.load(fmt.Sprintf("%s.loads[%d]", at, i), &ph.Loads[i])
	}
	for i := range ph.Events {
		c.event(fmt.Sprintf("%s.events[%d]", at, i), ph, &ph.Events[i])
	}
	for i := range ph.Expect {
		c.expect(fmt.Sprintf("%s.expect[%d]", at, i), ph, &ph.Expect[i])
	}
}

func (c *checker) load(at string, l *Load) {
	c.nodes(at+".nodes", l.Nodes)
	if l.Collectives {
		c.need(l.Nodes == "workers" || l.Nodes == "servers" && c.p.Only == "simulation", at+".nodes", string(l.Nodes), "workers, or, in a simulation only, servers")
		c.need(l.Pushes == 0 && l.Pulls == 0 && l.Rounds == 0 && l.Barrier == 0, at+".collectives", l.Collectives, "no pushes, pulls, rounds and barrier")
	} else {
		c.need(l.Nodes == "workers" || Node(l.Nodes).Role() == "worker", at+".nodes", string(l.Nodes), "workers, or one of them")
	}
	c.time(at+".every", l.Every, maxPhase)
	c.time(at+".limit", l.Limit, maxPhase)
	c.need(l.Size == 0 || l.Size >= MinSize && l.Size <= maxSize, at+".size", l.Size, fmt.Sprintf("%d to %d", MinSize, maxSize))
	c.need(l.Pushes >= 0 && l.Pushes <= 64, at+".pushes", l.Pushes, "0 to 64")
	c.need(l.Pulls >= 0 && l.Pulls <= 64, at+".pulls", l.Pulls, "0 to 64")
	c.need(l.Window >= 0 && l.Window <= 4096, at+".window", l.Window, "0 to 4096")
	c.need(l.Rounds >= 0, at+".rounds", l.Rounds, "0 (no limit) or more")
	c.need(l.Barrier >= 0, at+".barrier", l.Barrier, "0 (none) or more")
}

// MinSize is the smallest tensor: it tells its maker and its call.
const MinSize = 64

func (c *checker) event(at string, ph *Phase, e *Event) {
	c.need(slices.Contains(actions, e.Do), at+".do", string(e.Do), fmt.Sprintf("one of %v", actions))
	c.need(e.At >= 0 && e.At <= ph.For, at+".at", e.At.D(), fmt.Sprintf("0 to the length of the phase, %s", ph.For.D()))
	c.node(at+".node", e.Node)
	pair := e.Do == Cut || e.Do == Heal || e.Do == Break || e.Do == SlowLink
	if e.Peer != "" {
		c.need(pair, at+".peer", string(e.Peer), "none: "+string(e.Do)+" is about one node")
		c.node(at+".peer", e.Peer)
		c.need(e.Peer != e.Node, at+".peer", string(e.Peer), "another node")
	}
	c.need(e.Peer != "" || e.Do != SlowLink, at+".peer", string(e.Peer), "the other end of the link")
	ends := e.Do == Stop || e.Do == Cut || e.Do == SlowLink || e.Do == SlowHandler
	c.need(e.For == 0 || ends, at+".for", e.For.D(), "none: "+string(e.Do)+" has no end")
	c.time(at+".for", e.For, maxPhase)
	c.need(e.Do != SlowHandler || e.For > 0 && e.Node.Role() == "server", at+".for", e.For.D(), "a time, and a server")
	c.need(!e.Fork || e.Do == Kill, at+".fork", e.Fork, "false: only kill knows it")
	c.need(len(e.Env) == 0 || e.Do == Join, at+".env", e.Env, "none: only join knows it")
	c.need(!e.NewHost || e.Do == Join, at+".new_host", e.NewHost, "false: only join knows it")
	c.need((e.Bandwidth > 0) == (e.Do == SlowLink), at+".bandwidth", e.Bandwidth, "more than 0 for slow-link, else none")
	c.need(e.Node != "scheduler" || e.Do != Barrier, at+".node", string(e.Node), "a worker or server")
}

func (c *checker) expect(at string, ph *Phase, e *Expect) {
	c.nodes(at+".nodes", e.Nodes)
	c.oneOf(at+".rounds", e.Rounds, "", "any", "all", "some", "none")
	c.oneOf(at+".barriers", e.Barriers, "", "pass", "fail", "end")
	c.need(e.After >= 0 && e.After <= ph.For, at+".after", e.After.D(), "a time of the phase")
	c.time(at+".within", e.Within, maxPhase)
}
