package launch

import (
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

// The parts of a cluster, named as in the launch scripts.
const (
	Joint       = "joint"        // scheduler, all servers and all workers
	Server      = "server"       // scheduler and one server group
	ServerSlave = "server-slave" // one more server group
	Worker      = "worker"       // one worker group
	Scheduler   = "scheduler"    // the scheduler alone
)

var parts = []string{Joint, Server, ServerSlave, Worker, Scheduler}

// Auto is a Spec.GroupSize: one instance for each GPU, at most 8, or 2 without GPUs.
const Auto = -1

// auto is a value of Spec.DefaultVan and Spec.DefaultBackend: the launcher chooses.
const auto = "auto"

// Default is a variable of the children that is used unless the launcher's own environment sets it. An empty Role means
// all children.
type Default struct{ Role, Name, Value string }

// Spec describes what to start. A field with its zero value is taken from the environment variable named, or from its
// default.
type Spec struct {
	Part      string // one of the constants above
	Workers   int    // groups in the whole cluster; DMLC_NUM_WORKER, 1
	Servers   int    // DMLC_NUM_SERVER, 1
	GroupSize int    // instances of a group, or Auto; DMLC_GROUP_SIZE, 1
	NodeRank  int    // rank of the one group that Server, ServerSlave and Worker start; -1: DMLC_NODE_RANK, 0
	GPUs      []int  // devices of the instances of a group; nil means 0, 1, ...

	Host        string // scheduler's; DMLC_PS_ROOT_URI, this machine's address
	Port        int    // scheduler's; DMLC_PS_ROOT_PORT, DefaultPort
	DefaultPort int    // 0 is any free port
	Interface   string // with the address of this machine; must exist
	Prefer      string // like Interface, but need not exist

	NoSecret bool // create no secret for a cluster with Part Joint

	DefaultVan     string // when DMLC_ENABLE_RDMA is unset; "auto" chooses, "" leaves it unset
	DefaultBackend string // when STEPMESH_BAKCEND is unset; "auto" chooses, "" leaves it unset
	Defaults       []Default

	Command                                        []string // of servers and workers
	SchedulerCommand, ServerCommand, WorkerCommand []string // in place of Command

	Banner string         // printed first; {host} and {port} are the scheduler's
	Notes  []string       // printed to standard error after the banner
	FailOn *regexp.Regexp // a child that prints such a line has failed

	Timeout   time.Duration // of the whole run; 0 means none
	Grace     time.Duration // for servers and scheduler after the last worker
	KillAfter time.Duration // from SIGTERM to SIGKILL
}

// check refuses contradictory values, and fills in the commands.
func (s *Spec) check() error {
	if s.Port > 65535 || s.DefaultPort < 0 || s.DefaultPort > 65535 {
		return exit.Usage("port %d: want 1 to 65535", max(s.Port, s.DefaultPort))
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"timeout", s.Timeout}, {"grace", s.Grace}, {"kill-after", s.KillAfter}} {
		if d.value < 0 {
			return exit.Usage("--%s %s: want 0 or more", d.name, d.value)
		}
	}
	if s.ServerCommand == nil {
		s.ServerCommand = s.Command
	}
	if s.WorkerCommand == nil {
		s.WorkerCommand = s.Command
	}
	for _, p := range []struct {
		role string
		argv []string
	}{{"scheduler", s.SchedulerCommand}, {"server", s.ServerCommand}, {"worker", s.WorkerCommand}} {
		if !s.starts(p.role) {
			continue
		}
		if len(p.argv) == 0 {
			return exit.Usage("no command for the %ss: write it after --, as in: stepaf launch -n 1 -s 1 -- ./program", p.role)
		}
		if _, err := exec.LookPath(p.argv[0]); err != nil {
			return exit.Usage("command of the %ss: %w", p.role, err)
		}
	}
	return nil
}

// local reports whether all nodes are on this machine, so that the launcher may choose transport and backend.
func (s *Spec) local() bool { return s.Part == Joint }

// starts reports whether any child has the role.
func (s *Spec) starts(role string) bool {
	switch role {
	case Scheduler:
		return s.Part == Joint || s.Part == Server || s.Part == Scheduler
	case "server":
		return s.Part == Joint || s.Part == Server || s.Part == ServerSlave
	default:
		return s.Part == Joint || s.Part == Worker
	}
}

// ParseDefault reads [ROLE:]NAME=VALUE.
func ParseDefault(text string) (Default, error) {
	name, value, ok := strings.Cut(text, "=")
	var d Default
	if role, rest, has := strings.Cut(name, ":"); has {
		if role != "scheduler" && role != "server" && role != "worker" {
			return d, exit.Usage("default %q: role %q, want scheduler, server or worker", text, role)
		}
		d.Role, name = role, rest
	}
	if !ok || name == "" {
		return d, exit.Usage("default %q: want [ROLE:]NAME=VALUE", text)
	}
	d.Name, d.Value = name, value
	return d, nil
}

// Words splits a command as a shell does, with quotes and backslashes, but without expansions.
func Words(s string) ([]string, error) {
	var list []string
	var word strings.Builder
	inWord, quote := false, rune(0)
	rs := []rune(s)
	for i := 0; i < len(rs); i++ {
		c := rs[i]
		switch {
		case quote == 0 && strings.ContainsRune(" \t\n", c):
			if inWord {
				list = append(list, word.String())
				word.Reset()
				inWord = false
			}
			continue
		case quote == 0 && (c == '\'' || c == '"'):
			quote = c
		case c == quote:
			quote = 0
		case c == '\\' && quote != '\'' && i+1 < len(rs):
			i++
			word.WriteRune(rs[i])
		default:
			word.WriteRune(c)
		}
		inWord = true
	}
	if quote != 0 {
		return nil, fmt.Errorf("%q: quote %c is not closed", s, quote)
	}
	if inWord {
		list = append(list, word.String())
	}
	return list, nil
}

// Child is one process to start.
type Child struct {
	Role     string
	Group    int // rank of its group
	Instance int // index in the group
	Rank     int // among all instances of the role
	GPU      int
	Argv     []string
	Env      []string
}

// Name is "scheduler", "server 0" or "worker 3".
func (c *Child) Name() string {
	if c.Role == "scheduler" {
		return c.Role
	}
	return c.Role + " " + strconv.Itoa(c.Rank)
}
