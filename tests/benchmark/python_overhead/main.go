// Command python_overhead is what python_overhead.py compares Python with: a
// worker and a server that do the same in Go.
//
// The worker reads a number from each line of its standard input, does so many
// round trips of -bytes each way, and prints their times as a line of JSON: of the
// whole, and of the server between a pull and its answer, in nanoseconds.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/tests/internal/prog"
)

var size = flag.Int64("bytes", 1024, "bytes of the tensors")

func main() {
	flag.Parse()
	if *size < 1 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "want -bytes of at least 1, and no other arguments")
		os.Exit(2)
	}
	prog.Main(prog.Program{FServer: true, Server: serve, Worker: work})
}

// serve echoes.
func serve(_ context.Context, n *prog.Node) error {
	s, err := af.NewTensorServer(n.Node, af.Options{})
	if err != nil {
		return err
	}
	return s.SetRequestHandle(func(b af.Batch) {
		if err := b.Response([]af.KeyTensor{{Key: 2, Val: b.Pushes()[0].Val}}, nil); err != nil {
			n.Log().Error("batch not answered", "worker", b.SenderRank(), "err", err)
			n.Fail(err)
		}
	})
}

func work(ctx context.Context, n *prog.Node) error {
	w, err := af.NewTensorWorker(n.Node, af.Options{})
	if err != nil {
		return err
	}
	push, err := n.Tensor(af.Uint8, *size)
	if err != nil {
		return err
	}
	pull, err := n.Tensor(af.Uint8, *size)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		count, err := strconv.Atoi(lines.Text())
		if err != nil {
			return err
		}
		var times struct{ Whole, Server []uint64 }
		for range count {
			start := clock.Now()
			h, err := w.ZBatchPushPull([]af.KeyTensor{{Key: 1, Val: push}}, []af.KeyTensor{{Key: 2, Val: pull}})
			if err != nil {
				return err
			}
			if err := w.Wait(ctx, h); err != nil {
				return err
			}
			times.Whole = append(times.Whole, clock.Now()-start)
			req, res, err := w.FetchTrace(h + 1)
			if err != nil {
				return err
			}
			times.Server = append(times.Server, res.Start-req.Process)
		}
		if err := json.NewEncoder(os.Stdout).Encode(times); err != nil {
			return err
		}
	}
	return lines.Err()
}
