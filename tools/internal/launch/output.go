package launch

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxLine is the length at which a line is divided.
const maxLine = 1 << 20

// lastLines is the number of lines of a failed child that are printed again.
const lastLines = 10

// Streams are the outputs of the launcher. Output to a terminal is in color.
type Streams struct {
	Out, Err io.Writer
}

// printer writes whole lines of many children to two streams, one line at a time.
type printer struct {
	mu      sync.Mutex
	streams [2]io.Writer
	colour  [2]bool
}

const (
	toOut = iota
	toErr
)

func newPrinter(s Streams, lookup func(string) (string, bool)) *printer {
	p := &printer{streams: [2]io.Writer{s.Out, s.Err}}
	_, no := lookup("NO_COLOR")
	term, _ := lookup("TERM")
	for i, w := range p.streams {
		p.colour[i] = !no && term != "" && term != "dumb" && isTerminal(w)
	}
	return p
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(interface{ Stat() (os.FileInfo, error) })
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

// say prints a line of the launcher itself to standard error.
func (p *printer) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.streams[toErr], "stepaf: "+format+"\n", args...)
}

// banner prints a line to standard output without changes.
func (p *printer) banner(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintln(p.streams[toOut], line)
}

// line prints one line of a child in one write.
func (p *printer) line(stream int, label string, colour int, text []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := make([]byte, 0, len(text)+len(label)+16)
	if p.colour[stream] {
		b = fmt.Appendf(b, "\x1b[%dm[%s]\x1b[0m ", colour, label)
	} else {
		b = fmt.Appendf(b, "[%s] ", label)
	}
	b = append(append(b, text...), '\n')
	_, _ = p.streams[stream].Write(b) // there is no other place for an error
}

// watch keeps the last lines of a child, and the first line that means failure.
type watch struct {
	failOn *regexp.Regexp

	mu   sync.Mutex // the two streams are copied concurrently
	last []string
	bad  string // first line that failOn matches
}

func (w *watch) see(line []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.last) == lastLines {
		w.last = append(w.last[:0], w.last[1:]...)
	}
	w.last = append(w.last, string(line[:min(len(line), 1000)]))
	if w.bad == "" && w.failOn != nil && w.failOn.Match(line) {
		w.bad = string(line)
	}
}

// seen returns the last lines, and the first one that means failure, "" if there is none.
func (w *watch) seen() (last []string, bad string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.last), w.bad
}

// cutLine is a bufio.SplitFunc. The end of a line is a newline, with or without a carriage return, or a carriage return
// alone: the output of a progress bar ends with one, and no newline follows while the bar runs. If b ends with a carriage
// return, a newline may follow, so the line is not complete.
func cutLine(b []byte, atEOF bool) (n int, line []byte, err error) {
	i := bytes.IndexAny(b, "\r\n")
	switch {
	case i >= 0 && b[i] == '\n':
		return i + 1, b[:i], nil
	case i >= 0 && i+1 < len(b) && b[i+1] == '\n':
		return i + 2, b[:i], nil
	case i == 0 && (len(b) > 1 || atEOF): // a bar begins
		return 1, nil, nil
	case i > 0 && (i+1 < len(b) || atEOF):
		return i + 1, b[:i], nil
	case len(b) >= maxLine, atEOF && len(b) > 0:
		return len(b), bytes.TrimSuffix(b, []byte{'\r'}), nil
	}
	return 0, nil, nil
}

// eachLine calls emit for each line, without the line's end.
func eachLine(r io.Reader, emit func(line []byte)) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 2*maxLine)
	lines.Split(cutLine)
	for lines.Scan() {
		emit(lines.Bytes())
	}
}

// output is a child's stdout or stderr.
type output struct {
	from *os.File  // the pipe that the child writes
	rest io.Reader // nil before the deadline of the pipe; then the bytes that were in it
	done chan struct{}
}

// copy calls emit for each line until no process has the pipe open, or until its deadline. All that was written by then is
// copied, also if emit blocks at the deadline.
func (o *output) copy(emit func(line []byte)) {
	defer close(o.done)
	eachLine(o, emit)
	_ = o.from.Close() // was only read
}

// Read reads the pipe until its deadline, and then what was written by then.
func (o *output) Read(b []byte) (int, error) {
	if o.rest == nil {
		n, err := o.from.Read(b)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if err := o.from.SetReadDeadline(time.Time{}); err != nil {
			return 0, err
		}
		o.rest = io.LimitReader(o.from, unread(o.from))
	}
	return o.rest.Read(b)
}

// unread returns the number of bytes in a pipe, 0 after an error.
func unread(pipe *os.File) int64 {
	n := 0
	if c, err := pipe.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // the only error is a closed descriptor
	}
	return int64(n)
}
