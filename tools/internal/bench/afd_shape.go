package bench

// The parts of bench afd that its parent and its processes share: the names of forms and measurements, and the contents of tensors.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// Forms of a round trip.
const (
	formPushPull = "push_pull" // the tensors are checked in each call
	formPrepared = "prepared"  // the tensors are checked once, by Prepare
	formHosts    = "hosts"     // a prepared GPU exchange, made by the CPUs of both ends
	formStreams  = "streams"   // a prepared GPU exchange, made by streams of both ends
	formSide     = "side"      // the same; each end receives in a stream of its own
	formGraphs   = "graphs"    // streams, captured in CUDA graphs by both ends
	formTorch    = "torch"     // sends and receives of torch.distributed
)

// Forms by device and language. The others are only measured from Python.
var (
	afdForms       = []string{formPushPull, formPrepared}
	afdDeviceForms = append(slices.Clone(afdForms), formHosts, formStreams)
	afdGPUForms    = []string{formHosts, formStreams, formSide, formGraphs} // of a GPU only
	afdAllForms    = slices.Concat(afdForms, afdGPUForms, []string{formTorch})
)

// afdName names a form of a side.
func afdName(from, form string) string {
	if from == "" {
		return form
	}
	return from + " " + form
}

// Measurements that a line of the parent asks for.
const (
	askCalls = "calls" // round trips of one micro-batch, one after the other
	askSteps = "steps" // decode steps
	askAlone = "alone" // the computation of decode steps
	askServe = "serve" // prepares a server for one of them
	askRows  = "rows"  // the rows of matrix products that take a time
)

// atOnce is the time of computation of a server that answers each batch at once.
const atOnce = time.Duration(-1)

// afdShape has the sizes and contents that all processes of a run use.
type afdShape struct {
	push, pull   int // bytes to and from each server
	microBatches int
	layers       int
	image        []byte // contents of all tensors between the stamps
}

// The keys of micro-batch or round trip k.
func pushKey(k int) uint64 { return timedKey + 2*uint64(k) }
func pullKey(k int) uint64 { return pushKey(k) + 1 }

// Each tensor carries the same stamp in up to stampCount places. The stamp names the round trip: the worker, its number,
// in an answer also the server, and whether every byte is to be checked.
const (
	stampCount  = 32
	stampAll    = 1 << 63
	stampWorker = 48
	stampServer = 32 // the server's rank + 1
)

// answerTo returns the stamp of a server's answer to a push.
func answerTo(push uint64, server int) uint64 { return push | uint64(server+1)<<stampServer }

// stride returns the distance of the stamps in n bytes.
func stride(n int) int { return max((n/stampCount+page-1)/page*page, page) }

// stamp writes the stamps of seq into b.
func (*afdShape) stamp(b []byte, seq uint64) { stampEvery(b, seq, stride(len(b))) }

// check returns an error unless b has the stamps of seq and, if all is set, the contents between.
func (a *afdShape) check(b []byte, seq uint64, all bool) error {
	for off, d := 0, stride(len(b)); off < len(b); off += d {
		end := min(off+d, len(b))
		var want [8]byte
		binary.LittleEndian.PutUint64(want[:], stampAt(seq, off))
		n := min(len(want), end-off)
		if !bytes.Equal(b[off:off+n], want[:n]) {
			return fmt.Errorf("wrong data at byte %d of %d: % x, want % x, the stamp of %s", off, len(b), b[off:off+n], want[:n], stampText(seq))
		}
		if all && !bytes.Equal(b[off+n:end], a.image[off+n:end]) {
			return fmt.Errorf("wrong data in bytes %d to %d of %d in %s", off+n, end-1, len(b), stampText(seq))
		}
	}
	return nil
}

// stampText describes the round trip of a stamp.
func stampText(seq uint64) string {
	text := fmt.Sprintf("round trip %d of worker %d", uint32(seq), seq&^stampAll>>stampWorker)
	if s := seq >> stampServer & 0xffff; s > 0 {
		text += fmt.Sprintf(", answer of server %d", s-1)
	}
	return text
}

// compute runs f and then a loop until d has passed since the call.
func compute(d time.Duration, f func() error) error {
	start := time.Now()
	err := f()
	for time.Since(start) < d {
	}
	return err
}

// alone times n times the computation of a decode step.
func (a *afdShape) alone(d time.Duration, n int, f func(microBatch int) error) ([]int64, error) {
	return timed(n, func(int) error {
		for k := range a.layers * a.microBatches {
			if err := compute(d, func() error { return f(k % a.microBatches) }); err != nil {
				return err
			}
		}
		return nil
	})
}
