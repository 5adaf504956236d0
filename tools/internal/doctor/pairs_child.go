package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	pairCommand = "doctor-child"
	smallRounds = 50
	smallWarmup = 5
	largeRounds = 5
	copyTime    = 5 * time.Second
)

// ChildCommand is a hidden command of stepaf: doctor starts itself with it as the other process of a pair of GPUs. It
// reads its task from standard input and writes a line of JSON for each pair.
func ChildCommand() *cli.Command {
	return &cli.Command{
		Name: pairCommand, Hidden: true, HideHelpCommand: true,
		Action: func(c *cli.Context) error {
			return servePairs(c.Context, c.App.Reader, c.App.Writer, openGPU)
		},
	}
}

func openGPU(id int) (backend.Backend, error) { return backend.New("GPU", id) }

// startPairChild runs ChildCommand until it or ctx ends, and returns its output. The kernel kills the child when this
// process ends.
func startPairChild(ctx context.Context, request []byte) ([]byte, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return runChild(exec.CommandContext(ctx, self, pairCommand), request)
}

func runChild(cmd *exec.Cmd, request []byte) ([]byte, error) {
	runtime.LockOSThread() // the kernel kills the child when this thread ends
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = grace / 2
	cmd.Stdin = bytes.NewReader(request)
	out, err := cmd.Output()
	if failed, ok := errors.AsType[*exec.ExitError](err); ok {
		err = errors.Join(err, lastLine(failed.Stderr))
	}
	if err != nil {
		err = fmt.Errorf("the other process: %w", err)
	}
	return out, err
}

// lastLine returns the last line of a child's output, or nil.
func lastLine(b []byte) error {
	s := strings.TrimSpace(string(b))
	if s == "" {
		return nil
	}
	return errors.New(s[strings.LastIndexByte(s, '\n')+1:])
}

// servePairs is the child. It opens the requested GPU, tries each source, and writes each result at once, so that a
// later hang hides no result.
func servePairs(ctx context.Context, in io.Reader, out io.Writer, open func(int) (backend.Backend, error)) (err error) {
	var req pairRequest
	if err := json.NewDecoder(in).Decode(&req); err != nil {
		return fmt.Errorf("%s is started by stepaf doctor: read the task: %w", pairCommand, err)
	}
	if req.Bytes < smallCopy || req.Bytes%8 != 0 {
		return fmt.Errorf("%s: %d bytes: want a multiple of 8, at least %d", pairCommand, req.Bytes, smallCopy)
	}
	say := json.NewEncoder(out)
	p, closed := openReceiver(req.To, req.Bytes, open)
	if closed == nil {
		defer func() { err = errors.Join(err, p.Close()) }()
	}
	for _, s := range req.Sources {
		r, err := pairResult{}, closed
		if closed == nil {
			r, err = p.try(ctx, s)
		}
		if err != nil {
			r = pairResult{Fault: newFault(err)}
		}
		r.From, r.To = s.From, req.To
		if err := say.Encode(r); err != nil {
			return err
		}
	}
	return nil
}

// sharer are the abilities of a backend that a pair needs.
type sharer interface {
	backend.Backend
	backend.AsyncCopier
	backend.Exporter
}

// receiver is the importing end of a pair. Close of its backend frees everything.
type receiver struct {
	sharer
	dst    backend.Mem
	host   []byte
	stream uintptr
	copied backend.Event
}

func openReceiver(id, n int, open func(int) (backend.Backend, error)) (*receiver, error) {
	b, err := open(id)
	if err != nil {
		return nil, err
	}
	p := &receiver{host: make([]byte, n)}
	var ok bool
	if p.sharer, ok = b.(sharer); !ok {
		err = fmt.Errorf("backend %s: %w: it imports no memory", b.Name(), backend.ErrUnsupported)
	}
	if err == nil {
		p.dst, err = b.Alloc(n)
	}
	if err == nil {
		p.stream, err = p.NewStream()
	}
	if err == nil {
		p.copied, err = b.NewEvent()
	}
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return p, nil
}

// errWrongBytes is wrapped if a copy differs from its source.
var errWrongBytes = errors.New("bytes differ")

// try imports s, copies all of it, compares every byte, and measures.
func (p *receiver) try(ctx context.Context, s pairSource) (r pairResult, err error) {
	e, n := s.Export, len(p.host)
	if e.Offset < 0 || e.Size < n || e.Offset > e.Size-n {
		return r, fmt.Errorf("an export of %d bytes from %d on: want %d", e.Size, e.Offset, n)
	}
	all, err := p.Import(e)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, p.CloseImport(all)) }()
	src := all.Sub(e.Offset, n)
	if _, err := p.median(ctx, src, 1); err != nil { // the first copy maps the memory
		return r, err
	}
	if err := p.Copy(backend.Bytes(p.host), p.dst); err != nil {
		return r, err
	}
	if at := differs(p.host, s.Seed); at >= 0 {
		return r, fmt.Errorf("%w from byte %d of %d on", errWrongBytes, at, n)
	}
	if _, err := p.median(ctx, src.Sub(0, smallCopy), smallWarmup); err != nil {
		return r, err
	}
	small, err := p.median(ctx, src.Sub(0, smallCopy), smallRounds)
	if err != nil {
		return r, err
	}
	large, err := p.median(ctx, src, largeRounds)
	if err != nil {
		return r, err
	}
	r.SmallNS = small.Nanoseconds()
	r.BytesPerSecond = float64(n) / max(large, 1).Seconds()
	return r, nil
}

// median copies src n times, and waits for each copy. It returns the median time.
func (p *receiver) median(ctx context.Context, src backend.Mem, n int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, copyTime)
	defer cancel()
	took := make([]time.Duration, n)
	for i := range took {
		start := time.Now()
		if err := p.CopyAsync(p.dst.Sub(0, src.Len()), src, p.stream); err != nil {
			return 0, err
		}
		if err := p.copied.Record(p.stream); err != nil {
			return 0, err
		}
		if err := p.copied.Sync(ctx); err != nil {
			return 0, err
		}
		took[i] = time.Since(start)
	}
	slices.Sort(took)
	return took[n/2], nil
}

// word is number i of the pattern of a seed; no two words or seeds are alike.
func word(seed uint64, i int) uint64 { return (seed + uint64(i)) * 0x9e3779b97f4a7c15 }

// fillPattern fills b, whose length is a multiple of 8.
func fillPattern(b []byte, seed uint64) {
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], word(seed, i))
	}
}

// differs is where b first differs from the pattern, by word, -1 where it does not.
func differs(b []byte, seed uint64) int {
	for i := 0; i < len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != word(seed, i) {
			return i
		}
	}
	return -1
}

// The messages between the two processes of a pair of GPUs.

// pairRequest is a child's task: copy memory of the parent to the child's GPU.
type pairRequest struct {
	To      int          `json:"to"`
	Bytes   int          `json:"bytes"` // of each source
	Sources []pairSource `json:"sources"`
}

// pairSource is GPU memory filled with the pattern of Seed.
type pairSource struct {
	From   int            `json:"from"`
	Seed   uint64         `json:"seed"`
	Export backend.Export `json:"export"`
}

// pairResult is the result of one pair, in the child's output and in the JSON report.
type pairResult struct {
	From           int        `json:"from"`
	To             int        `json:"to"`
	SmallNS        int64      `json:"copy_1kib_ns,omitempty"` // median, including the host's wait
	BytesPerSecond float64    `json:"bytes_per_second,omitempty"`
	Fault          *pairFault `json:"fault,omitempty"` // nil if the pair works
}

// pairFault is the reason why values of a pair are not copied directly.
type pairFault struct {
	Text string `json:"error"`
	Call string `json:"call,omitempty"` // the function of the driver that failed, if one did
	Code int    `json:"code,omitempty"` // its result
	Name string `json:"name,omitempty"`
	Kind string `json:"kind,omitempty"` // one of the kinds below
}

// Kinds of faults that have a remedy or a status of their own.
const (
	faultUntried     = "untried" // the pair was not checked
	faultWrong       = "wrong bytes"
	faultUnsupported = "unsupported"
	faultMemory      = "memory"
	faultLost        = "device lost"
)

func newFault(err error) *pairFault {
	f := &pairFault{Text: strings.ReplaceAll(err.Error(), "\n", "; ")} // from joined errors
	if d, ok := errors.AsType[*backend.DeviceError](err); ok {
		f.Call, f.Code, f.Name = d.Call, d.Code, d.Name
	}
	switch {
	case errors.Is(err, errWrongBytes):
		f.Kind = faultWrong
	case errors.Is(err, backend.ErrDeviceLost):
		f.Kind = faultLost
	case errors.Is(err, backend.ErrNoMemory):
		f.Kind = faultMemory
	case errors.Is(err, backend.ErrUnsupported):
		f.Kind = faultUnsupported
	}
	return f
}

// untried returns the fault of a pair that was not checked because of why.
func untried(why string) *pairFault { return &pairFault{Text: why, Kind: faultUntried} }

// short returns the driver's function and result, or else the text.
func (f *pairFault) short() string {
	if f.Call == "" {
		return f.Text
	}
	return fmt.Sprintf("%s: %s (%d)", f.Call, f.Name, f.Code)
}

// status returns the status of a pair that does not work. Wrong values are worse than slow ones.
func (f *pairFault) status() Status {
	if f.Kind == faultWrong {
		return Fail
	}
	return Warn
}

// effect describes the path of the pair's values, and the reason.
func (f *pairFault) effect() string {
	switch f.Kind {
	case faultUntried:
		return "not known: " + f.Text
	case faultWrong:
		return "CUDA IPC delivers wrong values: " + f.Text
	}
	return "through pinned memory: " + f.short()
}
