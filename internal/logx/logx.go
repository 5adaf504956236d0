// Package logx creates the logger of a node. Its lines have the form of the C++ library's, so that logs of both can be
// read together:
//
//	[HH:MM:SS] <role> <gpu> r<rank>/<id> <file>:<line>: <message> key=value ...
//
// A dash stands for an unknown value. Unlike the C++ library, logx writes a line in one piece, and also if DMLC_ROLE
// and STEPMESH_GPU are not set.
package logx

import (
	"context"
	"io"
	"log/slog"
	"path"
	"runtime"
	"strconv"
	"sync"

	"github.com/stepaf/stepaf-go/van/env"
)

// Keys of the attributes for the columns before the message, if they are given to Logger.With outside of any group. In
// a single record they are ordinary attributes, so "id" there can be the id of a peer.
//
// A negative rank or id, and the id 32767 that messages use for "none yet", are printed as a dash. A slog.LogValuer is
// resolved for each line, so that a logger shows a rank as soon as it is known. The LogValuer must be safe for
// concurrent use.
const (
	Role = "role"
	GPU  = "gpu"
	Rank = "rank"
	ID   = "id"
)

// New returns the logger of a node with c's role, device and level. Rank and id are not known yet. Each record is one
// call of w.Write, and these calls never overlap. The logger is safe for concurrent use, and later changes of c do not
// affect it.
func New(w io.Writer, c *env.Config) *slog.Logger {
	h := &handler{out: &output{w: w}, level: c.LogLevel()}
	h.columns[colRole] = slog.StringValue(c.Role)
	if c.Origin("STEPMESH_GPU") != "default" {
		h.columns[colGPU] = slog.IntValue(c.GPU)
	}
	return slog.New(h)
}

const (
	colRole = iota
	colGPU
	colRank
	colID
	numColumns
)

const noID = 1<<15 - 1 // larger than every id and rank

var columnOf = map[string]int{Role: colRole, GPU: colGPU, Rank: colRank, ID: colID}

// output is shared by a logger and all loggers derived from it.
type output struct {
	mu sync.Mutex
	w  io.Writer
}

type handler struct {
	out     *output
	level   slog.Level
	columns [numColumns]slog.Value
	attrs   []byte // attributes of With, formatted
	group   string // open groups, with a dot after each
}

// Enabled implements slog.Handler.
func (h *handler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

// WithGroup implements slog.Handler.
func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	c := *h
	c.group += name + "."
	return &c
}

// WithAttrs implements slog.Handler.
func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	c.attrs = append([]byte(nil), h.attrs...) // derived loggers must not share the tail
	for _, a := range attrs {
		if col, ok := columnOf[a.Key]; ok && h.group == "" {
			c.columns[col] = a.Value
			continue
		}
		c.attrs = appendAttr(c.attrs, h.group, a)
	}
	return &c
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 512); return &b }}

// Handle implements slog.Handler.
func (h *handler) Handle(_ context.Context, r slog.Record) error {
	p := buffers.Get().(*[]byte)
	b := h.appendLine((*p)[:0], r)
	h.out.mu.Lock()
	_, err := h.out.w.Write(b)
	h.out.mu.Unlock()
	if cap(b) <= 64<<10 { // a large buffer is not kept
		*p = b
		buffers.Put(p)
	}
	return err
}

func (h *handler) appendLine(b []byte, r slog.Record) []byte {
	if r.Time.IsZero() {
		b = append(b, "[--:--:--] "...)
	} else {
		b = r.Time.AppendFormat(b, "[15:04:05] ")
	}
	b = append(appendColumn(b, h.columns[colRole]), ' ')
	b = append(appendColumn(b, h.columns[colGPU]), ' ', 'r')
	b = append(appendColumn(b, h.columns[colRank]), '/')
	b = append(appendColumn(b, h.columns[colID]), ' ')
	b = append(appendSource(b, r.PC), ": "...)
	b = appendPlain(b, r.Message)
	b = append(b, h.attrs...)
	r.Attrs(func(a slog.Attr) bool {
		b = appendAttr(b, h.group, a)
		return true
	})
	return append(b, '\n')
}

func appendSource(b []byte, pc uintptr) []byte {
	if pc == 0 {
		return append(b, '-')
	}
	f, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	b = append(b, path.Base(f.File)...)
	b = append(b, ':')
	return strconv.AppendInt(b, int64(f.Line), 10)
}

func appendColumn(b []byte, v slog.Value) []byte {
	v = v.Resolve()
	n := len(b)
	switch {
	case v.Equal(slog.Value{}), v.Kind() == slog.KindInt64 && (v.Int64() < 0 || v.Int64() == noID):
	default:
		b = appendValue(b, v)
	}
	if len(b) == n || string(b[n:]) == `""` {
		return append(b[:n], '-')
	}
	return b
}
