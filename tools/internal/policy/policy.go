// Package policy is the command "stepaf policy": it sets, through the scheduler, how the nodes of a running cluster
// send data.
package policy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

const description = `Changes how the nodes of a running cluster send data, without a restart: rates, traffic
classes (DSCP) and the order of a communicator's requests. Without a subcommand it lists
the policies and the nodes that apply them.

    stepaf policy                                     list
    stepaf policy set --peer worker:0 --rate 100M     each node sends at most 100,000,000
                                                      bytes per second to worker 0
    stepaf policy set --peer worker:0 --class 46      its packets to worker 0 have DSCP 46
    stepaf policy set --app 7 --rate 5M               limit application 7, to each peer
    stepaf policy set --comm 0 --order ring           communicator 0 requests data in a ring
    stepaf policy clear --peer worker:0               remove; or: clear --all

The command connects to the scheduler at DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or
--scheduler. It needs DMLC_ENABLE_RDMA and DMLC_INTERFACE as the nodes have them. A policy
lasts until the cluster ends. C++ StepMesh nodes do not receive policies. docs/policy.md
describes the effect of each policy.`

// Command returns "stepaf policy".
func Command() *cli.Command {
	reach := []cli.Flag{
		&cli.StringFlag{Name: "scheduler", Usage: "`HOST:PORT` of the scheduler (default: DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT)"},
		&cli.DurationFlag{Name: "timeout", Value: 10 * time.Second, Usage: "time limit, including the time until the nodes have received a policy"},
	}
	target := []cli.Flag{
		&cli.StringFlag{Name: "peer", Usage: "data that other nodes send to this `NODE`: worker:RANK or server:RANK"},
		&cli.IntFlag{Name: "app", Usage: "data of the application with this `ID`"},
		&cli.IntFlag{Name: "comm", Usage: "data of the communicator (af/collective) with this `ID`"},
	}
	action := func(f func(*cli.Context) (string, error)) cli.ActionFunc {
		return func(c *cli.Context) error {
			if c.Args().Present() {
				return exit.Usage("policy: unexpected argument %q: want set, clear, or nothing", c.Args().First())
			}
			question, err := f(c)
			if err != nil {
				return err
			}
			ctx, cancel := exit.Interruptible(c.Context)
			defer cancel()
			return run(ctx, c, question)
		}
	}
	return &cli.Command{
		Name: "policy", Usage: "limit rates, mark traffic and order collectives in a running cluster", Description: description,
		ArgsUsage: " ", HideHelpCommand: true, Flags: reach,
		Action: action(func(*cli.Context) (string, error) { return "list", nil }),
		Subcommands: []*cli.Command{
			{
				Name: "set", Usage: "set a rate, a traffic class or an order; options that are not given stay as they are", ArgsUsage: " ",
				Description: "    stepaf policy set --peer worker:0 --rate 100M --class 46\n    stepaf policy set --comm 0 --order ring", HideHelpCommand: true,
				Flags: append(append([]cli.Flag{
					&cli.StringFlag{Name: "rate", Usage: "`BYTES` per second from each node to each peer, such as 5000000, 5M or 1G"},
					&cli.IntFlag{Name: "class", Usage: "traffic class of a peer, the DSCP, `0 to 63`"},
					&cli.StringFlag{Name: "order", Usage: "order of a communicator's requests: " + strings.Join(membership.Orders, " or ")},
				}, target...), reach...),
				Action: action(set),
			},
			{
				Name: "clear", Usage: "remove the policy of one target, or with --all all policies", ArgsUsage: " ",
				Description: "    stepaf policy clear --peer worker:0\n    stepaf policy clear --all", HideHelpCommand: true,
				Flags: append(append([]cli.Flag{&cli.BoolFlag{Name: "all", Usage: "all policies"}}, target...), reach...),
				Action: action(func(c *cli.Context) (string, error) {
					if c.Bool("all") && !c.IsSet("peer") && !c.IsSet("app") && !c.IsSet("comm") {
						return "clear all", nil
					}
					t, _, err := targetOf(c, ", --all")
					return "clear " + t.Target(), err
				}),
			},
		},
	}
}

// targetOf reads the option that names the target of a policy. It returns the option as well, as on the command line: the scheduler uses
// numbers.
func targetOf(c *cli.Context, others string) (p membership.Policy, option string, err error) {
	var given []string
	for _, f := range []string{"peer", "app", "comm", "all"} {
		if c.IsSet(f) {
			given = append(given, "--"+f)
		}
	}
	if len(given) != 1 {
		return p, "", exit.Usage("policy %s: %d targets (%s): want one of --peer, --app, --comm%s", c.Command.Name, len(given), strings.Join(given, " "), others)
	}
	option = fmt.Sprintf("%s %v", given[0], c.Value(given[0][len("--"):]))
	app := c.Int("app")
	switch given[0] {
	case "--peer":
		role, rank, _ := strings.Cut(c.String("peer"), ":")
		r, err := strconv.Atoi(rank)
		if err != nil || r < 0 || r > (van.Empty-9)/2 || role != "worker" && role != "server" {
			return p, "", exit.Usage("--peer %s: want worker:RANK or server:RANK", c.String("peer"))
		}
		if p.Peer = van.ServerID(r); role == "worker" {
			p.Peer = van.WorkerID(r)
		}
		return p, option, nil
	case "--comm":
		if app, err = commlayer.AppOf(c.Int("comm")); err != nil {
			return p, "", exit.Usage("--comm %d: %w", c.Int("comm"), err)
		}
	}
	if app < 0 || app > 1<<31-1 {
		return p, "", exit.Usage("--app %d: want 0 to 2147483647", app)
	}
	p.App = int32(app)
	return p, option, nil
}

func set(c *cli.Context) (string, error) {
	p, option, err := targetOf(c, "")
	if err != nil {
		return "", err
	}
	if c.IsSet("rate") {
		if p.Rate, err = rateOf(c.String("rate")); err != nil {
			return "", err
		}
	}
	if n := c.Int("class"); c.IsSet("class") {
		if n < 0 || n > membership.MaxClass {
			return "", exit.Usage("--class %d: want 0 to %d, the DSCP", n, membership.MaxClass)
		}
		p.Class = membership.Class0 + n
	}
	if p.Order = c.String("order"); p.Order != "" && !c.IsSet("comm") {
		return "", exit.Usage("--order %s: want --comm with it: only communicators have an order", p.Order)
	}
	if p.Rate == 0 && p.Class == 0 && p.Order == "" {
		return "", exit.Usage("policy set: nothing to set for %s: want --rate, --class or --order", option)
	}
	if _, err := membership.ParsePolicy(p.String()); err != nil {
		return "", exit.With(exit.Misuse, err)
	}
	return "set " + p.String(), nil
}

func rateOf(s string) (int64, error) {
	digits, unit := strings.TrimRight(s, "kKMG"), int64(1)
	switch s[len(digits):] {
	case "":
	case "k", "K":
		unit = 1000
	case "M":
		unit = 1000_000
	case "G":
		unit = 1000_000_000
	default:
		digits = ""
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 1 || n > membership.MaxRate/unit || n*unit < membership.MinRate {
		return 0, exit.Usage("--rate %s: want %d to %d bytes in a second, also as 1k, 5M or 1G", s, membership.MinRate, membership.MaxRate)
	}
	return n * unit, nil
}

// flagOf returns the value of a flag of the command, or of its parent command.
func flagOf[T any](c *cli.Context, name string, get func(*cli.Context, string) T) T {
	for _, l := range c.Lineage() {
		if l.Command != nil && l.IsSet(name) {
			return get(l, name)
		}
	}
	return get(c, name)
}

// run sends the request, waits until the nodes have answered, and prints the list.
func run(ctx context.Context, c *cli.Context, question string) error {
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return exit.With(exit.Misuse, err)
	}
	if _, err := cfg.ReadSecret(); err != nil {
		return exit.With(exit.Misuse, err)
	}
	if s := flagOf(c, "scheduler", (*cli.Context).String); s != "" {
		host, port, err := net.SplitHostPort(s)
		if cfg.RootURI = host; err == nil {
			cfg.RootPort, err = strconv.Atoi(port)
		}
		if err != nil || host == "" || cfg.RootPort < 1 || cfg.RootPort > 65535 {
			return exit.Usage("--scheduler %s: want HOST:PORT", s)
		}
	}
	switch limit := flagOf(c, "timeout", (*cli.Context).Duration); {
	case cfg.RootURI == "" || cfg.RootPort == 0:
		return exit.Usage("which cluster? DMLC_PS_ROOT_URI=%q DMLC_PS_ROOT_PORT=%d: want both, or --scheduler HOST:PORT", cfg.RootURI, cfg.RootPort)
	case limit <= 0:
		return exit.Usage("--timeout %v: want more than 0", limit)
	default:
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	if target, clears := strings.CutPrefix(question, "clear "); clears && target != "all" {
		lines, err := cluster.AskScheduler(ctx, cfg, nil, "list")
		if err != nil {
			return fmt.Errorf("policy: %w", err)
		}
		if !slices.ContainsFunc(lines, func(l string) bool {
			t, _, _ := strings.Cut(strings.Fields(l)[0], ",")
			return t == target
		}) {
			p, _ := membership.ParsePolicy(target) // the target was formatted by this command
			return fmt.Errorf("policy clear: nothing is set for %s: \"stepaf policy\" lists what is", targetName(&p))
		}
	}
	lines, err := cluster.AskScheduler(ctx, cfg, nil, question)
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	for err == nil && question != "list" && strings.Contains(strings.Join(lines, " "), " asked=") {
		select { // nodes answer quickly; nodes that do not are listed
		case <-time.After(100 * time.Millisecond):
			var now []string
			if now, err = cluster.AskScheduler(ctx, cfg, nil, "list"); err == nil {
				lines = now
			}
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return finish(ctx, c.App.Writer, lines, err)
}

// finish prints the list. It returns an error if err kept nodes from answering.
func finish(ctx context.Context, out io.Writer, lines []string, err error) error {
	if shown := show(out, lines); shown != nil || err == nil {
		return shown
	}
	status := exit.Failure
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		status, err = exit.Timeout, errors.New("--timeout has passed")
	}
	return exit.With(status, fmt.Errorf("policy: the scheduler has it and sends it to all nodes again, but not all have answered: %w", err))
}

// show prints the scheduler's answers as a table.
func show(out io.Writer, lines []string) error {
	if len(lines) == 0 {
		_, err := fmt.Fprintln(out, "no policies are set")
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "TARGET\tRATE\tCLASS\tORDER\tIN FORCE\tNOT IN FORCE")
	for len(lines) > 0 {
		words := strings.Fields(lines[0])
		p, err := membership.ParsePolicy(words[0])
		if err != nil {
			return fmt.Errorf("policy: the scheduler's answer %q: %w", lines[0], err)
		}
		for lines = lines[1:]; len(lines) > 0; lines = lines[1:] { // more nodes of the same policy
			more := strings.Fields(lines[0])
			if more[0] != words[0] {
				break
			}
			words = append(words, more[1:]...)
		}
		rate, class := "-", "-"
		if p.Rate > 0 {
			rate = strconv.FormatInt(p.Rate, 10) + " B/s"
		}
		if p.Class > 0 {
			class = strconv.Itoa(p.Class - membership.Class0)
		}
		var in, not []string
		for _, word := range words[1:] {
			if state, ids, _ := strings.Cut(word, "="); state == "in-force" {
				in = append(in, names(ids))
			} else {
				not = append(not, names(ids)+" ("+states[state]+")")
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", targetName(&p), rate, class,
			cmp.Or(p.Order, "-"), cmp.Or(strings.Join(in, " "), "-"), cmp.Or(strings.Join(not, ", "), "-"))
	}
	return w.Flush()
}

// states returns the reasons why nodes do not apply a policy.
var states = map[string]string{
	"pending":  "waits for a connection, or the application",
	"unfit":    "the transport cannot",
	"asked":    "no answer yet",
	"dead":     "lost",
	"original": "C++ StepMesh",
}

func targetName(p *membership.Policy) string {
	if p.Peer != 0 {
		return nodeName(p.Peer)
	}
	if id, ok := commlayer.IDOf(int(p.App)); ok {
		return "comm " + strconv.Itoa(id)
	}
	return "app " + strconv.Itoa(int(p.App))
}

func nodeName(id int) string { return fmt.Sprintf("%s:%d", van.RoleOf(id), van.RankOf(id)) }

func names(ids string) string {
	var l []string
	for _, w := range strings.Split(ids, ",") {
		if id, err := strconv.Atoi(w); err == nil {
			w = nodeName(id)
		}
		l = append(l, w)
	}
	return strings.Join(l, " ")
}
