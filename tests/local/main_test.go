// Package local tests shared memory between real processes: values, deaths in
// mid-transfer, and peers that are not within reach.
package local

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
)

// Tasks of child processes.
const (
	echo   = "echo"   // a server that answers with the pushed tensors
	floods = "floods" // a worker that makes large requests without end
	marks  = "marks"  // a worker that pushes its process ID until it fails
	slow   = "slow"   // a server that lets worker 0 wait; see serveSlowly
)

func TestMain(m *testing.M) { nodetest.Main(m, child) }

// child makes a node of a process of its own do what.
func child(c *nodetest.Child, what string) error {
	if what == echo {
		return nodetest.Serve(c.Node, func(b af.Batch) {
			if err := nodetest.Echo(b); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		})
	}
	if what == slow {
		return serveSlowly(c)
	}
	w, err := af.NewWorker(c.Node, af.WorkerOptions{})
	if err != nil {
		return err
	}
	if what == marks {
		go pushMarks(c, w)
		return nil
	}
	go func() {
		for i := 0; ; i++ {
			if err := roundTrip(w, i, 8<<20); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return
			}
			if i == 0 {
				c.Say("begun")
			}
		}
	}()
	return nil
}

// fill makes b a value of which every page is known by seq.
func fill(b []byte, seq int) {
	for off := 0; off+8 <= len(b); off += 512 {
		binary.LittleEndian.PutUint64(b[off:], uint64(seq)<<32|uint64(off))
	}
}

// check tells where b is not what fill makes of it.
func check(b []byte, seq int) error {
	for off := 0; off+8 <= len(b); off += 512 {
		if x := binary.LittleEndian.Uint64(b[off:]); x != uint64(seq)<<32|uint64(off) {
			return fmt.Errorf("byte %d of value %d: %#x", off, seq, x)
		}
	}
	return nil
}

// request pushes value seq of n bytes under key 1 and pulls as much under key 2.
func request(w *af.Worker, seq, n int) (call af.Call, pull []byte, err error) {
	x := make([]byte, n)
	fill(x, seq)
	pull = make([]byte, n)
	push, err := af.FromSlice(x)
	if err != nil {
		return call, nil, err
	}
	dst, err := af.FromSlice(pull)
	if err != nil {
		return call, nil, err
	}
	call, err = w.PushPull([]af.KeyTensor{{Key: 1, Val: push}}, [][]af.KeyTensor{{{Key: 2, Val: dst}}})
	return call, pull, err
}

// roundTrip makes a request of a server that echoes, and compares.
func roundTrip(w *af.Worker, seq, n int) error {
	h, pull, err := request(w, seq, n)
	if err != nil {
		return err
	}
	// How it ends matters, not how long a machine takes that does other things: not the 10 s of a call.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := h.Wait(ctx); err != nil {
		return err
	}
	return check(pull, seq)
}

const serverID, workerID = 8, 9
