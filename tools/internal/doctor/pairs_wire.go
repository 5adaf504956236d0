package doctor

// The messages between the two processes of a pair of GPUs.

import (
	"errors"
	"fmt"
	"strings"

	"github.com/stepaf/stepaf-go/van/backend"
)

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
