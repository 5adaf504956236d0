package doctor

// What the two processes of a pair of GPUs say to each other.

import (
	"errors"
	"fmt"
	"strings"

	"github.com/stepaf/stepaf-go/van/backend"
)

// pairRequest is what a child is asked to try: to bring memory of this process to a
// GPU of its own.
type pairRequest struct {
	To      int          `json:"to"`
	Bytes   int          `json:"bytes"` // of each source
	Sources []pairSource `json:"sources"`
}

// pairSource is memory of a GPU, full of the pattern of Seed.
type pairSource struct {
	From   int            `json:"from"`
	Seed   uint64         `json:"seed"`
	Export backend.Export `json:"export"`
}

// pairResult is what became of one pair, as the child says it and as JSON carries it.
type pairResult struct {
	From           int        `json:"from"`
	To             int        `json:"to"`
	SmallNS        int64      `json:"copy_1kib_ns,omitempty"` // median, until the host knows of it
	BytesPerSecond float64    `json:"bytes_per_second,omitempty"`
	Fault          *pairFault `json:"fault,omitempty"` // nil when it works
}

// pairFault says why values of a pair do not go directly.
type pairFault struct {
	Text string `json:"error"`
	Call string `json:"call,omitempty"` // the driver's function, if it was one
	Code int    `json:"code,omitempty"` // its result
	Name string `json:"name,omitempty"`
	Kind string `json:"kind,omitempty"` // one of the kinds below
}

// Kinds of faults with a remedy or a meaning of their own.
const (
	faultUntried     = "untried" // says nothing of the pair
	faultWrong       = "wrong bytes"
	faultUnsupported = "unsupported"
	faultMemory      = "memory"
	faultLost        = "device lost"
)

func newFault(err error) *pairFault {
	f := &pairFault{Text: strings.ReplaceAll(err.Error(), "\n", "; ")} // of joined errors
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

// untried is the fault of a pair that why has kept from being tried.
func untried(why string) *pairFault { return &pairFault{Text: why, Kind: faultUntried} }

// short is the driver's function and result, or whatever else there is.
func (f *pairFault) short() string {
	if f.Call == "" {
		return f.Text
	}
	return fmt.Sprintf("%s: %s (%d)", f.Call, f.Name, f.Code)
}

// status of a pair that does not work: values that arrive changed are worse than slow.
func (f *pairFault) status() Status {
	if f.Kind == faultWrong {
		return Fail
	}
	return Warn
}

// verdict says what becomes of a pair's values, and why.
func (f *pairFault) verdict() string {
	switch f.Kind {
	case faultUntried:
		return "not known: " + f.Text
	case faultWrong:
		return "CUDA IPC delivers wrong values: " + f.Text
	}
	return "through pinned memory: " + f.short()
}
