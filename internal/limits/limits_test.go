package limits

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/env"
)

func config(workers, servers, group int, van string) *env.Config {
	c := env.Default()
	c.NumWorkers, c.NumServers, c.GroupSize, c.VanType = workers, servers, group, van
	return c
}

// apart is config without shared memory between nodes.
func apart(workers, servers, group int, van string) *env.Config {
	c := config(workers, servers, group, van)
	c.EnableIPC = 0
	return c
}

// overZMQ is apart with data over ZeroMQ.
func overZMQ(workers, servers int) *env.Config {
	c := apart(workers, servers, 1, "zmq")
	c.Data = env.DataZMQ
	return c
}

func system(files, open, memlock uint64) System {
	return System{
		Files:   func() (uint64, uint64, error) { return 1024, files, nil },
		Open:    func() int { return int(open) },
		Memlock: func() (uint64, error) { return memlock, nil },
	}
}

// TestOf: the needs follow from the role and the shape of the cluster.
func TestOf(t *testing.T) {
	for _, x := range []struct {
		name string
		c    *env.Config
		role string
		s    System
		low  string // the limits that are too low; a limit with a question mark is tight
		text string // of the first
	}{
		{"small", config(1, 1, 1, "zmq"), "scheduler", system(1024, 10, NoLimit), "", ""},
		{"files of a worker", apart(500, 500, 1, "zmq"), "worker", system(1024, 20, NoLimit), "RLIMIT_NOFILE",
			"too few open files: RLIMIT_NOFILE is 1024, this node needs 1055 (7 for the scheduler, 2 for data with each of 500 peers, 28 of its own, 20 open already; 7 more for each peer that also needs ZeroMQ): ulimit -Hn (limits.conf: nofile; systemd: LimitNOFILE; docker: --ulimit nofile)"},
		{"just enough", apart(500, 500, 1, "zmq"), "worker", system(1055, 20, NoLimit), "RLIMIT_NOFILE?", ""},
		{"ZeroMQ to all peers, too", apart(500, 500, 1, "zmq"), "worker", system(4555, 20, NoLimit), "", ""},
		{"data over ZeroMQ", overZMQ(500, 500), "worker", system(3551, 20, NoLimit), "RLIMIT_NOFILE", "needs 3552 (7 for the scheduler, 7 for messages with each of 500 peers, 25 of its own, 20 open already)"},
		{"shared memory", config(500, 500, 1, "zmq"), "worker", system(3556, 20, NoLimit), "RLIMIT_NOFILE",
			"too few open files: RLIMIT_NOFILE is 3556, this node needs 3557 (7 for the scheduler, 7 for shared memory with each of 500 peers, 30 of its own, 20 open already; 7 more for each peer that also needs ZeroMQ): " +
				"ulimit -Hn (limits.conf: nofile; systemd: LimitNOFILE; docker: --ulimit nofile), or BYTEPS_ENABLE_IPC=0 where"},
		{"shared memory, just enough", config(500, 500, 1, "zmq"), "server", system(7057, 20, NoLimit), "", ""},
		{"shared memory, enough to start", config(500, 500, 1, "zmq"), "server", system(3557, 20, NoLimit), "RLIMIT_NOFILE?", ""},
		{"too little without it, too", config(500, 500, 1, "zmq"), "worker", system(1054, 20, NoLimit), "RLIMIT_NOFILE", "docker: --ulimit nofile)"},
		{"the scheduler shares none", config(1, 1, 1, "zmq"), "scheduler", system(59, 20, NoLimit), "", ""},
		{"the scheduler has all as peers", config(500, 500, 1, "zmq"), "scheduler", system(7000, 20, NoLimit), "RLIMIT_NOFILE", "1000 peers"},
		{"groups", config(10, 64, 8, "zmq"), "worker", system(3500, 20, NoLimit), "RLIMIT_NOFILE", "512 peers"},
		{"sockets", config(512, 512, 1, "zmq"), "scheduler", system(1<<20, 20, NoLimit), "BYTEPS_ZMQ_MAX_SOCKET",
			"too few sockets of libzmq: BYTEPS_ZMQ_MAX_SOCKET is 1024, this node needs 1025 (1 for each of 1024 peers, and its own): set BYTEPS_ZMQ_MAX_SOCKET=1025"},
		{"a worker may need as many sockets", config(1, 1024, 1, "zmq"), "worker", system(1<<20, 20, NoLimit), "BYTEPS_ZMQ_MAX_SOCKET?", ""},
		{"sockets are just enough", config(511, 512, 1, "zmq"), "scheduler", system(1<<20, 20, NoLimit), "", ""},
		{"memory", config(2, 2, 1, "ibverbs"), "server", system(64, 20, 65536), "RLIMIT_MEMLOCK", "RLIMIT_MEMLOCK is 65536 bytes, this node needs 2621440"},
		{"memory without limit", config(2, 2, 1, "ibverbs"), "server", system(64, 20, NoLimit), "", ""},
	} {
		needs, err := Of(x.c, x.role, x.s)
		if err != nil {
			t.Fatalf("%s: %v", x.name, err)
		}
		check(t, x.name, needs, x.low, x.text)
	}
}

// TestCheck: the limits of this process are enough for a small cluster, and not for a
// large one.
func TestCheck(t *testing.T) {
	if _, err := Check(config(1, 1, 1, "zmq"), "worker"); err != nil {
		t.Error(err)
	}
	_, err := Check(config(16000, 16000, 1, "zmq"), "scheduler")
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%v, want an *Error", err)
	}
	if soft, hard, err := files(); err != nil || soft != hard {
		t.Errorf("the limits of open files are %d and %d (%v), want the same", soft, hard, err)
	}
}

// TestExplain: an error that a limit causes names the limit.
func TestExplain(t *testing.T) {
	for _, x := range []struct {
		err  error
		want string
	}{
		{os.NewSyscallError("epoll_create1", syscall.EMFILE), "epoll_create1: too many open files; the limit is RLIMIT_NOFILE: ulimit -Hn"},
		{syscall.ENFILE, "the limit is that of the host: sysctl fs.file-max"},
		{syscall.ENOMEM, "cannot allocate memory"},
	} {
		if got := Explain(x.err); !errors.Is(got, x.err) || !strings.Contains(got.Error(), x.want) {
			t.Errorf("%v is explained as %v, want %q", x.err, got, x.want)
		}
	}
	if got := Explain(nil); got != nil {
		t.Errorf("nil is explained as %v", got)
	}
}
