package bench

// bench session: calls of a session's ranks, compared with push_pulls between the same processes.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/kv/session"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

// callGoal is the goal of a call of an empty function on sessionRanks ranks.
var callGoal = goal{of: "a push_pull of 1 KiB with one of them", limit: 4}

const sessionRanks = 4

func sessionCommand(common []cli.Flag) *cli.Command {
	return &cli.Command{
		Name:      "session",
		Usage:     "calls of a function on all ranks of a session, compared with push_pulls of 1 KiB",
		UsageText: "stepaf bench session --van local [--ranks 4] [--check]",
		Description: "    stepaf bench session --van local --ranks 4\n\n" +
			"Starts a controller and ranks, and times calls of a function that does nothing: from Call to the end of Wait, when\n" +
			"all ranks have run it. Blocks of calls alternate with blocks of push_pulls of 1 KiB each way, from the same worker to\n" +
			"the first of the same servers, and to all of them. All answers are checked.",
		Flags: append([]cli.Flag{
			&cli.IntFlag{Name: "ranks", Value: sessionRanks, Usage: "number of ranks"},
			&cli.IntFlag{Name: "iters", Value: 500, Usage: "calls per block"},
			&cli.BoolFlag{Name: "check", Usage: "with --van local and 4 ranks: exit status 1 if the goal is missed"},
		}, common...),
		Action: runSession,
	}
}

// sessionReport is the JSON line of bench session.
type sessionReport struct {
	Van        string             `json:"van"`
	Ranks      int                `json:"ranks"`
	Calls      int                `json:"calls"`
	Call       quantiles          `json:"call"`
	PushPull   quantiles          `json:"push_pull"`           // with one server
	All        quantiles          `json:"push_pull_all_ranks"` // with all
	comparison                    // of a call with a push_pull with one server
	RatioAll   float64            `json:"ratio_p50_all_ranks"`
	CPU        map[string]float64 `json:"cpu_s"`
	Checked    bool               `json:"checked"`
}

// String names the report in a verdict.
func (r *sessionReport) String() string {
	return fmt.Sprintf("call of %d ranks over %s", r.Ranks, r.Van)
}

func runSession(c *cli.Context) error {
	n, iters, rounds := c.Int("ranks"), c.Int("iters"), c.Int("rounds")
	if n < 1 || iters < 1 || rounds < 1 {
		return exit.Usage("bench session: --ranks %d, --iters %d, --rounds %d: want positive numbers", n, iters, rounds)
	}
	judged := c.String("van") == local && n == sessionRanks
	if c.Bool("check") && !judged {
		return exit.Usage("bench session: --check wants --van local and 4 ranks: there is a goal for that")
	}
	var call, one, all *row
	cpu, err := runCluster(c, c.String("host"), place{}, n, 1, false, func(_ *group, _, workers processes) error {
		call, one, all = workers.row(askCall, "-", 0), workers.row(askOne, "-", 0), workers.row(askAll, "-", 0)
		return inTurns(slices.Repeat([]int{iters}, rounds+1), nil, call, one, all)
	}, "session")
	if err != nil {
		return err
	}
	rep := &sessionReport{Van: c.String("van"), Ranks: n, Calls: iters * rounds, Call: summarize(call.ns[0]), PushPull: summarize(one.ns[0]),
		All: summarize(all.ns[0]), CPU: cpu, Checked: true}
	rep.comparison, rep.RatioAll = rep.Call.to(rep.PushPull), rep.Call.P50/rep.All.P50
	var v verdict
	if judged {
		rep.judge(rep, callGoal, &v)
	}
	if err := show(c, rep); err != nil {
		return err
	}
	return v.check(c)
}

func (r *sessionReport) print(w io.Writer) error {
	fmt.Fprintf(w, "%d calls of an empty function on %d ranks over %s, all checked: %t\n", r.Calls, r.Ranks, r.Van, r.Checked)
	fmt.Fprintf(w, "%-22s %10s %10s %10s %10s\n", "microseconds", "p50", "p90", "p99", "max")
	for _, x := range []struct {
		name string
		q    quantiles
	}{{"call", r.Call}, {"push_pull, 1 KiB", r.PushPull}, {"push_pull, all ranks", r.All}} {
		fmt.Fprintf(w, "%-22s %10.1f %10.1f %10.1f %10.1f\n", x.name, x.q.P50, x.q.P90, x.q.P99, x.q.Max)
	}
	_, err := fmt.Fprintf(w, "a call takes %.2f times a push_pull with one server%s, and %.2f times one with all of them\n",
		r.RatioP50, goal{limit: r.Goal}.text(), r.RatioAll)
	return err
}

// Measurements of bench session: calls, and push_pulls with the first server and with all servers.
const (
	askCall = "call"
	askOne  = "one"
	askAll  = "all"
)

func childSession(c *cli.Context, node *postoffice.Node) error {
	switch node.Role() {
	case van.Server:
		server, err := af.NewServer(node, af.ServerOptions{})
		if err != nil {
			return err
		}
		if err := server.Handle(func(b af.Batch) {
			if err := b.Respond(b.Pushes()); err != nil {
				fmt.Fprintln(os.Stderr, "bench:", err)
			}
		}); err != nil {
			return err
		}
		r, err := session.NewRank(node, session.Options{})
		if err != nil {
			return err
		}
		ran := 0 // functions run one after the other
		if err := errors.Join(
			r.Register("nothing", func(context.Context, []any) (any, error) { ran++; return nil, nil }),
			r.Register("how often", func(context.Context, []any) (any, error) { return ran, nil }),
		); err != nil {
			return err
		}
		return r.Serve(c.Context)
	case van.Worker:
		return callRanks(c, node)
	}
	return nil
}

// callRanks makes the calls that the parent asks for, and checks at the end that the ranks have run all of them.
func callRanks(c *cli.Context, node *postoffice.Node) error {
	ctx := c.Context
	w, err := af.NewWorker(node, af.WorkerOptions{})
	if err != nil {
		return err
	}
	defer w.Close()
	s, err := session.Open(ctx, node, session.Options{})
	if err != nil {
		return err
	}
	defer s.Close()
	calls := int64(0)
	do := map[string]func() error{askOne: pushPuller(ctx, w, 1, af.To{0}), askAll: pushPuller(ctx, w, s.Ranks()), askCall: func() error {
		calls++
		h, err := s.Call(ctx, "nothing")
		if err == nil {
			err = h.Wait(ctx)
			s.Kill(h)
		}
		return err
	}}
	if err := answerLines(c, func(what, _ string, _, n int) (*answer, error) {
		return times(timed(n, func(int) error { return do[what]() }))
	}); err != nil {
		return err
	}
	h, err := s.Call(ctx, "how often")
	if err != nil {
		return err
	}
	for rank := range s.Ranks() {
		v, err := s.Get(ctx, h, rank)
		if err != nil {
			return err
		}
		if v != calls {
			return fmt.Errorf("bench: rank %d has run %v calls, want %d", rank, v, calls)
		}
	}
	return s.Shutdown(ctx)
}

// pushPuller returns a function that makes one checked push_pull of 1 KiB with n servers.
func pushPuller(ctx context.Context, w *af.Worker, n int, opts ...af.CallOption) func() error {
	in, out := bytes.Repeat([]byte{1}, 1<<10), make([]byte, n<<10)
	return func() error {
		in[0]++
		push, err := af.FromBytes(in, af.Uint8, int64(len(in)))
		if err != nil {
			return err
		}
		pulls, lists := make([]af.KeyTensor, n), make([][]af.KeyTensor, n)
		for i := range pulls {
			pulls[i].Key, lists[i] = 2, pulls[i:i+1]
			if pulls[i].Val, err = af.FromBytes(out[i<<10:(i+1)<<10], af.Uint8, 1<<10); err != nil {
				return err
			}
		}
		c, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, lists, opts...)
		if err == nil {
			err = c.Wait(ctx)
		}
		for i := 0; i < n && err == nil; i++ {
			if !bytes.Equal(in, out[i<<10:(i+1)<<10]) {
				err = fmt.Errorf("bench: server %d has answered something else than was pushed", i)
			}
		}
		return err
	}
}
