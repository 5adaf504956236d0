package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Values of --device.
const (
	cpu = "cpu"
	gpu = "gpu"

	prepared = "gpu, prepared" // with --prepared
)

// place says where the tensors of a benchmark are. The zero place is host memory.
type place struct {
	gpus []int // of the worker and of the server; nil for host memory
	both bool  // both ends prepare their exchanges, which their CPUs make
}

// newPlace reads the options. look lists the machine's GPUs.
func newPlace(c *cli.Context, look func() ([]backend.Info, error)) (p place, err error) {
	switch c.String("device") {
	case cpu:
		for _, name := range []string{"gpus", "prepared"} {
			if c.IsSet(name) {
				return place{}, exit.Usage("bench: --%s wants --device gpu", name)
			}
		}
		return p, nil
	case gpu:
	default:
		return place{}, exit.Usage("bench: --device %s: want cpu or gpu", c.String("device"))
	}
	if v := c.String("van"); v != local && v != zmq {
		return place{}, exit.Usage("bench: --device gpu --van %s: want --van local or zmq", v)
	}
	if c.String("van") != local && c.Bool("prepared") {
		return place{}, exit.Usage("bench: --prepared --van %s: want --van local", c.String("van"))
	}
	if p.gpus, err = pair(c.String("gpus")); err != nil {
		return place{}, exit.Usage("bench: %v", err)
	}
	have, err := look()
	if err != nil {
		return place{}, fmt.Errorf("bench: --device gpu: %w", err)
	}
	if p.both = c.Bool("prepared"); p.gpus == nil {
		p.gpus = []int{0, min(1, len(have)-1)}
	}
	if slices.Max(p.gpus) >= len(have) {
		return place{}, exit.Usage("bench: --gpus %s: this machine has %d (CUDA_VISIBLE_DEVICES)", c.String("gpus"), len(have))
	}
	return p, nil
}

// pair reads two numbers separated by a comma. It returns nil for an empty text.
func pair(text string) ([]int, error) {
	if text == "" {
		return nil, nil
	}
	first, second, _ := strings.Cut(text, ",")
	a, err := strconv.ParseUint(first, 10, 31)
	b, err2 := strconv.ParseUint(second, 10, 31)
	if err != nil || err2 != nil {
		return nil, fmt.Errorf("--gpus %s: want the worker's and the server's number, as in 0,1", text)
	}
	return []int{int(a), int(b)}, nil
}

// deviceOf returns the --device of a run on gpus; nil: host memory.
func deviceOf(gpus []int) string {
	if gpus == nil {
		return cpu
	}
	return gpu
}

// course returns the course of measurements here over van.
func (p place) course(van string) course {
	if p.both {
		return course{van, prepared}
	}
	return course{van, deviceOf(p.gpus)}
}

// env returns the variables that give a role its device.
func (p place) env(role string) []string {
	k := slices.Index([]string{"worker", "server"}, role)
	if p.gpus == nil || k < 0 {
		return []string{"STEPMESH_BAKCEND=CPU"}
	}
	return gpuEnv(p.gpus[k])
}

// gpuEnv returns the variables of a node that uses a GPU.
func gpuEnv(id int) []string {
	return []string{"STEPMESH_BAKCEND=GPU", "STEPMESH_GPU=" + strconv.Itoa(id), "DMLC_RANK_OFFSET=" + strconv.Itoa(-id)}
}

// of returns the place of one of several workers, which use the GPUs in turn.
func (p place) of(rank int) place {
	if p.gpus != nil {
		k := rank % len(p.gpus)
		p.gpus = []int{p.gpus[k], p.gpus[len(p.gpus)-1]}
	}
	return p
}

// note returns a reservation about figures of this place, or "".
func (p place) note() string {
	if p.gpus == nil || p.gpus[0] != p.gpus[1] {
		return ""
	}
	return fmt.Sprintf("both processes use gpu:%d: they share it in time slices, so these figures mean little", p.gpus[0])
}
