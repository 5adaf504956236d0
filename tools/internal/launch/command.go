package launch

import (
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
)

const description = `Starts a scheduler, servers and workers as processes of this machine. Servers and workers
run COMMAND; the scheduler is built in. Each process gets its role and rank in DMLC_ROLE,
DMLC_NODE_RANK, STEPMESH_GPU and other variables ("stepaf env" explains them). The rest of
the environment is passed on unchanged.

    stepaf launch -n 2 -s 1 -- ./program --its-option
    stepaf launch -n 1 -s 1 --group-size 8 -- python3 program.py

Each output line starts with the name of its process, as in "[worker 0] ...".

End: the first process that fails ends the cluster: the other processes get SIGTERM, and
SIGKILL after --kill-after. SIGINT, SIGTERM, --timeout, and the end of the reader of the
output, as in "| head -1", end it in the same way. After all workers have succeeded,
servers and scheduler must end within --grace. Processes that a process leaves running in
its process group are killed.

Several machines: run "stepaf launch" on every machine, with --role server on the first
(it also starts the scheduler) and --role server-slave or --role worker on the others.
These need --host and, from the second group of a role on, --node-rank. All need the same
-n, -s, --group-size and port.

    stepaf launch --role server -n 1 -s 1 --port 8123 -- ./program
    stepaf launch --role worker -n 1 -s 1 --host 10.0.0.1 --port 8123 -- ./program

Secret: a cluster with --role joint gets a secret, so that no other process can join it.
The processes read it from a file in a private directory in TMPDIR; the directory is
removed at the end. No secret is created if STEPAF_SECRET_FILE or STEPAF_SECRET is set,
with --no-secret, with STEPAF_AUTH=off, or with STEPAF_FOREIGN=1. Programs of the C++
library need STEPAF_FOREIGN=1 (--fserver sets it), since they cannot join a cluster that
has a secret. On several machines, set the same STEPAF_SECRET_FILE on all; "stepaf secret"
creates the file.

Exit status: 0 if all processes succeeded; else the status of the first process that
failed (128 plus the number of the signal that ended it); 1 if the launcher failed or a
process did not end; 2 for a wrong command line or environment; 124 after --timeout; 130
and 143 after SIGINT and SIGTERM; 141 after the reader of the output has ended.`

// Command returns "stepaf launch". self is the path of this program, for the built-in scheduler. raw is the whole command
// line, in which the double dash is found.
func Command(self string, raw []string) *cli.Command {
	s := &Spec{}
	return &cli.Command{
		Name:            "launch",
		Usage:           "start a cluster, or this machine's part of it",
		ArgsUsage:       "-- COMMAND [ARGUMENT...]",
		Description:     description,
		HideHelpCommand: true,
		Flags:           flags(s),
		Action: func(c *cli.Context) error {
			if err := s.read(c, self, raw); err != nil {
				return err
			}
			plan, err := Resolve(*s, os.Environ(), Detect(os.LookupEnv, runtime.NumCPU()))
			if err != nil {
				return err
			}
			signals := ends()
			defer signal.Stop(signals)
			return Run(plan, Streams{c.App.Writer, c.App.ErrWriter}, signals, os.LookupEnv)
		},
	}
}

// ends returns a channel of the signals that end a launch. A write to a pipe without a reader raises SIGPIPE. Without Notify,
// SIGPIPE would end this process at once, and the processes of the children would keep running.
func ends() chan os.Signal {
	c := make(chan os.Signal, 2)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	return c
}

const (
	shape    = "Cluster"
	network  = "Network"
	programs = "Programs"
	ending   = "Ending"
	scripted = "For scripts"
)

func flags(s *Spec) []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "workers", Destination: &s.Workers, Aliases: []string{"n"}, Category: shape, DefaultText: "DMLC_NUM_WORKER, else 1", Usage: "worker groups in the cluster"},
		&cli.IntFlag{Name: "servers", Destination: &s.Servers, Aliases: []string{"s"}, Category: shape, DefaultText: "DMLC_NUM_SERVER, else 1", Usage: "server groups in the cluster"},
		&cli.StringFlag{Name: "group-size", Aliases: []string{"g"}, Category: shape, Usage: "processes in each group, or auto: one for each GPU, at most 8; 2 without GPUs", DefaultText: "DMLC_GROUP_SIZE, else 1"},
		&cli.StringFlag{Name: "role", Destination: &s.Part, Category: shape, Value: Joint, Usage: "what to start: joint (everything), server (and scheduler), server-slave, worker, or scheduler"},
		&cli.IntFlag{Name: "node-rank", Destination: &s.NodeRank, Category: shape, Value: -1, DefaultText: "DMLC_NODE_RANK, else 0", Usage: "rank of the group; not with --role joint"},
		&cli.StringFlag{Name: "gpus", Category: shape, Usage: "`LIST` of devices for the processes of a group, as in 0,2 (0,1,...)"},

		&cli.StringFlag{Name: "host", Destination: &s.Host, Category: network, Usage: "scheduler's address (DMLC_PS_ROOT_URI, else this machine's)"},
		&cli.IntFlag{Name: "port", Destination: &s.Port, Aliases: []string{"p"}, Category: network, DefaultText: "DMLC_PS_ROOT_PORT, else any free one", Usage: "scheduler's port"},
		&cli.StringFlag{Name: "interface", Destination: &s.Interface, Category: network, Usage: "network interface whose address the processes use (DMLC_NODE_HOST; else loopback, or the one with the route to the scheduler if the cluster has several machines)"},

		&cli.BoolFlag{Name: "no-secret", Destination: &s.NoSecret, Category: network, Usage: "create no secret for a cluster with --role joint"},

		&cli.StringFlag{Name: "worker-command", Category: programs, Usage: "`COMMAND` of the workers, with arguments, quoted as in a shell"},
		&cli.StringFlag{Name: "server-command", Category: programs, Usage: "`COMMAND` of the servers"},
		&cli.BoolFlag{Name: "fserver", Category: programs, Usage: "COMMAND uses fserver of the C++ library, with init() and stop(): the scheduler takes part in the barrier of stop(), and STEPAF_FOREIGN is set to 1 unless it is set already"},
		&cli.StringFlag{Name: "scheduler-command", Category: programs, Usage: "`COMMAND` of the scheduler (stepaf scheduler)"},

		&cli.DurationFlag{Name: "timeout", Destination: &s.Timeout, Category: ending, DefaultText: "none", Usage: "end the cluster after this time"},
		&cli.DurationFlag{Name: "grace", Destination: &s.Grace, Category: ending, Value: 10 * time.Second, Usage: "time for servers and scheduler to end after the last worker"},
		&cli.DurationFlag{Name: "kill-after", Destination: &s.KillAfter, Category: ending, Value: 5 * time.Second, Usage: "time from SIGTERM to SIGKILL"},
		&cli.StringFlag{Name: "fail-on", Category: ending, Usage: "a process that prints a line matching `REGEXP` has failed"},

		&cli.StringSliceFlag{Name: "default", Category: scripted, Usage: "`[ROLE:]NAME=VALUE` to set for the processes (of that role) unless the environment sets it"},
		&cli.StringFlag{Name: "default-van", Destination: &s.DefaultVan, Category: scripted, Usage: "transport if DMLC_ENABLE_RDMA is unset: auto (ibverbs if there is a device, else zmq), zmq, or ibverbs"},
		&cli.StringFlag{Name: "default-backend", Destination: &s.DefaultBackend, Category: scripted, Usage: "backend if STEPMESH_BAKCEND is unset: auto (GPU if there is one, else CPU), CPU, or GPU"},
		&cli.IntFlag{Name: "default-port", Destination: &s.DefaultPort, Category: scripted, DefaultText: "any", Usage: "port if none is set; with --role joint the next free one from here"},
		&cli.StringFlag{Name: "prefer-interface", Destination: &s.Prefer, Category: scripted, Usage: "like --interface, but it need not exist"},
		&cli.StringFlag{Name: "banner", Destination: &s.Banner, Category: scripted, Usage: "first line to print; {host} and {port} are the scheduler's"},
		&cli.StringSliceFlag{Name: "note", Category: scripted, Usage: "line for standard error, after the banner"},
	}
}

// read reads the command line, besides the options whose destination is a field.
func (s *Spec) read(c *cli.Context, self string, raw []string) error {
	s.Command, s.Notes = c.Args().Slice(), c.StringSlice("note")
	s.SchedulerCommand = []string{self, "scheduler"}
	if s.local() { // only if there are other machines, the scheduler logs its address for them, and the missing nodes
		s.SchedulerCommand = append(s.SchedulerCommand, "--quiet")
	}
	if c.Bool("fserver") {
		s.SchedulerCommand = append(s.SchedulerCommand, "--fserver")
	}
	if !slices.Contains(parts, s.Part) {
		return exit.Usage("--role %s: want one of %s", s.Part, strings.Join(parts, ", "))
	}
	if n := len(s.Command); n > 0 && (len(raw) <= n || raw[len(raw)-n-1] != "--") {
		return exit.Usage("%q is not an option: write -- before the command, as in: stepaf launch -n 1 -s 1 -- %s", s.Command[0], strings.Join(s.Command, " "))
	}
	for _, f := range []struct {
		name  string
		value int
		least int
	}{{"workers", s.Workers, 1}, {"servers", s.Servers, 1}, {"port", s.Port, 1}, {"node-rank", s.NodeRank, 0}} {
		if c.IsSet(f.name) && f.value < f.least {
			return exit.Usage("--%s %d: want at least %d", f.name, f.value, f.least)
		}
	}
	var err error
	if s.GroupSize, err = groupSize(c.String("group-size")); err != nil {
		return err
	}
	if s.GPUs, err = numbers(c.String("gpus")); err != nil {
		return exit.Usage("--gpus %s: %w", c.String("gpus"), err)
	}
	if s.GPUs != nil && s.GroupSize == 0 {
		s.GroupSize = len(s.GPUs)
	}
	for _, f := range []struct {
		name string
		argv *[]string
	}{{"worker-command", &s.WorkerCommand}, {"server-command", &s.ServerCommand}, {"scheduler-command", &s.SchedulerCommand}} {
		text := c.String(f.name)
		if text == "" {
			continue
		}
		if *f.argv, err = Words(text); err != nil {
			return exit.Usage("--%s: %w", f.name, err)
		}
	}
	if text := c.String("fail-on"); text != "" {
		if s.FailOn, err = regexp.Compile(text); err != nil {
			return exit.Usage("--fail-on: %w", err)
		}
	}
	for _, text := range c.StringSlice("default") {
		d, err := ParseDefault(text)
		if err != nil {
			return err
		}
		s.Defaults = append(s.Defaults, d)
	}
	if c.Bool("fserver") {
		s.Defaults = append(s.Defaults, Default{Name: foreign, Value: "1"})
	}
	return nil
}

func groupSize(text string) (int, error) {
	switch text {
	case "":
		return 0, nil
	case auto:
		return Auto, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, exit.Usage("--group-size %s: want a number from 1, or auto", text)
	}
	return n, nil
}

// numbers reads a list such as 0,2,3; an empty one is nil.
func numbers(text string) ([]int, error) {
	if text == "" {
		return nil, nil
	}
	var list []int
	for f := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(f))
		if err != nil || n < 0 {
			return nil, fmt.Errorf("want numbers from 0 separated by commas, as in 0,1,2")
		}
		list = append(list, n)
	}
	return list, nil
}
