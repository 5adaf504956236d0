package limits

// The limits of threads and of address space. If libzmq or Go cannot start a thread, it aborts instead of returning an error.

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/env"
)

// The threads and the address space that a node uses. Tests compare these constants with real nodes.
const (
	// threadsOfGo is the least number of threads that Go starts for a node, in addition to its existing threads.
	threadsOfGo = 3
	// spaceOfNode is the address space for Go's heap and for libzmq, without stacks. dataOfNode is its
	// writable part.
	spaceOfNode = 96 << 20
	dataOfNode  = 32 << 20
	// defaultStack is the stack of a thread where RLIMIT_STACK is unlimited.
	defaultStack = 2 << 20
	// spareThreads and spareSpace are the additional needs of a node with large messages and many processors. A node
	// starts without them.
	spareThreads = 8
	spareSpace   = 512 << 20
	// threadsOfNotice and spaceOfNotice are the needs of a process that sends one message and then ends: one I/O thread and
	// one reaper of libzmq, and those of Go.
	threadsOfNotice = 2 + threadsOfGo
	spaceOfNotice   = 16 << 20
)

// Room is a limit and its use.
type Room struct {
	Name      string // "RLIMIT_NPROC"
	Used, Max uint64
	Raise     string // how to raise it
}

// threadsOf returns the number of threads that a node starts, and a text that lists their purposes.
func threadsOf(c *env.Config) (n uint64, why string) {
	if c.VanType == "ibverbs" {
		return 1 + threadsOfGo, fmt.Sprintf("1 that answers peers, %d of Go", threadsOfGo)
	}
	return uint64(c.ZMQIOThreads) + 1 + threadsOfGo, fmt.Sprintf("%d of libzmq by BYTEPS_ZMQ_NTHREADS and 1 more, %d of Go", c.ZMQIOThreads, threadsOfGo)
}

// Threads compares the threads of a node with every limit of them, and their stacks with the address space.
// They do not depend on the size of the cluster.
func Threads(c *env.Config, s System) (needs []Need) {
	n, why := threadsOf(c)
	if s.Threads != nil {
		for _, r := range s.Threads() {
			needs = append(needs, Need{What: "threads", Name: r.Name, Needed: r.Used + n, Have: r.Max,
				Ample: r.Used + n + spareThreads + uint64(runtime.GOMAXPROCS(0)),
				Why:   fmt.Sprintf("%s, %d exist already", why, r.Used), Raise: r.Raise})
		}
	}
	if s.Space != nil {
		rooms, stack := s.Space()
		for _, r := range rooms {
			own := uint64(spaceOfNode)
			if r.Name == "RLIMIT_DATA" {
				own = dataOfNode
			}
			least := r.Used + n*stack + own
			needs = append(needs, Need{What: "bytes of address space", Name: r.Name, Needed: least, Have: r.Max, Ample: least + spareSpace, Bytes: true,
				Why:   fmt.Sprintf("%d threads with stacks of %d (ulimit -s), %d for Go and libzmq, %d in use already", n, stack, own, r.Used),
				Raise: r.Raise})
		}
	}
	return needs
}

// CanNotify reports whether a process whose node does not start can send its reason over ZeroMQ with one I/O thread.
// Otherwise libzmq would abort.
func (s System) CanNotify() bool {
	if s.Threads != nil {
		for _, r := range s.Threads() {
			if r.Used+threadsOfNotice > r.Max {
				return false
			}
		}
	}
	if s.Space != nil {
		rooms, stack := s.Space()
		for _, r := range rooms {
			if r.Used+threadsOfNotice*stack+spaceOfNotice > r.Max {
				return false
			}
		}
	}
	return true
}

// process reads the limits of this process. Tests have a root of their own for /proc and /sys, and other limits.
type process struct {
	root   string
	rlimit func(which int) uint64 // the soft limit
	uid    int
	free   bool // no limit of the user binds it
}

func self() process {
	return process{rlimit: func(which int) uint64 {
		var l unix.Rlimit
		if unix.Getrlimit(which, &l) != nil || l.Cur == unix.RLIM_INFINITY {
			return NoLimit
		}
		return l.Cur
	}, uid: os.Getuid(), free: os.Getuid() == 0 || capable(capSysAdmin) || capable(capSysResource)}
}

func (p process) read(name string) string {
	text, err := os.ReadFile(p.root + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// number reads a file with one number.
func (p process) number(name string) (n uint64, ok bool) {
	n, err := strconv.ParseUint(p.read(name), 10, 64)
	return n, err == nil
}

// threads lists the limits of the number of threads. It leaves out limits that cannot be read.
func (p process) threads() (rooms []Room) {
	total := p.total()
	for _, x := range []struct{ file, name string }{{"/proc/sys/kernel/threads-max", "kernel.threads-max"}, {"/proc/sys/kernel/pid_max", "kernel.pid_max"}} {
		if most, ok := p.number(x.file); ok && total > 0 {
			rooms = append(rooms, Room{x.name, total, most, "sysctl " + x.name + " on the host"})
		}
	}
	rooms = append(rooms, p.pids()...)
	if most := p.rlimit(unix.RLIMIT_NPROC); most != NoLimit && !p.free {
		used := total // counting the user's threads takes time; it is needed only if they may exceed the limit
		if total == 0 || most < 2*total {
			used = p.ofUser()
		}
		rooms = append(rooms, Room{"RLIMIT_NPROC", min(used, most), most, "ulimit -u (limits.conf: nproc; systemd: LimitNPROC; docker: --ulimit nproc)"})
	}
	return rooms
}

// total is the number of threads of the host, 0 if it is not known.
func (p process) total() uint64 {
	for _, word := range strings.Fields(p.read("/proc/loadavg")) {
		if _, all, ok := strings.Cut(word, "/"); ok {
			n, _ := strconv.ParseUint(all, 10, 64)
			return n
		}
	}
	return 0
}

// pids lists the limits of this process's cgroup and of its parents, for both versions of cgroups. Inside a container
// the path may be the host's, while the visible files are those of the container's own cgroup.
func (p process) pids() (rooms []Room) {
	for line := range strings.Lines(p.read("/proc/self/cgroup")) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) < 3 {
			continue
		}
		var mounts []string
		switch {
		case f[1] == "":
			mounts = []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}
		case slices.Contains(strings.Split(f[1], ","), "pids"):
			mounts = []string{"/sys/fs/cgroup/pids"}
		}
		for _, mount := range mounts {
			for dir := path.Clean("/" + f[2]); ; dir = path.Dir(dir) {
				most, limited := p.number(path.Join(mount, dir, "pids.max")) // "max" is no number
				used, ok := p.number(path.Join(mount, dir, "pids.current"))
				if limited && ok {
					rooms = append(rooms, Room{"pids.max of cgroup " + dir, used, most, "docker: --pids-limit; systemd: TasksMax; Kubernetes: the kubelet's podPidsLimit"})
				}
				if dir == "/" {
					break
				}
			}
		}
	}
	return rooms
}

// ofUser returns the number of this user's threads that this process can see.
func (p process) ofUser() (n uint64) {
	all, _ := filepath.Glob(p.root + "/proc/[0-9]*/status")
	for _, name := range all {
		text, _ := os.ReadFile(name)
		if field(string(text), "Uid:", 10) == uint64(p.uid) {
			n += field(string(text), "Threads:", 10)
		}
	}
	return n
}

// field returns the first number after a name in a file like /proc/self/status, or 0.
func field(text, name string, base int) uint64 {
	_, rest, _ := strings.Cut("\n"+text, "\n"+name)
	line, _, _ := strings.Cut(rest, "\n")
	if f := strings.Fields(line); len(f) > 0 {
		n, _ := strconv.ParseUint(f[0], base, 64)
		return n
	}
	return 0
}

// space lists the limits of address space, and the stack of a thread.
func (p process) space() (rooms []Room, stack uint64) {
	if stack = p.rlimit(unix.RLIMIT_STACK); stack == NoLimit {
		stack = defaultStack
	}
	status := p.read("/proc/self/status")
	for _, x := range []struct {
		which             int
		name, used, raise string
	}{
		{unix.RLIMIT_AS, "RLIMIT_AS", "VmSize:", "ulimit -v unlimited (limits.conf: as; systemd: LimitAS=infinity)"},
		{unix.RLIMIT_DATA, "RLIMIT_DATA", "VmData:", "ulimit -d unlimited (limits.conf: data; systemd: LimitDATA=infinity)"},
	} {
		if most := p.rlimit(x.which); most != NoLimit {
			rooms = append(rooms, Room{x.name, field(status, x.used, 10) << 10, most, x.raise + ", or smaller stacks: ulimit -s"})
		}
	}
	return rooms, stack
}

// host lists the limit of open files of all processes. It does not apply to processes with CAP_SYS_ADMIN.
func (p process) host() []Room {
	used, rest, _ := strings.Cut(p.read("/proc/sys/fs/file-nr"), "\t")
	f := strings.Fields(rest)
	if len(f) != 2 || p.free {
		return nil
	}
	n, err := strconv.ParseUint(used, 10, 64)
	most, err2 := strconv.ParseUint(f[1], 10, 64)
	if err != nil || err2 != nil {
		return nil
	}
	return []Room{{"fs.file-max", n, most, "sysctl fs.file-max on the host"}}
}

// Capabilities, by their numbers in Linux.
const (
	capIPCLock     = 14
	capSysAdmin    = 21
	capSysResource = 24
)

// capable reports whether this process has a capability.
func capable(number int) bool {
	text, _ := os.ReadFile("/proc/self/status")
	return field(string(text), "CapEff:", 16)>>number&1 == 1
}
