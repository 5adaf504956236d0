// Package limits compares, before a node starts, the node's needs of the system and of libzmq with the limits of
// its process. A limit that is reached later breaks a running cluster, with an error that does not name the limit.
package limits

import (
	"errors"
	"fmt"
	"math"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/env"
)

// The resources of a node; tests measure them. The open files are the measured maximum, including files that are open
// only for a moment while the cluster forms. The locked memory is slightly below the measured value, so that no node is
// refused that could just run.
const (
	// FilesPerPeer are the descriptors of a connection over ZeroMQ, in both directions: a socket and its monitor each
	// have several. Between native workers and servers there is none before a message needs it.
	FilesPerPeer = 7
	// FilesPerSharer are the additional descriptors of shared memory with a peer: for each direction a socket and a
	// descriptor that watches the peer's process; one for reading the peer's memory; one for this node's own ring; and
	// a temporary one.
	FilesPerSharer = 7
	// FilesPerDataPeer are the additional descriptors of data over TCP with a peer that shares no memory: a connection in each direction.
	FilesPerDataPeer = 2
	// filesOfNode are the descriptors of a node without peers, and a few for a connection that is being replaced.
	// filesOfSharing are those of shared memory.
	filesOfNode = 25
	// filesOfData are those of data over TCP.
	filesOfSharing = 2
	filesOfData    = 3
	// lockedPerPeer is the memory that an RDMA connection registers before there is a tensor, in both directions.
	// lockedOfNode is that of a node without peers.
	lockedPerPeer = 512 << 10
	lockedOfNode  = 1 << 20
	// LeastLocked is the memory that a node with one peer registers before there is a tensor.
	LeastLocked = lockedOfNode + lockedPerPeer
)

// raiseFiles explains how to raise RLIMIT_NOFILE.
const raiseFiles = "ulimit -Hn (limits.conf: nofile; systemd: LimitNOFILE; docker: --ulimit nofile)"

// Hint names the limit behind an error that occurs after a successful Check: Check does not know what the program
// itself will open. It returns "" for other errors.
func Hint(err error) string {
	switch {
	case errors.Is(err, syscall.EMFILE):
		return "the limit is RLIMIT_NOFILE: " + raiseFiles
	case errors.Is(err, syscall.ENFILE):
		return "the limit is that of the host: sysctl fs.file-max"
	}
	return ""
}

// Explain returns err with Hint, if there is one.
func Explain(err error) error {
	if hint := Hint(err); hint != "" {
		return fmt.Errorf("%w; %s", err, hint)
	}
	return err
}

// NoLimit stands for "unlimited".
const NoLimit = math.MaxUint64

const zmqMaxSocket = "BYTEPS_ZMQ_MAX_SOCKET"

// Need is a resource that a node needs, and its limit.
type Need struct {
	What   string // "open files"
	Name   string // name of the limit: "RLIMIT_NOFILE", "BYTEPS_ZMQ_MAX_SOCKET"
	Needed uint64
	Have   uint64 // NoLimit if there is none
	Why    string // the parts of Needed
	Raise  string // how to raise the limit
	Bytes  bool   // the numbers are bytes
	Ample  uint64 // with a lower limit the node starts, but may exceed the limit later; 0 if not known
}

// Tight reports whether the limit is enough for the start of the node, but may be too low later.
func (n *Need) Tight() bool { return n.Enough() && n.Ample > n.Have }

// String describes a tight limit.
func (n *Need) String() string {
	return fmt.Sprintf("few %s: %s is %d, this node needs %d at least and may need %d (%s): %s", n.What, n.Name, n.Have, n.Needed, n.Ample, n.Why, n.Raise)
}

// Enough reports whether the limit is enough for the start of the node.
func (n *Need) Enough() bool { return n.Needed <= n.Have }

// Error is a limit that is too low. It is found before the node starts.
type Error struct{ Need }

// Error implements error.
func (e *Error) Error() string {
	unit := ""
	if e.Bytes {
		unit = " bytes"
	}
	return fmt.Sprintf("too few %s: %s is %d%s, this node needs %d (%s): %s", e.What, e.Name, e.Have, unit, e.Needed, e.Why, e.Raise)
}

// Unwrap makes the error van.ErrInvalid if the limit is one of this library's variables.
func (e *Error) Unwrap() error {
	if e.Name == zmqMaxSocket {
		return env.ErrInvalid
	}
	return nil
}

// System reads the limits.
type System struct {
	// Files returns the soft and the hard limit of open files.
	Files func() (soft, hard uint64, err error)
	// Open returns the number of open files.
	Open func() int
	// Memlock returns the bytes that the process may lock, or NoLimit if no limit applies.
	Memlock func() (uint64, error)
	// Threads lists the limits of threads; nil means none.
	Threads func() []Room
	// Space lists the limits of address space, and returns the size of a thread's stack in bytes; nil means none.
	Space func() (rooms []Room, stack uint64)
	// Host lists the limits of open files of all processes together; nil means none.
	Host func() []Room
}

// OS returns the limits of this process.
func OS() System {
	p := self()
	return System{Files: files, Open: openFiles, Memlock: memlock, Threads: p.threads, Space: p.space, Host: p.host}
}

// Peers returns the number of peers of a node in a cluster with that shape. role is "worker", "server" or "scheduler".
func Peers(c *env.Config, role string) int {
	workers, servers := c.NumWorkers*max(c.GroupSize, 1), c.NumServers*max(c.GroupSize, 1)
	switch role {
	case "worker":
		return servers + 1
	case "server":
		return workers + 1
	}
	return workers + servers
}

// openFilesOf returns a node's need of RLIMIT_NOFILE. Any peer may be on the same host; that is not known before it connects. A worker
// or server connects over ZeroMQ only to the peers that need it, and to all C++ nodes.
func openFilesOf(c *env.Config, role string, peers, open, hard uint64) Need {
	n := Need{What: "open files", Name: "RLIMIT_NOFILE", Have: hard, Raise: raiseFiles}
	own := uint64(filesOfNode)
	if role == "scheduler" {
		n.Needed = open + own + peers*FilesPerPeer
		n.Why = fmt.Sprintf("%d for each of %d peers, %d of its own, %d open already", FilesPerPeer, peers, own, open)
		return n
	}
	others := peers - 1 // all but the scheduler
	each, what := uint64(FilesPerPeer), "messages"
	if c.Data == env.DataTCP {
		own += filesOfData
		each, what = FilesPerDataPeer, "data"
	}
	n.Needed = open + own + FilesPerPeer + others*each
	if c.EnableIPC != 0 {
		if n.Enough() {
			n.Raise += ", or BYTEPS_ENABLE_IPC=0 where no two nodes are on one host"
		}
		own += filesOfSharing
		each, what = FilesPerSharer, "shared memory"
		n.Needed = open + own + FilesPerPeer + others*each
	}
	n.Why = fmt.Sprintf("%d for the scheduler, %d for %s with each of %d peers, %d of its own, %d open already", FilesPerPeer, each, what, others, own, open)
	if what != "messages" {
		n.Ample = n.Needed + others*FilesPerPeer
		n.Why += fmt.Sprintf("; %d more for each peer that also needs ZeroMQ", FilesPerPeer)
	}
	return n
}

// Of lists the needs of a node with this configuration. It is not for role joint, which is two nodes.
func Of(c *env.Config, role string, s System) (needs []Need, err error) {
	peers := uint64(Peers(c, role))
	if c.VanType == "zmq" || c.VanType == "ibverbs" {
		needs = Threads(c, s)
	}
	if c.VanType == "ibverbs" {
		have, err := s.Memlock()
		if err != nil {
			return nil, err
		}
		return append(needs, Need{What: "bytes of memory that it may lock", Name: "RLIMIT_MEMLOCK", Needed: lockedOfNode + peers*lockedPerPeer, Have: have, Bytes: true,
			Why:   fmt.Sprintf("%d for each of %d peers, besides tensors", lockedPerPeer, peers),
			Raise: "ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"}), nil
	}
	if c.VanType != "zmq" {
		return nil, nil
	}
	open := uint64(s.Open())
	_, hard, err := s.Files()
	if err != nil {
		return nil, err
	}
	files := openFilesOf(c, role, peers, open, hard)
	if s.Host != nil {
		for _, r := range s.Host() {
			needs = append(needs, Need{What: "open files on the host", Name: r.Name, Needed: r.Used + files.Needed - open, Have: r.Max, Raise: r.Raise,
				Why: fmt.Sprintf("%s, %d in use already", files.Why, r.Used)})
		}
	}
	sockets := Need{What: "sockets of libzmq", Name: zmqMaxSocket, Needed: peers + 1, Have: uint64(c.ZMQMaxSockets),
		Why:   fmt.Sprintf("1 for each of %d peers, and its own", peers),
		Raise: fmt.Sprintf("set BYTEPS_ZMQ_MAX_SOCKET=%d or more on this node", peers+1)}
	if files.Ample > 0 { // the peers that need ZeroMQ are not known yet
		sockets.Needed, sockets.Ample = 2, sockets.Needed
	}
	return append(needs, files, sockets), nil
}

// Check raises the soft limit of open files if necessary. It returns an error that wraps an *Error for each limit that
// is too low for the node, and the tight limits. A limit that cannot be read counts as high enough.
func Check(c *env.Config, role string) (tight []Need, err error) {
	needs, err := Of(c, role, OS())
	if err != nil {
		return nil, nil
	}
	var errs []error
	for _, n := range needs {
		switch {
		case !n.Enough():
			errs = append(errs, &Error{n})
		case n.Tight():
			tight = append(tight, n)
		}
		if n.Name == "RLIMIT_NOFILE" {
			raise()
		}
	}
	return tight, errors.Join(errs...)
}

func files() (soft, hard uint64, err error) {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return 0, 0, os.NewSyscallError("getrlimit", err)
	}
	return l.Cur, l.Max, nil
}

// raise sets the soft limit of open files to the hard limit. Go does this when a Go program starts, but not when a
// program of another language loads this library.
func raise() {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err == nil && l.Cur < l.Max {
		l.Cur = l.Max
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l)
	}
}

func openFiles() int {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(names)
}

func memlock() (uint64, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return 0, os.NewSyscallError("getrlimit", err)
	}
	if l.Cur == unix.RLIM_INFINITY || capable(capIPCLock) {
		return NoLimit, nil
	}
	return l.Cur, nil
}
