package doctor

// The subject of all checks: the machine, its configuration, and files of the system.

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

// subject is the machine under test.
type subject struct {
	m      *Machine
	cfg    *env.Config
	cfgErr error

	needRDMA bool // the configuration chooses ibverbs

	early chan Finding // findings of the running check before its end; a check that is no longer waited for blocks here
}

// reason returns the reason why ctx has ended.
func reason(ctx context.Context) string {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return "the time is up"
	}
	return err.Error()
}

const ibverbs = "ibverbs"

// orFail returns s, or Fail if the configuration chooses ibverbs. s is the status of a defect of RDMA (Warn), or of
// absent RDMA (Skip).
func (x *subject) orFail(s Status) Status {
	if x.needRDMA {
		return Fail
	}
	return s
}

// useZMQ returns the end of a remedy if the configuration chooses RDMA.
func (x *subject) useZMQ() string {
	if x.needRDMA {
		return "; or use DMLC_ENABLE_RDMA=zmq on all nodes"
	}
	return ""
}

// needGPU reports whether the configuration chooses GPUs.
func (x *subject) needGPU() bool { return x.cfg.Backend == "GPU" }

// roles returns the roles of the nodes that this process may start. here reports whether the scheduler may be among them if DMLC_ROLE is not
// set.
func (x *subject) roles(here bool) []string {
	switch {
	case x.cfg.Role == "" && here:
		return []string{scheduler, "server", "worker"}
	case x.cfg.Role == "" || x.cfg.Role == "joint":
		return []string{"server", "worker"}
	}
	return []string{x.cfg.Role}
}

const capIPCLock = 14

// capable reports whether this process has a capability.
func (x *subject) capable(bit int) bool {
	caps, err := strconv.ParseUint(x.entry("proc/self/status", "CapEff"), 16, 64)
	return err == nil && caps>>bit&1 == 1
}

// entry returns the value of the line "name: value" of a file, or "".
func (x *subject) entry(file, name string) string {
	for line := range strings.Lines(x.text(file)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// names returns the sorted names in a directory.
func (x *subject) names(dir string) []string {
	files, _ := fs.Glob(x.m.Root, dir+"/*") // the only error is a wrong pattern
	for i, file := range files {
		files[i] = path.Base(file)
	}
	return files
}

// text returns the content of a file, or "" if it cannot be read.
func (x *subject) text(name string) string {
	b, err := fs.ReadFile(x.m.Root, name)
	if err != nil {
		return ""
	}
	return string(b)
}

func (x *subject) line(name string) string { return strings.TrimSpace(x.text(name)) }

// size formats a number of bytes.
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

// round drops digits below the measurement's precision.
func round(d time.Duration) time.Duration {
	switch {
	case d < 100*time.Microsecond:
		return d.Round(100 * time.Nanosecond)
	case d < 10*time.Millisecond:
		return d.Round(10 * time.Microsecond)
	}
	return d.Round(time.Millisecond)
}
