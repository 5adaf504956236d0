package doctor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van/backend"
)

const (
	gpuPairs  = "gpu pairs"      // the check's name
	smallCopy = 1 << 10          // bytes of the copy that measures the latency
	largeCopy = 64 << 20         // bytes of the copy that measures the bandwidth
	childTime = 15 * time.Second // for all copies to one GPU
	lineGPUs  = 4                // up to this number of GPUs each pair has a line; more GPUs get a matrix
)

// Error codes of CUDA that have remedies.
const (
	cudaDeviceUnavailable = 46
	cudaInvalidDevice     = 101
	cudaPeerUnsupported   = 217
	cudaOperatingSystem   = 304
)

// pairRemedy returns the remedy. reaches reports whether the driver allows peer access.
func pairRemedy(r pairResult, reaches bool) string {
	const topology = "both GPUs must be connected by NVLink, or by PCIe below one root complex; an IOMMU, PCIe ACS or a virtual machine can forbid it (nvidia-smi topo -p2p r)"
	switch f := r.Fault; {
	case f.Kind == faultWrong:
		return "set BYTEPS_ENABLE_IPC=0 on all nodes, and see whether an IOMMU or PCIe ACS is on: either can corrupt copies between GPUs"
	case f.Code == cudaDeviceUnavailable:
		return "nvidia-smi -c DEFAULT: the GPU is in exclusive mode, which is for one process"
	case f.Kind == faultMemory:
		return "see in nvidia-smi which process uses the GPU's memory: this check needs " + size(largeCopy) + " and a context for each of two processes"
	case f.Kind == faultLost:
		return "see dmesg for Xid errors; nvidia-smi --gpu-reset, or restart the machine"
	case f.Kind == faultUntried:
		return "run stepaf doctor again, with a longer --timeout if it ended early; see dmesg if the result stays the same"
	case f.Code == cudaInvalidDevice:
		return "see that CUDA_VISIBLE_DEVICES shows both GPUs to both processes"
	case f.Code == cudaPeerUnsupported, r.From != r.To && !reaches:
		return topology
	case f.Code == cudaOperatingSystem:
		return "check that both processes have the same user, and that neither the container's seccomp profile nor MIG prevents it"
	case f.Kind == faultUnsupported:
		return "CUDA IPC needs Linux on bare metal or with the whole GPU passed through: WSL, vGPU and MIG do not support it"
	}
	return "see dmesg; nodes work without it, but slower"
}

// pairs checks each ordered pair of GPUs with a process at either end.
func (x *gpuExam) pairs(ctx context.Context) []Finding {
	if why, remedy := x.noPairs(); why != "" {
		return []Finding{{Status: Skip, Text: "not tried: " + why, Remedy: remedy}}
	}
	matrix := len(x.all) > lineGPUs
	if matrix {
		x.early <- x.matrixHead()
	}
	held, sources, faults := x.exportAll(ctx)
	for _, g := range x.all {
		to := int(g.Device.ID)
		if ctx.Err() != nil {
			x.early <- x.pairsLeft(ctx, to)
			break
		}
		row := x.pairsTo(ctx, to, sources, faults)
		x.tried = append(x.tried, row...)
		if matrix {
			x.early <- matrixRow(to, row)
			continue
		}
		for _, r := range row {
			x.early <- x.pairFinding(r)
		}
	}
	var found []Finding
	if matrix {
		found = x.pairReasons()
	}
	for _, b := range held {
		if err := b.Close(); err != nil {
			found = append(found, Finding{Status: Warn, Text: "after the attempt: " + err.Error(), Remedy: "see dmesg"})
		}
	}
	return found
}

// noPairs returns the reason why no pair is checked, or "".
func (x *gpuExam) noPairs() (why, remedy string) {
	switch {
	case !slices.Contains(x.m.Backends, "GPU"):
		return "this stepaf is built without CUDA", "make af USE_CUDA=1, if there is a GPU"
	case len(x.all) == 0:
		return "this process sees no GPU", "see gpu above"
	case x.cfg.Backend != "" && !x.needGPU():
		return "STEPMESH_BAKCEND=" + x.cfg.Backend + ": the node uses no GPU", "unset STEPMESH_BAKCEND to check it"
	case x.cfg.EnableIPC == 0:
		return "BYTEPS_ENABLE_IPC=0 disables it", "unset BYTEPS_ENABLE_IPC to check it"
	}
	return "", ""
}

// pairsLeft returns the finding for the GPUs from to on after the time limit.
func (x *gpuExam) pairsLeft(ctx context.Context, to int) Finding {
	var names []string
	for _, g := range x.all {
		if id := int(g.Device.ID); id >= to {
			names = append(names, strconv.Itoa(id))
		}
	}
	return Finding{Status: Warn, Text: "not tried to GPU " + strings.Join(names, ", ") + ": " + reason(ctx),
		Remedy: "run it again, with a longer --timeout"}
}

// exportAll fills memory on each GPU and exports it, or records the error. The held GPUs keep the memory that the
// children import.
func (x *gpuExam) exportAll(ctx context.Context) (held []backend.Backend, sources []pairSource, faults map[int]*pairFault) {
	faults = map[int]*pairFault{}
	for _, g := range x.all {
		s := pairSource{From: int(g.Device.ID), Seed: rand.Uint64()}
		if ctx.Err() != nil {
			faults[s.From] = untried(reason(ctx))
			continue
		}
		b, err := x.m.OpenGPU(s.From)
		if err == nil {
			held = append(held, b)
			s.Export, err = export(b, s.Seed, x.m.PairBytes)
		}
		if err != nil {
			faults[s.From] = newFault(err)
			continue
		}
		sources = append(sources, s)
	}
	return held, sources, faults
}

// export fills n bytes of b with the pattern and exports them. Close of b frees them.
func export(b backend.Backend, seed uint64, n int) (backend.Export, error) {
	e, ok := b.(backend.Exporter)
	if !ok {
		return backend.Export{}, fmt.Errorf("backend %s: %w: it shares no memory", b.Name(), backend.ErrUnsupported)
	}
	m, err := b.Alloc(n)
	if err != nil {
		return backend.Export{}, err
	}
	host := make([]byte, n)
	fillPattern(host, seed)
	if err := b.Copy(m, backend.Bytes(host)); err != nil {
		return backend.Export{}, err
	}
	return e.Export(m)
}

// pairsTo has a child process copy from all sources to one GPU, and returns a result for each GPU.
func (x *gpuExam) pairsTo(ctx context.Context, to int, sources []pairSource, faults map[int]*pairFault) []pairResult {
	got := map[int]pairResult{}
	var silent string // the reason of a missing result
	if len(sources) > 0 {
		silent = x.runPairChild(ctx, pairRequest{To: to, Bytes: x.m.PairBytes, Sources: sources}, got)
	}
	row := make([]pairResult, 0, len(x.all))
	for _, g := range x.all {
		from := int(g.Device.ID)
		r, ok := got[from]
		if !ok {
			r = pairResult{From: from, To: to, Fault: cmp.Or(faults[from], untried(silent))}
		}
		row = append(row, r)
	}
	return row
}

// runPairChild writes the results of the child into got. It returns the reason why results are missing.
func (x *gpuExam) runPairChild(ctx context.Context, req pairRequest, got map[int]pairResult) string {
	ctx, cancel := context.WithTimeoutCause(ctx, childTime, fmt.Errorf("the other process has not answered within %s", childTime))
	defer cancel()
	in, err := json.Marshal(req)
	if err != nil {
		return err.Error()
	}
	out, err := x.m.PairChild(ctx, in)
	var bad error
	for line := range bytes.Lines(out) {
		line, whole := bytes.CutSuffix(line, []byte{'\n'})
		var r pairResult
		if !whole { // the process was ended
			break
		} else if err := json.Unmarshal(line, &r); err != nil || r.To != req.To {
			bad = fmt.Errorf("the other process has written %q: want a result for GPU %d", line, req.To)
			continue
		}
		got[r.From] = r
	}
	switch err = errors.Join(err, bad); {
	case ctx.Err() != nil:
		return reason(ctx)
	case err != nil:
		return strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return "the other process has ended without an answer"
}

// reaches reports whether the driver lets GPU to access the memory of GPU from.
func (x *gpuExam) reaches(from, to int) bool {
	i := slices.IndexFunc(x.all, func(g backend.Info) bool { return int(g.Device.ID) == to })
	return i >= 0 && slices.Contains(x.all[i].Peers, from)
}

// pairFinding returns the finding of one pair.
func (x *gpuExam) pairFinding(r pairResult) Finding {
	f := Finding{Name: fmt.Sprintf("gpu %d -> gpu %d", r.From, r.To), Data: r}
	if r.Fault != nil {
		f.Status, f.Text, f.Remedy = r.Fault.status(), r.Fault.effect(), pairRemedy(r, x.reaches(r.From, r.To))
		if s := r.Fault.short(); s != r.Fault.Text {
			f.Details = []string{r.Fault.Text}
		}
		return f
	}
	how := "CUDA IPC, NVLink or PCIe peer access"
	if r.From == r.To {
		how = "CUDA IPC, two processes on one GPU"
	}
	f.Text = fmt.Sprintf("directly (%s): %s for 1 KiB, %s GB/s", how, round(time.Duration(r.SmallNS)), gigabytes(r.BytesPerSecond))
	return f
}

func gigabytes(bps float64) string {
	if bps < 10e9 {
		return fmt.Sprintf("%.1f", bps/1e9)
	}
	return fmt.Sprintf("%.0f", bps/1e9)
}

// matrixHead returns the line above the matrix.
func (x *gpuExam) matrixHead() Finding {
	var b strings.Builder
	fmt.Fprintf(&b, "%-10s", "GB/s from")
	for _, g := range x.all {
		fmt.Fprintf(&b, "%7d", g.Device.ID)
	}
	return Finding{Text: b.String()}
}

// matrixRow returns the line of the copies to one GPU. pairReasons explains each '-'.
func matrixRow(to int, row []pairResult) Finding {
	var b, small strings.Builder
	fmt.Fprintf(&b, "to GPU %-3d", to)
	small.WriteString("1 KiB:")
	for _, r := range row {
		if r.Fault != nil {
			fmt.Fprintf(&b, "%7s", "-")
			small.WriteString(" -")
			continue
		}
		fmt.Fprintf(&b, "%7s", gigabytes(r.BytesPerSecond))
		small.WriteString(" " + round(time.Duration(r.SmallNS)).String())
	}
	return Finding{Name: fmt.Sprintf("gpu pairs to %d", to), Text: b.String(), Details: []string{small.String()}, Data: row}
}

// pairReasons returns, for the end of the matrix, each reason why pairs do not work, once.
func (x *gpuExam) pairReasons() []Finding {
	type group struct {
		f     Finding
		pairs []string
	}
	var groups []*group
	for _, r := range x.tried {
		if r.Fault == nil {
			continue
		}
		f := Finding{Status: r.Fault.status(), Text: r.Fault.effect(), Remedy: pairRemedy(r, x.reaches(r.From, r.To))}
		i := slices.IndexFunc(groups, func(g *group) bool { return g.f.Text == f.Text && g.f.Remedy == f.Remedy })
		if i < 0 {
			i = len(groups)
			groups = append(groups, &group{f: f})
		}
		groups[i].pairs = append(groups[i].pairs, fmt.Sprintf("%d -> %d", r.From, r.To))
	}
	var out []Finding
	for _, g := range groups {
		g.f.Text = strings.Join(g.pairs, ", ") + ": " + g.f.Text
		out = append(out, g.f)
	}
	return out
}
