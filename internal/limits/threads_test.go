package limits

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// tree makes a root with files for a process.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestThreads: every limit of threads applies to a node. If a limit is too low, the error has its name, its value, the needed
// value, and the way to raise it. The default limits of a host or a container are high enough.
func TestThreads(t *testing.T) {
	const host = "/proc/sys/kernel/threads-max"
	base := map[string]string{host: "95000\n", "/proc/sys/kernel/pid_max": "32768\n", "/proc/loadavg": "0.1 0.2 0.3 2/300 777\n",
		"/proc/1/status": "Name:\tinit\nUid:\t0\t0\t0\t0\nThreads:\t3\n", "/proc/7/status": "Name:\tx\nUid:\t1000\t0\t0\t0\nThreads:\t90\n",
		"/proc/8/status": "Name:\ty\nUid:\t1000\t0\t0\t0\nThreads:\t5\n"}
	for _, c := range []struct {
		name  string
		files map[string]string
		nproc uint64
		free  bool
		van   string
		low   string // the limits that are too low; a limit with a question mark is tight
		text  string // the error of the first limit
	}{
		{"a host", nil, 30000, false, "zmq", "", ""},
		{"no cgroups", map[string]string{"/proc/self/cgroup": ""}, NoLimit, false, "zmq", "", ""},
		{"cgroup v2 without a limit", map[string]string{"/proc/self/cgroup": "0::/user.slice\n", "/sys/fs/cgroup/user.slice/pids.max": "max\n", "/sys/fs/cgroup/user.slice/pids.current": "9\n"}, NoLimit, false, "zmq", "", ""},
		{"cgroup v2", map[string]string{"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/pids.max": "20\n", "/sys/fs/cgroup/a/b/pids.current": "13\n"}, NoLimit, false, "zmq",
			"pids.max of cgroup /a/b", "too few threads: pids.max of cgroup /a/b is 20, this node needs 21 (4 of libzmq by BYTEPS_ZMQ_NTHREADS and 1 more, 3 of Go, 13 exist already): docker: --pids-limit; systemd: TasksMax"},
		{"just enough", map[string]string{"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/pids.max": "21\n", "/sys/fs/cgroup/a/b/pids.current": "13\n"}, NoLimit, false, "zmq", "pids.max of cgroup /a/b?", ""},
		{"a cgroup above", map[string]string{"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/pids.max": "max\n", "/sys/fs/cgroup/a/b/pids.current": "13\n",
			"/sys/fs/cgroup/a/pids.max": "100", "/sys/fs/cgroup/a/pids.current": "99"}, NoLimit, false, "zmq", "pids.max of cgroup /a", "is 100, this node needs 107"},
		{"a container that sees the host's path", map[string]string{"/proc/self/cgroup": "0::/docker/0123\n", "/sys/fs/cgroup/pids.max": "10", "/sys/fs/cgroup/pids.current": "4"}, NoLimit, true, "zmq", "pids.max of cgroup /", "needs 12"},
		{"cgroup v1", map[string]string{"/proc/self/cgroup": "9:name=systemd:/\n8:pids:/docker/01\n4:memory:/x\n0::/\n", "/sys/fs/cgroup/pids/docker/01/pids.max": "16", "/sys/fs/cgroup/pids/docker/01/pids.current": "10"},
			NoLimit, true, "zmq", "pids.max of cgroup /docker/01", "needs 18"},
		{"cgroup v1 beside others", map[string]string{"/proc/self/cgroup": "8:cpu,pids:/x\n", "/sys/fs/cgroup/pids/x/pids.max": "16", "/sys/fs/cgroup/pids/x/pids.current": "10"}, NoLimit, true, "zmq", "pids.max of cgroup /x", ""},
		{"a user", nil, 100, false, "zmq", "RLIMIT_NPROC", "too few threads: RLIMIT_NPROC is 100, this node needs 103 (4 of libzmq by BYTEPS_ZMQ_NTHREADS and 1 more, 3 of Go, 95 exist already): ulimit -u (limits.conf: nproc"},
		{"a user whom it does not bind", nil, 100, true, "zmq", "", ""},
		{"over RDMA", nil, 98, false, "ibverbs", "RLIMIT_NPROC", "needs 99 (1 that answers peers, 3 of Go, 95 exist"},
		{"the host is full", map[string]string{host: "305\n"}, NoLimit, true, "zmq", "kernel.threads-max", "sysctl kernel.threads-max on the host"},
		{"another transport", map[string]string{host: "305\n"}, 100, false, "none", "", ""},
	} {
		files := map[string]string{}
		for _, m := range []map[string]string{base, c.files} {
			for k, v := range m {
				files[k] = v
			}
		}
		p := process{root: tree(t, files), uid: 1000, free: c.free, rlimit: func(which int) uint64 {
			if which == unix.RLIMIT_NPROC {
				return c.nproc
			}
			return NoLimit
		}}
		s := system(1<<20, 20, NoLimit)
		s.Threads, s.Space = p.threads, p.space
		needs, err := Of(config(1, 1, 1, c.van), "worker", s)
		if err != nil {
			t.Fatal(err)
		}
		check(t, c.name, needs, c.low, c.text)
	}
}

// check compares the limits that are too low with the expected ones.
func check(t *testing.T, name string, needs []Need, want, text string) {
	t.Helper()
	var low []string
	first := ""
	for _, n := range needs {
		switch {
		case !n.Enough():
			low = append(low, n.Name)
			if first == "" {
				first = (&Error{n}).Error()
			}
		case n.Tight():
			low = append(low, n.Name+"?")
		}
	}
	if got := strings.Join(low, " "); got != want || !strings.Contains(first, text) {
		t.Errorf("%s: %q is too low: %s; want %q: %s", name, got, first, want, text)
	}
}

// TestSpace: the stacks of a node's threads must fit into the free address space.
func TestSpace(t *testing.T) {
	root := tree(t, map[string]string{"/proc/self/status": "VmSize:\t 1024000 kB\nVmData:\t  102400 kB\n"}) // 1000 and 100 MiB
	for _, c := range []struct {
		name            string
		as, data, stack uint64 // MiB, 0: no limit
		low, text       string
	}{
		{"no limits", 0, 0, 8, "", ""},
		{"enough", 2000, 0, 8, "", ""},
		{"tight", 1200, 0, 8, "RLIMIT_AS?", ""},
		{"just enough", 1000 + 8*8 + 96, 0, 8, "RLIMIT_AS?", ""},
		{"too little", 1000 + 8*8 + 95, 0, 8, "RLIMIT_AS", "too few bytes of address space: RLIMIT_AS is 1215299584 bytes, this node needs 1216348160 (8 threads with stacks of 8388608 (ulimit -s), 100663296 for Go and libzmq, 1048576000 in use already): ulimit -v unlimited"},
		{"small stacks", 1000 + 8*1 + 96, 0, 1, "RLIMIT_AS?", ""},
		{"stacks without a limit", 1000 + 8*2 + 95, 0, 0, "RLIMIT_AS", "stacks of 2097152"},
		{"data", 0, 100 + 8*8 + 31, 8, "RLIMIT_DATA", "ulimit -d unlimited"},
		{"enough data", 0, 1000, 8, "", ""},
	} {
		p := process{root: root, rlimit: func(which int) uint64 {
			mib := map[int]uint64{unix.RLIMIT_AS: c.as, unix.RLIMIT_DATA: c.data, unix.RLIMIT_STACK: c.stack}[which]
			if mib == 0 {
				return NoLimit
			}
			return mib << 20
		}}
		s := system(1<<20, 20, NoLimit)
		s.Space = p.space
		needs, err := Of(config(1, 1, 1, "zmq"), "worker", s)
		if err != nil {
			t.Fatal(err)
		}
		check(t, c.name, needs, c.low, c.text)
	}
}

// TestCanNotify: a node that does not start can notify its scheduler with fewer threads and less space than a node needs.
func TestCanNotify(t *testing.T) {
	s := System{Threads: func() []Room { return []Room{{Used: 5, Max: 100}, {Used: 5, Max: 10}} },
		Space: func() ([]Room, uint64) { return []Room{{Used: 1 << 30, Max: 1<<30 + 5<<23 + 16<<20}}, 1 << 23 }}
	if !s.CanNotify() || !(System{}).CanNotify() {
		t.Error("CanNotify() = false at exactly the limit, want true")
	}
	few, small := s, s
	few.Threads = func() []Room { return []Room{{Used: 5, Max: 100}, {Used: 6, Max: 10}} }
	small.Space = func() ([]Room, uint64) { return []Room{{Used: 1<<30 + 1, Max: 1<<30 + 5<<23 + 16<<20}}, 1 << 23 }
	if few.CanNotify() || small.CanNotify() {
		t.Error("CanNotify() = true with a thread or a byte too few, want false")
	}
}

// TestHostFiles: the limit of open files on the host applies to processes without privileges.
func TestHostFiles(t *testing.T) {
	for _, c := range []struct {
		text, low string
		free      bool
	}{
		{"1600\t0\t246617\n", "", false}, {"1600\t0\t1601\n", "fs.file-max", false}, {"1600\t0\t1601\n", "", true},
		{"1600\t0\t9223372036854775807\n", "", false}, {"", "", false}, {"x\t0\ty\n", "", false},
	} {
		s := system(1<<20, 20, NoLimit)
		s.Host = process{root: tree(t, map[string]string{"/proc/sys/fs/file-nr": c.text}), free: c.free}.host
		needs, err := Of(config(1, 1, 1, "zmq"), "worker", s)
		if err != nil {
			t.Fatal(err)
		}
		check(t, c.text, needs, c.low, "")
	}
}

// TestOwnLimits: the limits of this process are read from the system. The process has threads, and they count.
func TestOwnLimits(t *testing.T) {
	p := self()
	if total := p.total(); total == 0 {
		t.Error("the number of threads on the host is not read")
	}
	if n := p.ofUser(); n < 2 {
		t.Errorf("this user has %d threads", n)
	}
	if rooms := p.threads(); len(rooms) < 2 {
		t.Errorf("the limits of threads are %v", rooms)
	}
	p.rlimit = func(int) uint64 { return 1 << 50 }
	rooms, stack := p.space()
	if len(rooms) != 2 || rooms[0].Used < 1<<20 || rooms[1].Used < 1<<20 || rooms[0].Used < rooms[1].Used || stack != 1<<50 {
		t.Errorf("the limits of address space are %v, and a stack has %d bytes", rooms, stack)
	}
}
