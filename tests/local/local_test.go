package local

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// pair starts a worker in this process, and a server that echoes in one of its own.
func pair(t testing.TB, o testcluster.Options, attr *syscall.SysProcAttr) (*testcluster.Cluster, *nodetest.Process, *af.Worker) {
	t.Helper()
	var p *nodetest.Process
	if o.Over == testcluster.InProc {
		o.Over = testcluster.SHM
	}
	o.Elsewhere = nodetest.Elsewhere(t, "server", 0, echo, &p, nodetest.Attr(attr))
	c := testcluster.Start(t, o)
	p.Ready()
	return c, p, nodetest.Worker(t, c.Workers[0])
}

// TestValues: every byte arrives, at any length.
func TestValues(t *testing.T) {
	c, _, w := pair(t, testcluster.Options{}, nil)
	if !testcluster.SharesMemory(c.Workers[0], serverID) {
		t.Fatal("worker and server do not share memory")
	}
	seq := 0
	for _, n := range []int{1, 8, 1000, 4096, 32<<10 - 1, 32 << 10, 32<<10 + 1, 64 << 10, 100_003, 1 << 20, 1<<20 + 8, 5_000_001, 40 << 20} {
		for range 5 {
			seq++
			if err := roundTrip(w, seq, n); err != nil {
				t.Fatalf("%d bytes: %v", n, err)
			}
		}
	}
}

// held counts the descriptors and mappings of this process for shared memory.
func held(t testing.TB) (fds, maps int) {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return len(dir), strings.Count(string(text), "memfd:stepaf")
}

// shm is the files of /dev/shm, where others have files, too, that these processes have open or mapped.
func shm(t testing.TB, pids ...int) (names []string) {
	t.Helper()
	for _, pid := range pids {
		dir := "/proc/" + strconv.Itoa(pid)
		text, err := os.ReadFile(dir + "/maps")
		if err != nil {
			t.Fatal(err)
		}
		fds, err := os.ReadDir(dir + "/fd")
		if err != nil {
			t.Fatal(err)
		}
		used := strings.Fields(string(text))
		for _, fd := range fds {
			link, _ := os.Readlink(dir + "/fd/" + fd.Name()) // "" if it was closed meanwhile
			used = append(used, link)
		}
		names = append(names, slices.DeleteFunc(used, func(s string) bool { return !strings.HasPrefix(s, "/dev/shm/") })...)
	}
	return names
}

// TestServerKilled kills a server in the middle of large transfers, again and
// again. Its requests fail, nothing is left behind, and the next one serves.
func TestServerKilled(t *testing.T) {
	c, p, w := pair(t, testcluster.Options{}, nil)
	if err := roundTrip(w, 1, 1<<20); err != nil {
		t.Fatal(err)
	}
	fds, maps := held(t)
	for round := range 6 {
		var killed atomic.Bool
		victim := p
		if names := shm(t, os.Getpid(), victim.PID()); len(names) > 0 {
			t.Errorf("round %d: files that are left behind when a process is killed: %v", round, names)
		}
		timer := time.AfterFunc(time.Duration(round*round)*time.Millisecond, func() { // some die at the start, some in the midst
			killed.Store(true)
			_ = victim.Signal(syscall.SIGKILL)
		})
		for seq := 0; ; seq++ {
			err := roundTrip(w, seq, 16<<20)
			if err == nil {
				continue
			}
			if !errors.Is(err, van.ErrPeerLost) || !killed.Load() || !strings.Contains(err.Error(), "server 0 (id 8)") {
				t.Fatalf("round %d: %v, want %v that names the server", round, err, van.ErrPeerLost)
			}
			break
		}
		timer.Stop()
		victim.Ended()
		vantest.Eventually(t, 20*time.Second, "the dead server's memory is unmapped", func() bool { _, m := held(t); return m < maps })
		testcluster.Lost(t, c.Scheduler, serverID)
		nodetest.Returns(t, c.Workers, serverID, func() { p = nodetest.Spawn(t, c, "server", 0, echo) })
		p.Ready()
		if err := roundTrip(w, 99, 16<<20); err != nil {
			t.Fatalf("round %d, next server: %v", round, err)
		}
		if !testcluster.SharesMemory(c.Workers[0], serverID) {
			t.Errorf("round %d: no memory is shared with the next server", round)
		}
	}
	vantest.Eventually(t, 20*time.Second, "as many files and mappings as at first", func() bool { f, m := held(t); return f <= fds+8 && m == maps })
}

// TestWorkerKilled kills a worker while its large pushes come and answers go.
func TestWorkerKilled(t *testing.T) {
	var p *nodetest.Process
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.SHM, Workers: 2, Elsewhere: nodetest.Elsewhere(t, "worker", 0, floods, &p)})
	var torn atomic.Pointer[error]
	if err := nodetest.Serve(c.Servers[0], func(b af.Batch) {
		x := b.Pushes()[0].Val.Bytes()
		if err := check(x, int(x[4])|int(x[5])<<8); err != nil {
			torn.Store(&err)
		}
		_ = nodetest.Echo(b) // its worker may be gone
	}); err != nil {
		t.Fatal(err)
	}
	other := nodetest.Worker(t, c.Workers[1])
	begun := func(round int) {
		t.Helper()
		p.Expect("begun")
		if !testcluster.SharesMemory(c.Servers[0], workerID) {
			t.Errorf("round %d: no memory is shared with the worker", round)
		}
	}
	for round := range 4 {
		begun(round)
		timer := time.NewTimer(time.Duration(round) * 3 * time.Millisecond)
		<-timer.C
		p.Kill()
		if err := roundTrip(other, round, 1<<20); err != nil {
			t.Fatalf("round %d, the other worker: %v", round, err)
		}
		testcluster.Lost(t, c.Scheduler, workerID)
		nodetest.Returns(t, c.Servers, workerID, func() { p = nodetest.Spawn(t, c, "worker", 0, floods) })
	}
	begun(4)
	p.Kill()
	if err := torn.Load(); err != nil {
		t.Error(*err)
	}
	vantest.Eventually(t, 20*time.Second, "nothing is lent to the dead", func() bool { return testcluster.Stats(c.Servers[0]).LentValues == 0 })
}

// TestServerStops: a server that stops in the middle fails its request in time, and
// its late answer does not come where the worker has something else by then.
func TestServerStops(t *testing.T) {
	_, p, w := pair(t, testcluster.Options{}, nil)
	for round := range 8 {
		if err := roundTrip(w, round, 16<<20); err != nil {
			t.Fatal(err)
		}
		h, pull, err := request(w, 100+round, 16<<20)
		if err != nil {
			t.Fatal(err)
		}
		timer := time.NewTimer(time.Duration(round) * 700 * time.Microsecond)
		<-timer.C
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
		err = cluster.Call(h).Customer().Wait(context.Background(), h.Timestamp(), 200*time.Millisecond)
		if err == nil { // it was quicker
			err = check(pull, 100+round)
		} else if errors.Is(err, van.ErrTimeout) {
			err = nil
		}
		if err != nil {
			t.Fatal(err)
		}
		now := bytes.Clone(pull)
		if err := p.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if err := roundTrip(w, round, 1<<20); err != nil { // earlier messages have arrived by then
			t.Fatal(err)
		}
		if !bytes.Equal(now, pull) {
			t.Errorf("round %d: the tensor was written to after Wait had failed", round)
		}
	}
}

// TestOutOfReach: a peer in another container, of another user, or that does not
// want it, is reached over the van inside, and one line says why.
func TestOutOfReach(t *testing.T) {
	for _, c := range []struct {
		name string
		attr *syscall.SysProcAttr
		set  func(*postoffice.Config)
		log  string
	}{
		{"another process namespace", &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}, nil, "namespace"},
		{"another user", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}, nil, "runs as user"},
		{"switched off", nil, func(c *postoffice.Config) { c.EnableIPC = 0 }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log nodetest.Text
			cl, _, w := pair(t, testcluster.Options{Over: testcluster.AsSet, Set: c.set, Log: log.Logger(slog.LevelInfo)}, c.attr)
			if testcluster.SharesMemory(cl.Workers[0], serverID) {
				t.Error("memory is shared")
			}
			for i, n := range []int{100, 3 << 20} {
				if err := roundTrip(w, i, n); err != nil {
					t.Fatal(err)
				}
			}
			if text := log.String(); c.log != "" && (strings.Count(text, "no shared memory with a peer") != 1 || !strings.Contains(text, c.log)) {
				t.Errorf("the log does not say once why: %s", text)
			}
		})
	}
}

// TestIdle: the process of an idle node does not poll. It was woken 60 to 180 times a second.
func TestIdle(t *testing.T) {
	_, p, w := pair(t, testcluster.Options{}, nil)
	for i := range 200 {
		if err := roundTrip(w, i, 1000); err != nil {
			t.Fatal(err)
		}
	}
	<-time.After(100 * time.Millisecond) // for spinning to end
	vantest.Idle(t, "the server", p.PID(), 600)
	if err := roundTrip(w, 1, 1000); err != nil {
		t.Fatal(err)
	}
}
