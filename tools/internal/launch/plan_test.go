package launch

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/env"
)

// Machines of the plans.
func laptop() *Machine {
	return &Machine{Cores: 8, Free: anyPort, Host: host("lo", "127.0.0.1")}
}

func bigNode() *Machine {
	return &Machine{Cores: 192, GPUs: 8, GPUBuild: true, RDMA: true, RDMABuild: true, Free: anyPort,
		Host: host("lo", "127.0.0.1", "eth0", "192.0.2.1", "bond0", "192.0.2.2")}
}

// between has docker's bridge and a link-local address before the interface with the route to 10.77.0.1.
func between() *Machine {
	m := &Machine{Cores: 8, Free: anyPort, Host: host("lo", "127.0.0.1", "docker0", "172.17.0.1", "eth1", "169.254.1.1", "eth2", "10.88.0.2", "eth3", "10.77.0.2")}
	m.Resolve = func(_ context.Context, host string) (netip.Addr, error) { return netip.ParseAddr(host) }
	m.Source = func(dest netip.Addr) (netip.Addr, error) {
		if dest.String() == "10.77.0.1" {
			return netip.MustParseAddr("10.77.0.2"), nil
		}
		return netip.Addr{}, errors.New("no route")
	}
	return m
}

// host has interfaces that are up, each with one address.
func host(namesAndAddrs ...string) (h hostaddr.Host) {
	for x := range slices.Chunk(namesAndAddrs, 2) {
		h.Interfaces = append(h.Interfaces, hostaddr.Interface{Name: x[0], Addrs: []netip.Addr{netip.MustParseAddr(x[1])}, Up: true, Loopback: x[0] == "lo"})
	}
	return h
}

func anyPort(string, int) error { return nil }

// base is a Spec whose programs exist.
func base() Spec {
	self := []string{os.Args[0]}
	return Spec{Part: Joint, NodeRank: -1, Command: self, SchedulerCommand: self}
}

// seen returns what a child reads from its environment.
func seen(t *testing.T, c Child) *env.Config {
	t.Helper()
	cfg, err := env.LoadFrom(env.FromList(c.Env))
	if err != nil {
		t.Fatal(err)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatalf("%s could not start: %v", c.Name(), err)
	}
	return cfg
}

func TestChildren(t *testing.T) {
	for _, c := range []struct {
		name string
		spec func(*Spec)
		env  []string
		want []string // name/node rank/GPU/rank in the child's computation
	}{
		{"default", func(*Spec) {}, nil, []string{"scheduler", "server 0", "worker 0"}},
		{"counts", func(s *Spec) { s.Workers, s.Servers, s.GroupSize = 2, 1, 2 }, nil,
			[]string{"scheduler", "server 0", "server 1", "worker 0", "worker 1", "worker 2", "worker 3"}},
		{"counts of the environment", func(*Spec) {}, []string{"DMLC_NUM_WORKER=2", "DMLC_NUM_SERVER=2", "DMLC_ROLE=server", "DMLC_RANK_OFFSET=7", "STEPAF_GPU=3"},
			[]string{"scheduler", "server 0", "server 1", "worker 0", "worker 1"}},
		{"GPUs", func(s *Spec) { s.GroupSize, s.GPUs = 2, []int{5, 3} }, nil,
			[]string{"scheduler", "server 0", "server 1", "worker 0", "worker 1"}},
		{"server", func(s *Spec) { s.Part, s.Port, s.Servers = Server, 1, 2 }, nil, []string{"scheduler", "server 0"}},
		{"server-slave", func(s *Spec) {
			s.Part, s.Port, s.Host, s.Servers, s.NodeRank, s.GroupSize = ServerSlave, 1, "192.0.2.9", 2, 1, 2
		}, nil,
			[]string{"server 2", "server 3"}},
		{"worker", func(s *Spec) { s.Part, s.Host, s.Workers = Worker, "192.0.2.9", 3 }, []string{"DMLC_NODE_RANK=2", "DMLC_PS_ROOT_PORT=5"}, []string{"worker 2"}},
		{"scheduler", func(s *Spec) { s.Part, s.Port = Scheduler, 1 }, nil, []string{"scheduler"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := base()
			c.spec(&s)
			p, err := Resolve(s, c.env, laptop())
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, child := range p.Children {
				got = append(got, child.Name())
				cfg := seen(t, child)
				if cfg.Role != child.Role {
					t.Errorf("%s: role %s", child.Name(), cfg.Role)
				}
				if child.Role != "scheduler" && cfg.Rank() != child.Rank {
					t.Errorf("%s: computes rank %d", child.Name(), cfg.Rank())
				}
				if s.GPUs != nil && child.Role != "scheduler" && cfg.GPU != s.GPUs[child.Instance] {
					t.Errorf("%s: GPU %d, want %d", child.Name(), cfg.GPU, s.GPUs[child.Instance])
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("children %q, want %q", got, c.want)
			}
		})
	}
}

// script is a Spec of the launch scripts for this machine.
func script(s *Spec) {
	s.DefaultVan, s.DefaultBackend, s.GroupSize, s.DefaultPort = auto, auto, Auto, 8123
	s.Defaults = []Default{{"", "STEPMESH_SPLIT_QP_LAG", "1"}, {"", "STEPMESH_BIND_CPU_CORE", "1"}, {"worker", "STEPMESH_CPU_START_OFFSET", "55"}}
}

func TestChoices(t *testing.T) {
	for _, c := range []struct {
		name     string
		machine  *Machine
		spec     func(*Spec)
		env      []string
		messages []string
		check    func(c *env.Config) bool
		group    int
	}{
		{"nothing there", laptop(), script, nil,
			[]string{"no CUDA device, no RDMA device: using 2 instances in each group, backend CPU and van zmq on lo (127.0.0.1)"},
			func(c *env.Config) bool {
				return c.VanType == "zmq" && c.Backend == "CPU" && !c.BindCPUCore && !c.SplitQPLag && c.NodeHost == "127.0.0.1" && c.RootPort == 8123
			}, 2},
		{"all there", bigNode(), script, nil, []string{"not binding threads to CPU cores: server 4 and worker 0 would share core 59"},
			func(c *env.Config) bool {
				return c.VanType == "ibverbs" && c.Backend == "GPU" && c.SplitQPLag && !c.BindCPUCore && c.NodeHost == "192.0.2.1"
			}, 8},
		{"all there, one each", bigNode(), func(s *Spec) { script(s); s.GroupSize = 1 }, nil, nil,
			func(c *env.Config) bool { return c.BindCPUCore }, 1},
		{"binding asked for", bigNode(), script, []string{"STEPMESH_BIND_CPU_CORE=1"}, nil,
			func(c *env.Config) bool { return c.BindCPUCore }, 8},
		{"the environment is obeyed", bigNode(), script, []string{"DMLC_ENABLE_RDMA=zmq", "STEPMESH_BACKEND=cpu", "STEPMESH_BIND_CPU_CORE=0", "STEPMESH_SPLIT_QP_LAG=0"}, nil,
			func(c *env.Config) bool {
				return c.VanType == "zmq" && c.Backend == "CPU" && !c.SplitQPLag && c.NodeHost == "127.0.0.1"
			}, 2},
		{"no transport in this build", &Machine{Cores: 8, RDMA: true, GPUs: 1, Free: anyPort}, script, nil,
			[]string{"no GPU support in this build, no RDMA transport in this build: using 2 instances in each group, backend CPU and van zmq on lo (127.0.0.1)"},
			func(c *env.Config) bool { return c.VanType == "zmq" }, 2},
		{"the interface named", bigNode(), func(s *Spec) { s.Interface = "bond0" }, []string{"DMLC_NODE_HOST=192.0.2.1"}, nil,
			func(c *env.Config) bool { return c.NodeHost == "192.0.2.2" && c.RootURI == "192.0.2.2" }, 1},
		{"the interface preferred", bigNode(), func(s *Spec) { s.Part, s.Port, s.Prefer = Server, 9, "bond0" }, nil, nil,
			func(c *env.Config) bool { return c.NodeHost == "192.0.2.2" }, 1},
		{"the interface preferred is not there", bigNode(), func(s *Spec) { s.Part, s.Port, s.Prefer = Server, 9, "ib7" }, nil, nil,
			func(c *env.Config) bool { return c.NodeHost == "192.0.2.1" }, 1},
		{"an interface of the environment", bigNode(), func(*Spec) {}, []string{"DMLC_INTERFACE=eth0"}, nil,
			func(c *env.Config) bool { return c.NodeHost == "" && c.Interface == "eth0" }, 1},
		{"a worker of a scheduler on this machine", bigNode(), func(s *Spec) { s.Part, s.Host, s.Port = Worker, "127.0.0.1", 9 }, nil, nil,
			func(c *env.Config) bool { return c.NodeHost == "127.0.0.1" }, 1},
		{"a worker of a scheduler elsewhere", between(), func(s *Spec) { s.Part, s.Host, s.Port = Worker, "10.77.0.1", 9 }, nil, nil,
			func(c *env.Config) bool { return c.NodeHost == "10.77.0.2" }, 1},
		{"a worker of a scheduler that no interface leads to", between(), func(s *Spec) { s.Part, s.Host, s.Port = Worker, "elsewhere", 9 }, nil, nil,
			func(c *env.Config) bool { return c.NodeHost == "10.88.0.2" }, 1},
		{"a scheduler that others reach", between(), func(s *Spec) { s.Part, s.Port = Server, 9 }, nil, nil,
			func(c *env.Config) bool { return c.RootURI == "10.88.0.2" }, 1},
		{"a default for a role", laptop(), func(s *Spec) { s.Defaults = []Default{{"worker", "PS_VERBOSE", "3"}, {"", "PS_VERBOSE", "1"}} }, nil, nil,
			func(c *env.Config) bool {
				return c.Verbose == map[string]int{"worker": 3}[c.Role] || c.Role != "worker" && c.Verbose == 1
			}, 1},
		{"a busy default port", &Machine{Cores: 1, Free: func(_ string, p int) error {
			if p < 8125 {
				return errors.New("in use")
			}
			return nil
		}}, func(s *Spec) { s.DefaultPort = 8123 }, nil, []string{"port 8123 is in use: using 8125"},
			func(c *env.Config) bool { return c.RootPort == 8125 }, 1},
		{"any port", laptop(), func(*Spec) {}, nil, nil,
			func(c *env.Config) bool { return c.RootPort >= 20000 && c.RootPort < 30000 }, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := base()
			c.spec(&s)
			p, err := Resolve(s, append(c.env, "STEPAF_AUTH=off"), c.machine) // other tests cover the secret
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(p.Messages, c.messages) {
				t.Errorf("messages %q, want %q", p.Messages, c.messages)
			}
			if p.Spec.GroupSize != c.group {
				t.Errorf("group size %d, want %d", p.Spec.GroupSize, c.group)
			}
			for _, child := range p.Children {
				if cfg := seen(t, child); !c.check(cfg) {
					t.Errorf("%s is started with %q", child.Name(), child.Env)
				}
			}
		})
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct {
		name    string
		machine *Machine
		spec    func(*Spec)
		env     []string
		want    string
	}{
		{"no command", laptop(), func(s *Spec) { s.Command = nil }, nil, "no command for the servers"},
		{"no worker command", laptop(), func(s *Spec) { s.ServerCommand, s.Command = s.Command, nil }, nil, "no command for the workers"},
		{"no such command", laptop(), func(s *Spec) { s.Command = []string{"/no/such/program"} }, nil, "/no/such/program"},
		{"negative timeout", laptop(), func(s *Spec) { s.Timeout = -time.Second }, nil, "--timeout -1s: want 0 or more"},
		{"negative grace", laptop(), func(s *Spec) { s.Grace = -time.Second }, nil, "--grace -1s: want 0 or more"},
		{"negative kill-after", laptop(), func(s *Spec) { s.KillAfter = -time.Second }, nil, "--kill-after -1s: want 0 or more"},
		{"too many workers", laptop(), func(s *Spec) { s.Workers = 99999999 }, nil, "99999999 workers with 1 instances in each group: want at most 16379"},
		{"too many servers", laptop(), func(s *Spec) { s.Servers, s.GroupSize = 8190, 2 }, nil, "8190 servers with 2 instances in each group: want at most 16379"},
		{"too large a group", laptop(), func(s *Spec) { s.GroupSize = 1 << 40 }, nil, "1 workers with 1099511627776 instances"},
		{"GPUs and group", laptop(), func(s *Spec) { s.GPUs, s.GroupSize = []int{0, 1}, 3 }, nil, "2 GPUs for groups of 3"},
		{"rank", laptop(), func(s *Spec) { s.Part, s.Host, s.Port, s.NodeRank = Worker, "127.0.0.1", 1, 1 }, nil, "node rank 1, but there are 1 workers"},
		{"worker without scheduler", laptop(), func(s *Spec) { s.Part = Worker }, nil, "no scheduler address"},
		{"scheduler of no host", laptop(), func(s *Spec) { s.Host = "0.0.0.0" }, nil, "--host 0.0.0.0: it names no host that others can connect to"},
		{"worker without port", laptop(), func(s *Spec) { s.Part, s.Host = Worker, "127.0.0.1" }, nil, "no scheduler port"},
		{"server without port", laptop(), func(s *Spec) { s.Part = Server }, nil, "no port"},
		{"interface", bigNode(), func(s *Spec) { s.Interface = "eth" }, nil, `no interface "eth" with an IPv4 address: this machine has lo (127.0.0.1), eth0 (192.0.2.1), bond0 (192.0.2.2)`},
		{"RDMA asked for", laptop(), script, []string{"DMLC_ENABLE_RDMA=ibverbs"}, "DMLC_ENABLE_RDMA=ibverbs, but there is no RDMA device"},
		{"GPU asked for", laptop(), script, []string{"STEPMESH_BAKCEND=GPU"}, "STEPMESH_BAKCEND=GPU, but this machine has no CUDA device"},
		{"RDMA needed", laptop(), func(s *Spec) { s.Part, s.Port, s.DefaultVan = Server, 1, "ibverbs" }, nil, "set DMLC_ENABLE_RDMA=zmq on all nodes"},
		{"GPU needed", laptop(), func(s *Spec) { s.Part, s.Port, s.DefaultBackend = Server, 1, "GPU" }, nil, "set STEPMESH_BAKCEND=CPU"},
		{"too few GPUs", bigNode(), func(s *Spec) { s.DefaultBackend, s.GroupSize = "GPU", 9 }, nil, "GPU 8 of an instance, but this machine has 8"},
		{"nothing free", &Machine{Free: func(string, int) error { return errors.New("in use") }}, func(*Spec) {}, nil, "no free port on 127.0.0.1: in use"},
		{"nonsense in the environment", laptop(), func(*Spec) {}, []string{"PS_VERBOSE=yes"}, `PS_VERBOSE="yes": want`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := base()
			c.spec(&s)
			_, err := Resolve(s, c.env, c.machine)
			if err == nil || !strings.Contains(err.Error(), c.want) || exit.Status(err) != exit.Misuse {
				t.Errorf("error %v, status %d; want %q and status 2", err, exit.Status(err), c.want)
			}
		})
	}
}

func TestParseDefault(t *testing.T) {
	for in, want := range map[string]Default{
		"A=1":        {"", "A", "1"},
		"worker:A=":  {"worker", "A", ""},
		"A=b:c=d":    {"", "A", "b:c=d"},
		"server:A=x": {"server", "A", "x"},
	} {
		if got, err := ParseDefault(in); err != nil || got != want {
			t.Errorf("ParseDefault(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "A", "=1", "wörker:A=1", "worker:=1"} {
		if d, err := ParseDefault(in); exit.Status(err) != exit.Misuse {
			t.Errorf("ParseDefault(%q) = %v, %v; want an error of usage", in, d, err)
		}
	}
}

// TestClusterName: all processes of a launch have a cluster name that no other launch has. On several machines they
// have the user's name, or none.
func TestClusterName(t *testing.T) {
	names := func(spec func(*Spec), environ ...string) []string {
		s := base()
		spec(&s)
		p, err := Resolve(s, environ, laptop())
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, c := range p.Children {
			all = append(all, seen(t, c).ClusterID)
		}
		return slices.Compact(all)
	}
	local := func(*Spec) {}
	share := func(s *Spec) { s.Part, s.Port = Server, 1 }
	a, b := names(local), names(local)
	if len(a) != 1 || len(b) != 1 || a[0] == "" || a[0] == b[0] {
		t.Errorf("two launches have the names %q and %q, want one each, that differ", a, b)
	}
	for _, x := range []struct {
		spec func(*Spec)
		env  []string
		want string
	}{{local, []string{"STEPAF_CLUSTER_ID=mine"}, "mine"}, {share, []string{"STEPAF_CLUSTER_ID=mine"}, "mine"}, {share, nil, ""}} {
		if got := names(x.spec, x.env...); len(got) != 1 || got[0] != x.want {
			t.Errorf("with %q the names are %q, want %q", x.env, got, x.want)
		}
	}
}

// TestDetectAddresses: this machine has its own addresses, and each leads to itself, also if several interfaces have it.
func TestDetectAddresses(t *testing.T) {
	m := Detect(func(string) (string, bool) { return "", false }, 1)
	again := slices.Clone(m.Interfaces)
	for i := range again {
		again[i].Name += "-again"
	}
	for _, all := range [][]hostaddr.Interface{m.Interfaces, slices.Concat(m.Interfaces, again)} {
		m := *m
		m.Interfaces = all
		for _, i := range all {
			for _, a := range i.Addrs {
				if !a.Is4() {
					continue
				}
				has := func(at Address) bool {
					return at.IP == a.String() && slices.ContainsFunc(all, func(o hostaddr.Interface) bool { return o.Name == at.Interface && slices.Contains(o.Addrs, a) })
				}
				if got := m.toward(a.String()); i.Up && !has(got) || !has(m.at(a.String())) || !strings.Contains(m.list(), i.Name+" ("+a.String()+")") {
					t.Errorf("toward %s: %+v; this machine has %s", a, got, m.list())
				}
			}
		}
	}
	if got := m.loopback(); got != (Address{"lo", "127.0.0.1"}) {
		t.Errorf("loopback: %+v", got)
	}
	if got := m.toward("no.such.host.invalid"); got != (Address{}) {
		t.Errorf("toward a name without an address: %+v", got)
	}
	if got := new(Machine).list(); got != "none with an IPv4 address" {
		t.Errorf("without interfaces: %s", got)
	}
}

// TestShareSaysWhereItsSchedulerIs: the scheduler logs nothing only if the launcher has chosen an address that no other machine needs.
func TestShareSaysWhereItsSchedulerIs(t *testing.T) {
	for part, quiet := range map[string]bool{"joint": true, "server": false, "scheduler": false} {
		var argv []string
		s := &Spec{}
		app := &cli.App{Flags: flags(s), Action: func(c *cli.Context) error {
			err := s.read(c, "stepaf", os.Args)
			argv = s.SchedulerCommand
			return err
		}}
		if err := app.Run([]string{"launch", "--role", part}); err != nil {
			t.Fatal(err)
		}
		if slices.Contains(argv, "--quiet") != quiet {
			t.Errorf("--role %s: the scheduler is started as %q", part, argv)
		}
	}
}

// TestPythonIsNotBuffered: Python's output appears at once, unless the user's environment has another setting.
func TestPythonIsNotBuffered(t *testing.T) {
	for _, x := range []struct {
		environ, want []string
	}{{nil, []string{"PYTHONUNBUFFERED=1"}}, {[]string{"PYTHONUNBUFFERED="}, []string{"PYTHONUNBUFFERED="}}, {[]string{"PYTHONUNBUFFERED=x"}, []string{"PYTHONUNBUFFERED=x"}}} {
		p, err := Resolve(base(), x.environ, laptop())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range p.Children {
			got := slices.DeleteFunc(slices.Clone(c.Env), func(kv string) bool { return !strings.HasPrefix(kv, "PYTHONUNBUFFERED=") })
			if !slices.Equal(got, x.want) {
				t.Errorf("with %q %s has %q, want %q", x.environ, c.Name(), got, x.want)
			}
		}
	}
}

// TestWords: a command is split as a shell does.
func TestWords(t *testing.T) {
	for in, want := range map[string][]string{
		`numactl -m 0 "x y"`:      {"numactl", "-m", "0", "x y"},
		`'a "b'c \d "e\"f" ''`:    {`a "bc`, "d", `e"f`, ""},
		`/opt/my\ programs/x`:     {"/opt/my programs/x"},
		"":                        nil,
		"  a\tb\nc ":              {"a", "b", "c"},
		`a 'b  c' "d e"f`:         {"a", "b  c", "d ef"},
		`a\ b \'c \\ ""`:          {"a b", "'c", `\`, ""},
		`'a\b' "a\"b" 'it"s'`:     {`a\b`, `a"b`, `it"s`},
		`sh -c 'printf "a\n"'`:    {"sh", "-c", `printf "a\n"`},
		`python3 -c 'print("x")'`: {"python3", "-c", `print("x")`},
	} {
		if got, err := Words(in); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q is %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{`a "b`, `'`, `a 'b" c`} {
		if got, err := Words(in); err == nil || !strings.Contains(err.Error(), "is not closed") {
			t.Errorf("%q is %q, %v", in, got, err)
		}
	}
}
