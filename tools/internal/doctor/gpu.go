package doctor

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/van/backend"
)

// gpuExam has the checks of GPUs.
type gpuExam struct {
	*subject
	all   []backend.Info
	tried []pairResult
}

// list describes the GPUs and their abilities.
func (x *gpuExam) list(context.Context) []Finding {
	const remedy = "see docs/gpu.md; without a GPU, tensors stay in host memory"
	absent := Skip
	if x.needGPU() {
		absent = Fail
	}
	if !slices.Contains(x.m.Backends, "GPU") {
		return []Finding{{Status: absent, Text: "this stepaf is built without CUDA", Remedy: "make af USE_CUDA=1; " + remedy}}
	}
	all, err := x.m.GPUs()
	x.all = all
	if err != nil {
		install := "install the driver of NVIDIA; "
		if x.needGPU() {
			install = "install the driver of NVIDIA, or unset STEPMESH_BAKCEND; "
		}
		return []Finding{{Status: absent, Text: err.Error(), Remedy: install + remedy}}
	}
	var out []Finding
	for _, g := range all {
		f := Finding{Name: "gpu " + strconv.Itoa(int(g.Device.ID)), Data: g,
			Text:    fmt.Sprintf("%s, PCI %s, %d GiB, %s, %s, %s", g.Name, g.PCIBusID, g.Memory>>30, g.Driver, peersText(g.Peers), dmabufText(g.DMABuf)),
			Details: []string{"UUID " + g.UUID, fmt.Sprintf("compute capability %d.%d", g.ComputeMajor, g.ComputeMinor)}}
		if g.ComputeMajor < 7 {
			f.Status, f.Remedy = Warn, "write_flag, wait_flag and seq_add_one need compute capability 7.0"
		}
		out = append(out, f)
	}
	return append(out, x.choice())
}

func peersText(peers []int) string {
	if len(peers) == 0 {
		return "has peer access to no other GPU"
	}
	list := strings.Trim(strings.ReplaceAll(fmt.Sprint(peers), " ", ", "), "[]")
	return "reaches GPU " + list + " directly"
}

func dmabufText(can bool) string {
	if can {
		return "dma-buf"
	}
	return "no dma-buf: RDMA on its memory needs nvidia_peermem"
}

// choice returns the finding about the GPU that a node with this environment would use.
func (x *gpuExam) choice() Finding {
	f := Finding{Name: "gpu choice"}
	switch {
	case x.cfg.Backend != "" && !x.needGPU():
		f.Text = fmt.Sprintf("none: STEPMESH_BAKCEND=%s", x.cfg.Backend)
	case x.cfg.GPU >= len(x.all):
		f.Text = fmt.Sprintf("STEPMESH_GPU=%d, but there are GPUs 0 to %d", x.cfg.GPU, len(x.all)-1)
		f.Remedy = "set STEPMESH_GPU, or CUDA_VISIBLE_DEVICES so that there are more"
		if f.Status = Warn; x.needGPU() {
			f.Status = Fail
		}
	default:
		f.Text = fmt.Sprintf("GPU %d (STEPMESH_GPU)", x.cfg.GPU)
	}
	return f
}

// sameHost returns the findings about the path of values between nodes of this host, and of values on a GPU.
func (x *gpuExam) sameHost(context.Context) []Finding {
	var f Finding
	scope, _ := strconv.Atoi(x.line("proc/sys/kernel/yama/ptrace_scope")) // 0 without Yama
	switch {
	case x.cfg.EnableIPC == 0:
		f.Text = "over " + x.cfg.VanType + ": BYTEPS_ENABLE_IPC=0 disables shared memory"
	case scope > 1:
		f.Status = Warn
		f.Text = fmt.Sprintf("through shared memory; large values are copied twice if the receiver is slow: kernel.yama.ptrace_scope is %d", scope)
		f.Remedy = "sysctl kernel.yama.ptrace_scope=1, if the machine's rules allow it"
	default:
		f.Text = "through shared memory"
	}
	out := []Finding{f}
	if len(x.all) == 0 {
		return out
	}
	g := Finding{Name: "gpu tensors"}
	away := "through pinned host memory"
	if x.cfg.VanType == ibverbs {
		away = "over ibverbs as they are, registered with the network card"
	}
	switch {
	case x.cfg.Backend != "" && !x.needGPU():
		g.Text = "none: STEPMESH_BAKCEND=" + x.cfg.Backend
	case x.cfg.EnableIPC == 0:
		g.Text = "go " + away
	default:
		g.Text = "go to nodes of this host " + x.tensorsHere() + "; to others " + away
	}
	return append(out, g)
}

// tensorsHere describes the path of values on a GPU between nodes of this host.
func (x *gpuExam) tensorsHere() string {
	direct, known := 0, 0
	for _, r := range x.tried {
		if r.Fault == nil {
			direct++
		}
		if r.Fault == nil || r.Fault.Kind != faultUntried {
			known++
		}
	}
	switch {
	case known < len(x.all)*len(x.all):
		return "directly GPU to GPU where CUDA IPC works, else through pinned host memory"
	case direct == 0:
		return "through pinned host memory"
	case direct == known:
		return "directly GPU to GPU"
	}
	return "directly GPU to GPU for the pairs above that support it, else through pinned host memory"
}
