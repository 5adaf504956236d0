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
	smallCopy = 1 << 10          // bytes of the copy whose time is measured
	largeCopy = 64 << 20         // and of the one whose bandwidth is
	childTime = 15 * time.Second // for all copies to one GPU
	lineGPUs  = 4                // up to so many a line for each pair, beyond a matrix
)

// Results of CUDA that the remedies know.
const (
	cudaDeviceUnavailable = 46
	cudaInvalidDevice     = 101
	cudaPeerUnsupported   = 217
	cudaOperatingSystem   = 304
)

// pairRemedy says what can be done. reaches is what the driver says of peer access.
func pairRemedy(r pairResult, reaches bool) string {
	const topology = "both GPUs must be joined by NVLink, or by PCIe below one root complex; an IOMMU, PCIe ACS or a virtual machine can forbid it (nvidia-smi topo -p2p r)"
	switch f := r.Fault; {
	case f.Kind == faultWrong:
		return "set BYTEPS_ENABLE_IPC=0 on all nodes, and see whether an IOMMU or PCIe ACS is on: either can garble copies between GPUs"
	case f.Code == cudaDeviceUnavailable:
		return "nvidia-smi -c DEFAULT: the GPU is in exclusive mode, which is for one process"
	case f.Kind == faultMemory:
		return "look with nvidia-smi who uses the GPU's memory: this takes " + size(largeCopy) + " and a context for each of two processes"
	case f.Kind == faultLost:
		return "see dmesg for Xid errors; nvidia-smi --gpu-reset, or restart the machine"
	case f.Kind == faultUntried:
		return "run stepaf doctor again, with a longer --timeout if time was short; see dmesg when it stays so"
	case f.Code == cudaInvalidDevice:
		return "see that CUDA_VISIBLE_DEVICES shows both GPUs to both processes"
	case f.Code == cudaPeerUnsupported, r.From != r.To && !reaches:
		return topology
	case f.Code == cudaOperatingSystem:
		return "see that both processes are of one user, and that the container's seccomp profile or MIG is not in the way"
	case f.Kind == faultUnsupported:
		return "CUDA IPC needs Linux on the machine itself or with the whole GPU passed through: WSL, vGPU and MIG have none"
	}
	return "see dmesg; nodes work without it, only slower"
}

// pairs tries each ordered pair of GPUs with a process at either end.
func (x *gpuExam) pairs(ctx context.Context) []Finding {
	if why, remedy := x.noPairs(); why != "" {
		return []Finding{{Status: Skip, Text: "not tried: " + why, Remedy: remedy}}
	}
	var late []Finding // what nobody could be told of any more
	tell := func(f Finding) {
		if !x.say(ctx, f) {
			late = append(late, f)
		}
	}
	matrix := len(x.all) > lineGPUs
	if matrix {
		tell(x.matrixHead())
	}
	held, sources, faults := x.exportAll(ctx)
	for _, g := range x.all {
		to := int(g.Device.ID)
		if ctx.Err() != nil {
			tell(x.pairsLeft(ctx, to))
			break
		}
		row := x.pairsTo(ctx, to, sources, faults)
		x.tried = append(x.tried, row...)
		if matrix {
			tell(matrixRow(to, row))
			continue
		}
		for _, r := range row {
			tell(x.pairFinding(r))
		}
	}
	if matrix {
		for _, f := range x.pairReasons() {
			tell(f)
		}
	}
	for _, b := range held {
		if err := b.Close(); err != nil {
			tell(Finding{Status: Warn, Text: "after the attempt: " + err.Error(), Remedy: "see dmesg"})
		}
	}
	return late
}

// noPairs says why there is nothing to try.
func (x *gpuExam) noPairs() (why, remedy string) {
	switch {
	case !slices.Contains(x.m.Backends, "GPU"):
		return "this stepaf is built without CUDA", "make af USE_CUDA=1, if there is a GPU"
	case len(x.all) == 0:
		return "this process sees no GPU", "see gpu above"
	case x.cfg.Backend != "" && !x.needGPU():
		return "STEPMESH_BAKCEND=" + x.cfg.Backend + ": the node uses no GPU", "unset STEPMESH_BAKCEND to have it tried"
	case x.cfg.EnableIPC == 0:
		return "BYTEPS_ENABLE_IPC=0 switches it off", "unset BYTEPS_ENABLE_IPC to have it tried"
	}
	return "", ""
}

// pairsLeft is the finding for GPUs from to on, when the time is up.
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

// exportAll fills memory on each GPU and exports it, or notes why not. The GPUs that are held
// keep what the children import.
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

// export fills n bytes of b with the pattern and names them. Close of b frees them.
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

// pairsTo has a child bring all sources to one GPU, and returns a result for each GPU.
func (x *gpuExam) pairsTo(ctx context.Context, to int, sources []pairSource, faults map[int]*pairFault) []pairResult {
	got := map[int]pairResult{}
	var silent string // why a result is missing
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

// runPairChild puts what the child says into got, and says why it says no more.
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
		if !whole { // it was ended
			break
		} else if err := json.Unmarshal(line, &r); err != nil || r.To != req.To {
			bad = fmt.Errorf("the other process says %q: want a result for GPU %d", line, req.To)
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

// reaches tells whether the driver lets GPU to access the memory of GPU from.
func (x *gpuExam) reaches(from, to int) bool {
	i := slices.IndexFunc(x.all, func(g backend.Info) bool { return int(g.Device.ID) == to })
	return i >= 0 && slices.Contains(x.all[i].Peers, from)
}

// pairFinding is the line of one pair.
func (x *gpuExam) pairFinding(r pairResult) Finding {
	f := Finding{Name: fmt.Sprintf("gpu %d -> gpu %d", r.From, r.To), Data: r}
	if r.Fault != nil {
		f.Status, f.Text, f.Remedy = r.Fault.status(), r.Fault.verdict(), pairRemedy(r, x.reaches(r.From, r.To))
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

// matrixHead is the line above the matrix.
func (x *gpuExam) matrixHead() Finding {
	var b strings.Builder
	fmt.Fprintf(&b, "%-10s", "GB/s from")
	for _, g := range x.all {
		fmt.Fprintf(&b, "%7d", g.Device.ID)
	}
	return Finding{Text: b.String()}
}

// matrixRow is the line of the copies to one GPU; '-' is what pairReasons explains.
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

// pairReasons tells below the matrix why pairs do not work, each reason once.
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
		f := Finding{Status: r.Fault.status(), Text: r.Fault.verdict(), Remedy: pairRemedy(r, x.reaches(r.From, r.To))}
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
