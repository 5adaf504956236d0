// Package bench is the command "stepaf bench": round trips between processes, compared with the floor of plain TCP on
// the same machine in the same run.
package bench

import (
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

// Command returns "stepaf bench".
func Command() *cli.Command {
	common := []cli.Flag{
		&cli.StringFlag{Name: "van", Value: zmq, Usage: "transport (a value of DMLC_ENABLE_RDMA), or local: shared memory"},
		&cli.StringFlag{Name: "host", Usage: "address of the processes (default: 127.0.0.1; with ibverbs the address of an RDMA port, chosen as a node does)"},
		&cli.IntFlag{Name: "rounds", Value: 10, Usage: "blocks of measurements; they alternate with blocks of the floor"},
		&cli.DurationFlag{Name: "timeout", Value: 5 * time.Minute, Usage: "time limit"},
		&cli.BoolFlag{Name: "json", Usage: "print one line of JSON instead of a table"},
	}
	bench := &cli.Command{
		Name:  "bench",
		Usage: "measure latency and bandwidth between processes on this machine",
		Description: "Starts a scheduler, one server and one worker as processes, measures, and checks every answer.\n\n" +
			"    stepaf bench latency --van local --push 1024 --pull 1024\n\n" +
			"The floor is the baseline, measured in the same run. It moves the same bytes in both directions\n" +
			"between the same processes: over TCP on loopback, with blocking sockets and one thread each; with\n" +
			"--van ibverbs, by one RDMA write with immediate each way; with --device gpu, by one copy between\n" +
			"the GPUs each way. Compare ratios, not times: times depend on the machine.",
		Subcommands: []*cli.Command{
			{
				Name:      "latency",
				Usage:     "push_pull round trips of one tensor each way",
				UsageText: "stepaf bench latency --push BYTES --pull BYTES [--iters N]\nstepaf bench latency --van ibverbs [--check]\nstepaf bench latency --van local --device gpu [--prepared] [--check]",
				Description: "    stepaf bench latency --push 1024 --pull 1024 --iters 1000\n\n" +
					"With --van ibverbs and without --push and --pull it measures 1 KiB and 64 KiB each way, and the default sizes.\n" +
					"If the package perftest is installed, it also runs ib_write_lat and ib_write_bw on the same port.\n\n" +
					"With --van zmq it also measures a round trip of libzmq alone: one message each way between a DEALER and a ROUTER, in C.\n\n" +
					"With --device gpu the tensors are device memory; worker and server each use a GPU. The floor is, each way, a copy\n" +
					"into the other GPU's memory and then a flag in host memory. Without sizes it measures 1 KiB, the default sizes,\n" +
					"16 MiB and 256 MiB each way. The timed round trips do not touch the contents. Every byte is checked in untimed\n" +
					"round trips before and after each block, and in a block's last answer.",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "push", Value: attention.push, Usage: "bytes from worker to server"},
					&cli.IntFlag{Name: "pull", Value: attention.pull, Usage: "bytes from server to worker"},
					&cli.StringFlag{Name: "device", Value: cpu, Usage: "device of the tensors: cpu or gpu"},
					&cli.StringFlag{Name: "gpus", Usage: "the worker's and the server's GPU (default: 0,1; with one GPU 0,0)"},
					&cli.BoolFlag{Name: "prepared", Usage: "with --device gpu: use a prepared GPU exchange, made by the CPUs of both ends (af/streams, ByHost)"},
					&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
					&cli.IntFlag{Name: "warmup", Usage: "untimed round trips before; 0 chooses by size"},
					&cli.BoolFlag{Name: "load", Usage: "keep every core busy with a loop during the measurement"},
					&cli.BoolFlag{Name: "touch", Usage: "both ends read and write every byte between rounds, also of the floor"},
					&cli.BoolFlag{Name: "shared", Usage: "with --van local: tensors that the server maps (af.AllocShared, STEPAF_SHM_MAP), from 32 KiB on; each end writes one word of each 4 KiB"},
					&cli.BoolFlag{Name: "check", Usage: "with --van ibverbs, or local and --device gpu: exit status 1 if a goal is missed or could not be measured"},
				}, common...),
				Action: runLatency,
			},
			{
				Name:        "kv",
				Usage:       "key-value pushes and pulls in batches",
				UsageText:   "stepaf bench kv [--keys N] [--values K] [--batch N]",
				Description: "    stepaf bench kv --keys 100000 --values 16 --batch 20000",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "keys", Value: 1000000, Usage: "number of float32 keys"},
					&cli.IntFlag{Name: "values", Value: 16, Usage: "values per key"},
					&cli.IntFlag{Name: "batch", Value: 20000, Usage: "keys per request"},
					&cli.IntFlag{Name: "flight", Value: 4, Usage: "requests in flight"},
				}, common...),
				Action: runKV,
			},
			afdCommand(common),
			collectiveCommand(common),
			sessionCommand(common),
			windowCommand(common),
			softwareCommand(),
		},
	}
	for _, c := range bench.Subcommands {
		c.Action = checked(c.Action)
	}
	bench.Subcommands = append(bench.Subcommands, &cli.Command{Name: "child", Hidden: true, Action: runChild, SkipFlagParsing: true})
	return bench
}

// checked adds the check of --timeout to the action f of a benchmark. SIGINT and SIGTERM end its context.
func checked(f cli.ActionFunc) cli.ActionFunc {
	return exit.WithoutArguments(func(c *cli.Context) error {
		if t := c.Duration("timeout"); t <= 0 {
			return exit.Usage("bench %s: --timeout %v: want more than 0", c.Command.Name, t)
		}
		ctx, cancel := exit.Interruptible(c.Context)
		defer cancel()
		c.Context = ctx
		return exit.BySignal(ctx, f(c))
	})
}

// startLimit is the time limit of the start of a cluster. Nodes in Python import PyTorch first.
const startLimit = 2 * time.Minute

// runChild runs one node of a benchmark.
func runChild(c *cli.Context) error {
	part := map[string]func(*cli.Context, *postoffice.Node) error{
		"latency": childLatency, "kv": childKV, "collective": childCollective, "window": childWindow, "session": childSession, "afd": childAFD,
	}[c.Args().First()]
	if part == nil {
		return exit.Usage("bench child is started by stepaf bench")
	}
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	cfg.StartTimeout = startLimit
	node, err := postoffice.Start(c.Context, postoffice.Options{Config: cfg})
	if err != nil {
		return err
	}
	if node.Role() == van.Worker {
		err = checkTransport(node, node.Topology().ServerInstances())
	}
	if err == nil {
		err = part(c, node)
	}
	if err != nil {
		node.Close()
		return err
	}
	return node.Shutdown(c.Context)
}
