// Command python_overhead is the Go reference of python_overhead.py: a
// worker and a server that do the same in Go.
//
// The worker reads a number from each line of its standard input, does so many
// round trips of -bytes each way, with -prepared of a prepared exchange, and prints their times in nanoseconds as a line of
// JSON. With a negative number it sends so many requests and does not wait; 0 waits
// for all of these.
//
// The server echoes at once, or with -hold when it reads a number: then it answers
// so many requests and prints how long each took.
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

var (
	size = flag.Int64("bytes", 1024, "bytes of the tensors")
	hold = flag.Bool("hold", false, "the server answers when it is told to")

	prepared = flag.Bool("prepared", false, "the worker's round trips are of a prepared exchange")
)

func main() {
	flag.Parse()
	if *size < 1 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "want -bytes of at least 1, and no other arguments")
		os.Exit(2)
	}
	prog.Main(prog.Program{FServer: true, Serve: serve, Worker: work})
}

func serve(n *prog.Node, s *af.Server) (prog.Handler, error) {
	held := make(chan af.Batch, 1<<16)
	if *hold {
		go answerHeld(n, held)
	}
	return func(b af.Batch) error {
		if !*hold {
			return answer(b)
		}
		b.Retain()
		held <- b
		return nil
	}, nil
}

func answer(b af.Batch) error {
	return b.Respond([]af.KeyTensor{{Key: 2, Val: b.Pushes()[0].Val}}, af.ByKey)
}

// answerHeld answers as many batches as each line of the standard input says.
func answerHeld(n *prog.Node, held <-chan af.Batch) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		count, err := strconv.Atoi(lines.Text())
		if err != nil {
			n.Fail(err)
			return
		}
		times := []uint64{}
		for range count {
			start := clock.Now()
			b := <-held
			if err := answer(b); err != nil {
				n.Fail(err)
				return
			}
			b.Release()
			times = append(times, clock.Now()-start)
		}
		_ = json.NewEncoder(os.Stdout).Encode(times)
	}
}

func work(ctx context.Context, n *prog.Node, w *af.Worker) error {
	push, err := n.Tensor(af.Uint8, *size)
	if err != nil {
		return err
	}
	pull, err := n.Tensor(af.Uint8, *size)
	if err != nil {
		return err
	}
	x, err := w.Prepare([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
	if err != nil {
		return err
	}
	defer x.Close()
	ask := func() (af.Call, error) {
		return w.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: pull}}})
	}
	if *prepared {
		ask = func() (af.Call, error) { return x.Start() }
	}
	var flying []af.Call
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		count, err := strconv.Atoi(lines.Text())
		if err != nil {
			return err
		}
		times := []uint64{}
		for range max(count, -count) {
			start := clock.Now()
			h, err := ask()
			if err != nil {
				return err
			}
			if count < 0 {
				flying = append(flying, h)
				continue
			}
			if err := h.Wait(ctx); err != nil {
				return err
			}
			times = append(times, clock.Now()-start)
		}
		if count == 0 {
			for _, h := range flying {
				if err := h.Wait(ctx); err != nil {
					return err
				}
			}
			flying = nil
		}
		if err := json.NewEncoder(os.Stdout).Encode(times); err != nil {
			return err
		}
	}
	return lines.Err()
}
