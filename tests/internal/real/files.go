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

// openFiles looks at this process. What libibverbs and librdmacm have opened stays open until
// the process ends, as they mean it to, and is not counted.
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

// kindOf is the kind of what a link in /proc/self/fd leads to.
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

// filesBefore looks before there is a node, when all is open that the process keeps for good:
// its standard streams, the files in which Go's runtime reads the limits of its control group,
// the epoll and the eventfd with which it waits for descriptors, made here for the first one to
// wait for, and the eventfd of zmq4's own context.
func filesBefore() Files {
	if r, w, err := os.Pipe(); err == nil {
		_, _ = r.Close(), w.Close()
	}
	return openFiles()
}

// filesAfter looks when the node has been closed. Who still runs has a moment to end: a command,
// such as that which makes a child.
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
