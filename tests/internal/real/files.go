package real

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Files says how many descriptors a process has open, by kind: "socket", "eventfd", "memfd"
// and so on, or the path of a file.
type Files map[string]int

// openFiles counts the descriptors of this process. Descriptors of libibverbs and librdmacm stay
// open by design until the process ends, and are not counted.
func openFiles() Files {
	f := Files{}
	names, _ := os.ReadDir("/proc/self/fd")
	for _, e := range names {
		target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name()))
		if err != nil { // the one that ReadDir has used
			continue
		}
		if kind := kindOf(target); kind != "infinibandevent" && !strings.HasPrefix(kind, "/dev/infiniband/") {
			f[kind]++
		}
	}
	return f
}

// kindOf is the kind of the target of a link in /proc/self/fd.
func kindOf(target string) string {
	if text, ok := strings.CutPrefix(target, "anon_inode:"); ok {
		return strings.Trim(text, "[]")
	}
	if text, ok := strings.CutPrefix(target, "/memfd:"); ok {
		return "memfd " + strings.TrimSuffix(text, " (deleted)")
	}
	if kind, _, ok := strings.Cut(target, ":["); ok { // socket:[4711]
		return kind
	}
	return target
}

// beyond says which of f were not there before.
func (f Files) beyond(before Files) string {
	var l []string
	for _, kind := range slices.Sorted(maps.Keys(f)) {
		if n := f[kind] - before[kind]; n > 0 {
			l = append(l, fmt.Sprintf("%d of %s", n, kind))
		}
	}
	return strings.Join(l, ", ")
}

// filesBefore counts before there is a node, when all permanent descriptors are open: the
// standard streams, the files in which Go's runtime reads the limits of its control group,
// the epoll and the eventfd with which it waits for descriptors (the pipe here makes it create
// them), and the eventfd of zmq4's own context.
func filesBefore() Files {
	if r, w, err := os.Pipe(); err == nil {
		_, _ = r.Close(), w.Close()
	}
	return openFiles()
}

// filesAfter counts when the node has been closed. Commands that still run, such as the one that
// makes a child, have a moment to end.
func filesAfter(before Files) Files {
	for end := time.Now().Add(closing); ; {
		f := openFiles()
		if f.beyond(before) == "" || time.Now().After(end) {
			return f
		}
		<-time.After(10 * time.Millisecond)
	}
}

// closing is how long after its end a node may still close descriptors.
const closing = 5 * time.Second
