package bench

// The processes of bench afd: nodes in Go, nodes in Python, and ranks of torch.distributed. Each set is a side.

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"os/exec"
	"slices"
)

//go:embed afd.py
var afdProgram string

// Values of afdTrip.From and afdStep.From.
const (
	fromGo     = "Go"
	fromPython = "Python"
	fromTorch  = "PyTorch"
)

// afdSide is a set of processes that measures forms.
type afdSide struct {
	from             string
	servers, workers processes
	measuring        processes // the processes that a line with a measurement is for: the workers, or all
	trips, steps     []string  // forms of round trips and of decode steps
	rows             bool      // a computation is given by the rows of matrix products
}

// both returns all processes of the side.
func (s *afdSide) both() processes { return slices.Concat(s.servers, s.workers) }

// chosen returns the forms that the options have chosen.
func (r *afdRun) chosen(forms []string) []string {
	return slices.DeleteFunc(slices.Clone(forms), func(form string) bool { return !slices.Contains(r.forms, form) })
}

// sides starts the processes of all sides.
func (r *afdRun) sides(g *group, rep *afdReport, n, s int) (all []*afdSide, err error) {
	spec := []any{r.shape.push, r.shape.pull, r.shape.microBatches, r.shape.layers}
	child, err := childCommand(slices.Concat([]any{"afd"}, spec)...)
	if err != nil {
		return nil, err
	}
	rep.GPUs = r.gpusOf(n + s)
	variables := func(role string, rank int) []string {
		k := map[string]int{roles[1]: n, roles[2]: 0}
		if first, ok := k[role]; ok && rep.GPUs != nil {
			return gpuEnv(rep.GPUs[first+rank])
		}
		return place{}.env(role)
	}
	add := func(from string, cl processes, err error) (*afdSide, error) {
		if err != nil {
			return nil, fmt.Errorf("%s: %w", from, err)
		}
		for _, p := range cl {
			p.name = from + " " + p.name
		}
		last := cl.last(n + s)
		side := &afdSide{from: from, servers: last[:s], workers: last[s:], measuring: last, rows: rep.GPUs != nil}
		all = append(all, side)
		return side, nil
	}
	cl, err := g.startNodes(r.c, r.c.String("host"), s, n, func(role string, rank int) (_, _ []string) { return child, variables(role, rank) })
	side, err := add(fromGo, cl, err)
	if err != nil {
		return nil, err
	}
	if side.trips = r.chosen(afdDeviceForms); rep.GPUs == nil {
		side.trips = r.chosen(afdForms)
		side.steps, side.measuring = side.trips, side.workers
	}
	python := func(kind, address string, rank int) []string {
		args := []string{r.c.String("python"), "-c", afdProgram, kind, deviceOf(r.gpus)}
		for _, x := range slices.Concat(spec, []any{n, s, address, rank}) {
			args = append(args, fmt.Sprint(x))
		}
		return args
	}
	if forms := r.chosen(afdAllForms[:len(afdAllForms)-1]); len(forms) > 0 && r.noPython == "" {
		cl, err := g.startNodes(r.c, r.c.String("host"), s, n, func(role string, rank int) (_, _ []string) {
			if role == roles[0] {
				return child, variables(role, rank)
			}
			return python("fserver_lib", "-", rank), variables(role, rank)
		})
		if side, err = add(fromPython, cl, err); err != nil {
			return nil, err
		}
		side.steps = forms
		side.trips = slices.DeleteFunc(slices.Clone(forms), func(form string) bool { return form == formSide }) // as streams
	}
	if !slices.Contains(r.forms, formTorch) {
		return all, nil
	}
	rep.NoTorch = r.noTorch
	if r.noTorch == "" && rep.shared() {
		rep.NoTorch = fmt.Sprintf("NCCL needs a GPU for each of %d processes", n+s)
	}
	if rep.NoTorch != "" {
		return all, nil
	}
	cl, err = g.startTorch(n+s, func(address string, rank int) (_, _ []string) {
		role, k := roles[1], rank
		if rank >= s {
			role, k = roles[2], rank-s
		}
		return python("torch", address, rank), variables(role, k)
	})
	if side, err = add(fromTorch, cl, err); err != nil {
		return nil, err
	}
	side.trips, side.steps = []string{formTorch}, []string{formTorch}
	return all, nil
}

// gpusOf returns the GPUs of n processes, which use those of the run in turn.
func (r *afdRun) gpusOf(n int) (all []int) {
	for i := 0; i < n && r.gpus != nil; i++ {
		all = append(all, r.gpus[i%len(r.gpus)])
	}
	return all
}

// shared reports whether processes share a GPU.
func (r *afdReport) shared() bool {
	return len(slices.Compact(slices.Sorted(slices.Values(r.GPUs)))) < len(r.GPUs)
}

// pythonCheck imports the modules that its arguments name, after the device.
const pythonCheck = `import importlib, sys
modules = [importlib.import_module(name) for name in sys.argv[2:]]
if sys.argv[1] == "gpu" and not modules[0].cuda.is_available():
    sys.exit("PyTorch sees no GPU")`

// noPython is the reason of --python none.
const noPython = "--python none"

// lacks returns why Python processes cannot be started, or "".
func (r *afdRun) lacks(ctx context.Context, modules ...string) string {
	python := r.c.String("python")
	if python == "none" {
		return noPython
	}
	cmd := exec.CommandContext(ctx, python, slices.Concat([]string{"-c", pythonCheck, deviceOf(r.gpus)}, modules)...)
	var said bytes.Buffer
	cmd.Stderr = &said
	err := cmd.Run()
	switch last := lastLine(said.String()); {
	case err == nil:
		return ""
	case last != "":
		return python + ": " + last
	}
	return err.Error()
}
