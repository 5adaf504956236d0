package launch

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/env"
)

// Plan is the complete description of the processes that Run starts.
type Plan struct {
	Spec     Spec // with all choices made
	Children []Child
	Messages []string // for the user, printed after the banner

	MakesSecret bool // Run creates a secret for the cluster
}

// planner is a Plan that Resolve is making.
type planner struct {
	Plan
	m       *Machine
	cfg     *env.Config // the launcher's own environment
	environ []string
	lookup  func(string) (string, bool)
	own     Address // of this machine's nodes
	chosen  string  // transport
	missing []string
	using   []string
	set     []Default // chosen by Resolve
}

// Resolve makes the choices that s leaves open and makes the children. environ is the launcher's environment. Resolve
// obeys its settings or refuses them, and replaces only the variables of a node's place (role, rank and so on). Errors
// have status 2.
func Resolve(s Spec, environ []string, m *Machine) (*Plan, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	src := env.FromList(environ)
	cfg, err := env.LoadFrom(src)
	if err != nil {
		return nil, exit.With(exit.Misuse, fmt.Errorf("environment: %w", err))
	}
	s.Workers, s.Servers = cmp.Or(s.Workers, cfg.NumWorkers, 1), cmp.Or(s.Servers, cfg.NumServers, 1)
	p := &planner{Plan: Plan{Spec: s}, m: m, cfg: cfg, environ: environ, lookup: src.Lookup}
	p.Messages = slices.Clone(s.Notes)
	for _, step := range []func() error{p.backend, p.van, p.groupSize, p.ranks, p.address, p.port} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	p.cluster()
	if err := p.secret(); err != nil {
		return nil, err
	}
	if len(p.missing) > 0 {
		p.say("%s: using %s", strings.Join(p.missing, ", "), strings.Join(p.using, " and ")+" on "+p.own.Interface+" ("+p.own.IP+")")
	}
	p.children()
	p.cores()
	return &p.Plan, nil
}

func (p *planner) say(format string, args ...any) {
	p.Messages = append(p.Messages, fmt.Sprintf(format, args...))
}

// has reports whether the environment sets the variable, under any of its names.
func (p *planner) has(name string) bool {
	if o := p.cfg.Origin(name); o != "default" {
		return true
	}
	v, _ := p.lookup(name)
	return strings.TrimSpace(v) != ""
}

// backend chooses the backend.
func (p *planner) backend() error {
	choice, explicit := p.Spec.DefaultBackend, p.has("STEPMESH_BAKCEND")
	why := lacking(p.m.GPUs > 0, "CUDA device", p.m.GPUBuild, "GPU support")
	switch {
	case explicit && p.cfg.Backend == "GPU" && p.m.GPUs == 0:
		return exit.Usage("STEPMESH_BAKCEND=GPU, but this machine has %s: set STEPMESH_BAKCEND=CPU, or unset it", why)
	case explicit || choice == "":
		return nil
	case choice == auto && why != "":
		p.missing, p.using = append(p.missing, why), append(p.using, "backend CPU")
		p.set = append(p.set, Default{Name: "STEPMESH_BIND_CPU_CORE", Value: "0"})
		choice = "CPU"
	case choice == auto:
		choice = "GPU"
	case strings.EqualFold(choice, "GPU") && why != "":
		return exit.Usage("%s: nodes on several machines must agree, so this is not changed silently; set STEPMESH_BAKCEND=CPU to run without GPU", why)
	}
	p.set = append(p.set, Default{Name: "STEPMESH_BAKCEND", Value: choice})
	return nil
}

// van chooses the transport.
func (p *planner) van() error {
	p.chosen = p.cfg.VanType
	choice, explicit := p.Spec.DefaultVan, p.has("DMLC_ENABLE_RDMA") || p.has("DMLC_PS_VAN_TYPE")
	why := lacking(p.m.RDMA, "RDMA device", p.m.RDMABuild, "RDMA transport")
	switch {
	case explicit && p.cfg.VanType == "ibverbs" && why != "":
		return exit.Usage("DMLC_ENABLE_RDMA=ibverbs, but there is %s: set DMLC_ENABLE_RDMA=zmq on all nodes", why)
	case explicit || choice == "":
		return nil
	case choice == auto && why != "":
		p.missing, p.using = append(p.missing, why), append(p.using, "van zmq")
		p.set = append(p.set, Default{Name: "STEPMESH_SPLIT_QP_LAG", Value: "0"})
		choice = "zmq"
	case choice == auto:
		choice = "ibverbs"
	case choice == "ibverbs" && why != "":
		return exit.Usage("%s: nodes on several machines must agree, so this is not changed silently; set DMLC_ENABLE_RDMA=zmq on all nodes to run over TCP", why)
	}
	p.chosen = choice
	p.set = append(p.set, Default{Name: "DMLC_ENABLE_RDMA", Value: choice})
	return nil
}

// onGPU reports whether the children will use GPU tensors, as far as that is known.
func (p *planner) onGPU() bool {
	i := slices.IndexFunc(p.set, func(d Default) bool { return d.Name == "STEPMESH_BAKCEND" })
	if i >= 0 {
		return strings.EqualFold(p.set[i].Value, "GPU")
	}
	return p.cfg.Backend == "GPU"
}

func (p *planner) groupSize() error {
	s := &p.Spec
	if s.GroupSize == 0 || s.GroupSize == Auto && p.has("DMLC_GROUP_SIZE") {
		s.GroupSize = p.cfg.GroupSize
	}
	if s.GroupSize == Auto {
		s.GroupSize = 2
		if p.onGPU() {
			s.GroupSize = min(p.m.GPUs, 8)
		}
		if s.GroupSize < 8 && len(p.using) > 0 {
			p.using[0] = fmt.Sprintf("%d instances in each group, %s", s.GroupSize, p.using[0])
		}
	}
	g := s.GroupSize
	// Checked before anything is allocated for each instance.
	for _, n := range []struct {
		groups int
		what   string
	}{{s.Workers, "workers"}, {s.Servers, "servers"}} {
		if n.groups > env.MaxInstances/g {
			return exit.Usage("%d %s with %d instances in each group: want at most %d instances of a role", n.groups, n.what, g, env.MaxInstances)
		}
	}
	if s.GPUs == nil {
		for i := range g {
			s.GPUs = append(s.GPUs, i)
		}
	}
	if len(s.GPUs) != g {
		return exit.Usage("%d GPUs for groups of %d instances: want one for each", len(s.GPUs), g)
	}
	if p.onGPU() && p.m.GPUs > 0 && slices.Max(s.GPUs) >= p.m.GPUs {
		return exit.Usage("GPU %d of an instance, but this machine has %d CUDA devices: set a smaller group size (GROUP_SIZE, on all nodes)", slices.Max(s.GPUs), p.m.GPUs)
	}
	return nil
}

// ranks checks the rank of the group to start.
func (p *planner) ranks() error {
	s := &p.Spec
	if s.NodeRank < 0 {
		s.NodeRank = max(p.cfg.NodeRank, 0)
	}
	n, name := s.Servers, "servers"
	if s.Part == Worker {
		n, name = s.Workers, "workers"
	}
	switch {
	case s.Part == Joint || s.Part == Scheduler:
		s.NodeRank = 0
	case s.NodeRank >= n:
		return exit.Usage("node rank %d, but there are %d %s: want 0 to %d", s.NodeRank, n, name, n-1)
	}
	return nil
}

// address chooses the address of this machine's nodes, and the address of the scheduler.
func (p *planner) address() error {
	s := &p.Spec
	s.Host = cmp.Or(s.Host, p.cfg.RootURI)
	if s.Host == "" && !s.starts(Scheduler) {
		return exit.Usage("no scheduler address: give --host or set DMLC_PS_ROOT_URI")
	}
	if _, err := netip.ParseAddr(s.Host); err == nil {
		if err := hostaddr.Check(s.Host); err != nil {
			return exit.Usage("--host %s: %v; want the name or an address of the scheduler's host", s.Host, err)
		}
	}
	var own Address // not chosen yet
	if s.Interface != "" {
		if own = p.m.on(s.Interface); own == (Address{}) {
			return exit.Usage("no interface %q with an IPv4 address: this machine has %s", s.Interface, p.m.list())
		}
	} else if s.Prefer != "" {
		own = p.m.on(s.Prefer)
	}
	if h := p.cfg.NodeHost; h != "" && s.Interface == "" {
		own = p.named(h)
	}
	if own == (Address{}) && (s.Host != "" && s.starts(Scheduler) || isLoopback(s.Host)) {
		own = p.named(s.Host)
	}
	if own == (Address{}) && s.local() && p.chosen != "ibverbs" {
		own = p.m.loopback()
	}
	if own == (Address{}) && s.Host != "" && p.m.Resolve != nil {
		own = p.m.toward(s.Host)
	}
	p.own = cmp.Or(own, p.m.outer(), p.m.loopback())
	s.Host = cmp.Or(s.Host, p.own.IP)
	return nil
}

func isLoopback(host string) bool { return host == "localhost" || net.ParseIP(host).IsLoopback() }

// named returns an address that the user has given.
func (p *planner) named(host string) Address {
	return cmp.Or(p.m.at(host), Address{"host", host})
}

// The ports that are tried: from a default port upwards, else random ports below the range that kernels assign to
// outgoing connections. A port in that range could be taken before the scheduler starts, even by a node that connects
// to the scheduler.
const (
	portsToTry  = 100
	firstRandom = 20000
	randomPorts = 10000
)

func (p *planner) port() error {
	s := &p.Spec
	s.Port = cmp.Or(s.Port, p.cfg.RootPort)
	switch {
	case s.Port != 0:
		return nil
	case s.DefaultPort == 0 && !s.starts(Scheduler):
		return exit.Usage("no scheduler port: give --port or set DMLC_PS_ROOT_PORT")
	case s.DefaultPort == 0 && !s.local():
		return exit.Usage("no port: give --port or set DMLC_PS_ROOT_PORT, the same on all nodes")
	case !s.local():
		s.Port = s.DefaultPort
		return nil
	}
	var first error
	for i := range portsToTry {
		try := s.DefaultPort + i
		if s.DefaultPort == 0 {
			try = firstRandom + rand.IntN(randomPorts)
		}
		err := p.m.Free(s.Host, try)
		if err == nil {
			if i > 0 && s.DefaultPort != 0 {
				p.say("port %d is in use: using %d", s.DefaultPort, try)
			}
			s.Port = try
			return nil
		}
		first = cmp.Or(first, err)
		if try >= 65535 {
			break
		}
	}
	return exit.Usage("no free port on %s: %w", s.Host, first)
}

// cluster sets the cluster's name, which keeps processes of an earlier run at the same port out of the cluster.
// Launchers on several machines do not know of each other; there only the user can set the name.
func (p *planner) cluster() {
	if p.Spec.local() && !p.has("STEPAF_CLUSTER_ID") {
		p.set = append(p.set, Default{Name: "STEPAF_CLUSTER_ID", Value: fmt.Sprintf("launch-%016x", random.Uint64())})
	}
}

// foreign is the variable that admits C++ nodes, which know neither a secret nor a cluster's name.
const foreign = "STEPAF_FOREIGN"

// secret decides whether Run creates a secret. On several machines only the user can set the same secret everywhere. If
// no secret is set and other machines reach the nodes, a message warns of the consequences.
func (p *planner) secret() error {
	if _, err := p.cfg.ReadSecret(); err != nil { // otherwise each child would report it
		return exit.With(exit.Misuse, fmt.Errorf("environment: %w", err))
	}
	seen := map[string]bool{} // only the first default of a name is used
	decides := func(d Default) bool {
		if seen[d.Name] {
			return false
		}
		seen[d.Name] = d.Role == ""
		return d.Name == "STEPAF_SECRET" || d.Name == "STEPAF_SECRET_FILE" || !p.has(d.Name) && (d.Name == "STEPAF_AUTH" && d.Value == env.AuthOff || d.Name == foreign && d.Value == "1")
	}
	switch {
	case p.cfg.HasSecret() || p.cfg.Auth == env.AuthOff || p.cfg.Foreign || slices.ContainsFunc(p.Spec.Defaults, decides):
	case p.Spec.local():
		p.MakesSecret = !p.Spec.NoSecret
	case !isLoopback(p.own.IP):
		p.say("no secret is set: any process that reaches %s can join the cluster, and read and change its tensors; set STEPAF_SECRET_FILE on all machines "+
			`("stepaf secret" makes one), or STEPAF_AUTH=off if only trusted machines reach it`, p.own.IP)
	}
	return nil
}

// children makes the processes: scheduler, servers, workers.
func (p *planner) children() {
	s := &p.Spec
	if s.starts(Scheduler) {
		p.add(Child{Role: "scheduler", Argv: s.SchedulerCommand})
	}
	groups := func(role string, n int, argv []string) {
		if !s.starts(role) {
			return
		}
		first := 0
		if !s.local() {
			first, n = s.NodeRank, s.NodeRank+1
		}
		for g := first; g < n; g++ {
			for i, gpu := range s.GPUs {
				p.add(Child{Role: role, Group: g, Instance: i, Rank: g*s.GroupSize + i, GPU: gpu, Argv: argv})
			}
		}
	}
	groups("server", s.Servers, s.ServerCommand)
	groups("worker", s.Workers, s.WorkerCommand)
}

// placed are the variables of a node's place in the cluster. In the environment they are those of the launcher, not of
// the child.
var placed = []string{"DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_GROUP_SIZE", "DMLC_NODE_RANK",
	"DMLC_RANK_OFFSET", "DMLC_INSTANCE_ID", "STEPMESH_GPU", "STEPAF_GPU", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NODE_HOST"}

func (p *planner) add(c Child) {
	s := &p.Spec
	for _, kv := range p.environ {
		if name, _, _ := strings.Cut(kv, "="); !slices.Contains(placed, name) {
			c.Env = append(c.Env, kv)
		}
	}
	put := func(name string, value any) { c.Env = append(c.Env, fmt.Sprintf("%s=%v", name, value)) }
	put("DMLC_ROLE", c.Role)
	put("DMLC_NUM_WORKER", s.Workers)
	put("DMLC_NUM_SERVER", s.Servers)
	put("DMLC_GROUP_SIZE", s.GroupSize)
	put("DMLC_NODE_RANK", c.Group)
	put("STEPMESH_GPU", c.GPU)
	if c.GPU != c.Instance {
		put("DMLC_RANK_OFFSET", c.Instance-c.GPU)
	}
	put("DMLC_PS_ROOT_URI", s.Host)
	put("DMLC_PS_ROOT_PORT", s.Port)
	// A node host would have precedence over an interface that the user has named.
	if p.cfg.NodeHost != "" || p.cfg.Interface == "" || strings.EqualFold(p.cfg.Interface, auto) || s.Interface != "" {
		put("DMLC_NODE_HOST", p.own.IP)
	}
	// Python buffers output to a pipe. The buffer is lost if the process is killed.
	if _, set := p.lookup("PYTHONUNBUFFERED"); !set {
		put("PYTHONUNBUFFERED", 1)
	}
	// Choices of Resolve precede the user's defaults.
	done := map[string]bool{}
	for _, d := range slices.Concat(p.set, s.Defaults) {
		if d.Role != "" && d.Role != c.Role || done[d.Name] || p.has(d.Name) || slices.Contains(placed, d.Name) {
			continue
		}
		done[d.Name] = true
		put(d.Name, d.Value)
	}
	p.Children = append(p.Children, c)
}

// cores disables binding to CPU cores for all children if two threads would share a core or a core does not exist,
// unless the user has asked for binding. The formula of C++ StepMesh assumes one process for each GPU, on a machine
// with two sockets of 48 cores.
func (p *planner) cores() {
	if p.has("STEPMESH_BIND_CPU_CORE") {
		return
	}
	why := clash(p.Children, p.m.Cores)
	if why == "" {
		return
	}
	p.say("not binding threads to CPU cores: %s", why)
	for i := range p.Children {
		p.Children[i].Env = append(p.Children[i].Env, "STEPMESH_BIND_CPU_CORE=0")
	}
}

// clash returns the reason why the children cannot be bound on a machine with so many cores, or "".
func clash(children []Child, cores int) string {
	owner := map[int]string{}
	for i := range children {
		c := &children[i]
		if c.Role == "scheduler" {
			continue
		}
		cfg, err := env.LoadFrom(env.FromList(c.Env))
		if err != nil || !cfg.BindCPUCore {
			continue // the child reports the error
		}
		offsets := []int{env.CoreReceiver, env.CorePoller, env.CoreSender}
		if c.Role == "server" {
			offsets[2] = env.CoreResponder
		}
		for _, o := range offsets {
			core := cfg.Core(o)
			if core >= cores {
				return fmt.Sprintf("%s would need core %d of %d", c.Name(), core, cores)
			}
			if other := owner[core]; other != "" && other != c.Name() {
				return fmt.Sprintf("%s and %s would share core %d", other, c.Name(), core)
			}
			owner[core] = c.Name()
		}
	}
	return ""
}
