package launch

import (
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

// lines is a writer that calls emit for each line, without the line's end. The output of a progress bar ends with a
// carriage return, and counts as a line, since no newline follows while the bar runs.
type lines struct {
	emit func([]byte)
	rest []byte
}

func (l *lines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		line, rest, whole := cutLine(l.rest)
		if !whole && len(line) < maxLine {
			return len(b), nil
		}
		bar := whole && l.rest[len(line)] == '\r' && l.rest[len(line)+1] != '\n'
		if !bar || len(line) > 0 {
			l.emit(bytes.TrimSuffix(line, []byte{'\r'}))
		}
		l.rest = rest
	}
}

// cutLine cuts b after its first line. The end of a line is a newline, with or without a carriage return, or a
// carriage return alone. If b ends with a carriage return, a newline may follow, so the line is not complete.
func cutLine(b []byte) (line, rest []byte, whole bool) {
	i := bytes.IndexAny(b, "\r\n")
	switch {
	case i < 0 || b[i] == '\r' && i+1 == len(b):
		return b, nil, false
	case b[i] == '\r' && b[i+1] == '\n':
		return b[:i], b[i+2:], true
	}
	return b[:i], b[i+1:], true
}

// end emits a last line that has no newline.
func (l *lines) end() {
	if rest := bytes.TrimSuffix(l.rest, []byte{'\r'}); len(rest) > 0 {
		l.emit(rest)
	}
}

// output copies a child's stdout or stderr.
type output struct {
	lines
	from *os.File // the pipe that the child writes
	done chan struct{}
}

// copy copies the output until no process has it open, or until the deadline of the pipe. All that was written by then is
// copied, also if the printer is blocked at the deadline.
func (o *output) copy() {
	defer close(o.done)
	buf := make([]byte, 32<<10)
	var err error
	read := func(most int) (n int) {
		n, err = o.from.Read(buf[:min(most, len(buf))])
		_, _ = o.Write(buf[:n]) // has no errors
		return n
	}
	for err == nil {
		read(len(buf))
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return
	}
	left := unread(o.from)
	for err = o.from.SetReadDeadline(time.Time{}); left > 0 && err == nil; {
		left -= read(left)
	}
}

// await waits for the end of the output, and releases the pipe.
func (o *output) await() {
	<-o.done
	o.end()
	_ = o.from.Close() // was only read
}

// unread returns the number of bytes in a pipe, 0 after an error.
func unread(pipe *os.File) (n int) {
	if c, err := pipe.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // the only error is a closed descriptor
	}
	return n
}
