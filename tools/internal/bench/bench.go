// Package bench is the command "stepaf bench": round trips between processes,
// beside the floor that plain TCP sets on the same machine in the same run.
package bench

import (
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
)

// Command returns the command, to be added to the application's.
func Command() *cli.Command {
	common := []cli.Flag{
		&cli.StringFlag{Name: "van", Value: zmq, Usage: "transport, as DMLC_ENABLE_RDMA names it, or local: shared memory"},
		&cli.StringFlag{Name: "host", Usage: "address of the processes (default: 127.0.0.1; with ibverbs an RDMA port's, chosen as a node would)"},
		&cli.IntFlag{Name: "rounds", Value: 10, Usage: "blocks of measurements, each beside one of the floor"},
		&cli.DurationFlag{Name: "timeout", Value: 5 * time.Minute, Usage: "give up after this long"},
		&cli.BoolFlag{Name: "json", Usage: "print one line of JSON instead of a table"},
	}
	bench := &cli.Command{
		Name:  "bench",
		Usage: "measure latency and bandwidth between processes on this machine",
		Description: "Starts a scheduler, one server and one worker as processes, measures, and checks every answer.\n" +
			"The floor is the baseline, measured in the same run: the same bytes to and fro between the same\n" +
			"processes over plain TCP on loopback, blocking sockets, one thread each; with --van ibverbs, one\n" +
			"RDMA write with immediate each way; with --device gpu, one copy from GPU to GPU each way.\n" +
			"Compare ratios, not times: they depend on the machine.",
		Subcommands: []*cli.Command{
			{
				Name:      "latency",
				Usage:     "push_pull round trips of one tensor each way",
				UsageText: "stepaf bench latency --push BYTES --pull BYTES [--iters N]\nstepaf bench latency --van ibverbs [--check]\nstepaf bench latency --van local --device gpu [--prepared] [--check]",
				Description: "With --van ibverbs and neither --push nor --pull it measures 1 KiB and 64 KiB each way and the default.\n" +
					"If the package perftest is installed, it runs ib_write_lat and ib_write_bw on the same port, too.\n\n" +
					"With --van zmq a round trip of libzmq by itself stands beside: one message each way between a DEALER and a ROUTER, in C.\n\n" +
					"With --device gpu the tensors are device memory, the worker's and the server's each on a GPU of its own. The floor\n" +
					"is a copy into the other GPU's memory and a word written into host memory behind it, each way. Without sizes it\n" +
					"measures 1 KiB, the default, 16 MiB and 256 MiB each way. The timed round trips move what lies on the devices;\n" +
					"every byte is checked in others, not timed, before and after each block, and so is a block's last answer.",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "push", Value: attention.push, Usage: "bytes from worker to server"},
					&cli.IntFlag{Name: "pull", Value: attention.pull, Usage: "bytes from server to worker"},
					&cli.StringFlag{Name: "device", Value: cpu, Usage: "where tensors lie: cpu or gpu"},
					&cli.StringFlag{Name: "gpus", Usage: "the worker's and the server's GPU (default: 0,1; with one GPU 0,0)"},
					&cli.BoolFlag{Name: "stream", Usage: "with --device gpu: tensors are said to be made in a stream, which costs a look at it or an event"},
					&cli.BoolFlag{Name: "prepared", Usage: "with --device gpu: both ends prepare the exchange once, and their processors make it (af/streams, ByHost)"},
					&cli.IntFlag{Name: "iters", Usage: "measured round trips; 0 chooses by size"},
					&cli.IntFlag{Name: "warmup", Usage: "round trips before; 0 chooses by size"},
					&cli.BoolFlag{Name: "load", Usage: "meanwhile keep every core busy with a loop"},
					&cli.BoolFlag{Name: "touch", Usage: "read and write every byte between rounds, at both ends, also of the floor"},
					&cli.BoolFlag{Name: "check", Usage: "with --van ibverbs, or local and --device gpu: status 1 when a goal is missed or could not be looked at"},
				}, common...),
				Action: runLatency,
			},
			{
				Name:      "kv",
				Usage:     "key-value pushes and pulls in batches",
				UsageText: "stepaf bench kv [--keys N] [--values K] [--batch N]",
				Flags: append([]cli.Flag{
					&cli.IntFlag{Name: "keys", Value: 1000000, Usage: "number of float32 keys"},
					&cli.IntFlag{Name: "values", Value: 16, Usage: "values of a key"},
					&cli.IntFlag{Name: "batch", Value: 20000, Usage: "keys of a request"},
					&cli.IntFlag{Name: "flight", Value: 4, Usage: "requests in flight"},
				}, common...),
				Action: runKV,
			},
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

// checked is the action f of a benchmark.
func checked(f cli.ActionFunc) cli.ActionFunc {
	return exit.WithoutArguments(func(c *cli.Context) error {
		if t := c.Duration("timeout"); t <= 0 {
			return exit.Usage("bench %s: --timeout %v: want more than 0", c.Command.Name, t)
		}
		return f(c)
	})
}

// runChild is one node of a benchmark.
func runChild(c *cli.Context) error {
	part := map[string]func(*cli.Context, *postoffice.Node) error{
		"latency": childLatency, "kv": childKV, "collective": childCollective, "window": childWindow, "session": childSession,
	}[c.Args().First()]
	if part == nil {
		return exit.Usage("bench child is started by stepaf bench")
	}
	cfg, err := postoffice.LoadConfig()
	if err != nil {
		return err
	}
	cfg.StartTimeout = 30 * time.Second
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
	return node.Finalize(c.Context)
}
