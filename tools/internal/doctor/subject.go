package doctor

// What all checks look at: the machine, its configuration, and files of the system.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van/env"
)

// subject is what is examined.
type subject struct {
	m      *Machine
	cfg    *env.Config
	cfgErr error

	needRDMA bool // the configuration chooses ibverbs

	early chan Finding // of a check under way, see say
}

// say tells of a finding before the check ends. It is false when ctx has ended: the
// check returns the finding then.
func (x *subject) say(ctx context.Context, f Finding) bool {
	select {
	case x.early <- f:
		return true
	case <-ctx.Done():
		return false
	}
}

// reason says why ctx has ended.
func reason(ctx context.Context) string {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return "the time is up"
	}
	return err.Error()
}

const ibverbs = "ibverbs"

// orFail is s, or Fail when the configuration chooses ibverbs: the status of a defect of RDMA (Warn), or of
// RDMA that is not there (Skip).
func (x *subject) orFail(s Status) Status {
	if x.needRDMA {
		return Fail
	}
	return s
}

// useZMQ ends a remedy when RDMA was asked for.
func (x *subject) useZMQ() string {
	if x.needRDMA {
		return "; or use DMLC_ENABLE_RDMA=zmq on all nodes"
	}
	return ""
}

// needGPU tells whether the configuration asks for a GPU.
func (x *subject) needGPU() bool { return x.cfg.Backend == "GPU" }

const capIPCLock = 14

// capable tells whether this process has a capability.
func (x *subject) capable(bit int) bool {
	caps, err := strconv.ParseUint(x.entry("proc/self/status", "CapEff"), 16, 64)
	return err == nil && caps>>bit&1 == 1
}

// entry is what a file says of a name in a line "name: value", "" when it says nothing.
func (x *subject) entry(file, name string) string {
	for line := range strings.Lines(x.text(file)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// names lists what a directory has, in order.
func (x *subject) names(dir string) []string {
	files, _ := fs.Glob(x.m.Root, dir+"/*") // the pattern is right
	for i, file := range files {
		files[i] = path.Base(file)
	}
	return files
}

// text is the content of a file, "" when that cannot be had.
func (x *subject) text(name string) string {
	b, err := fs.ReadFile(x.m.Root, name)
	if err != nil {
		return ""
	}
	return string(b)
}

func (x *subject) line(name string) string { return strings.TrimSpace(x.text(name)) }

// size writes bytes for people.
func size(n uint64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n)/(1<<10), 0
	for v >= 1024 {
		v, u = v/1024, u+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[u])
}

// round drops digits that mean nothing.
func round(d time.Duration) time.Duration {
	switch {
	case d < 100*time.Microsecond:
		return d.Round(100 * time.Nanosecond)
	case d < 10*time.Millisecond:
		return d.Round(10 * time.Microsecond)
	}
	return d.Round(time.Millisecond)
}
