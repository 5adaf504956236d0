package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"

	zmq4 "github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/zmq"
)

// Machine is the machine that is checked. Host returns this one; tests make their own.
type Machine struct {
	Root fs.FS // of the file system: dev, proc and sys are read
	Env  env.Source

	Version    string // of stepaf
	Go         string // version and platform
	LibZMQ     string // version
	HasCurve   bool   // libzmq has CURVE
	Transports []string
	Backends   []string
	CPUs       int // usable by this process

	Interfaces func() ([]choose.Interface, error)
	// Source returns the address of this host from which packets to another host leave.
	Source func(dest netip.Addr) (netip.Addr, error)
	// Resolve returns the IPv4 address of a host.
	Resolve func(ctx context.Context, host string) (netip.Addr, error)
	// Open opens a device for reading and writing, and closes it.
	Open func(name string) error
	// Limits are the limits of open files, locked memory, threads, address space, and files on the host. Its Memlock returns
	// RLIMIT_MEMLOCK, even if that does not apply to this process.
	Limits limits.System
	// ZMQ creates vans of ZeroMQ.
	ZMQ van.Factory
	// GPUs describes the GPUs without opening them. It is only called if there is a backend GPU.
	GPUs func() ([]backend.Info, error)
	// OpenGPU opens a GPU.
	OpenGPU func(id int) (backend.Backend, error)
	// PairChild runs ChildCommand in another process, with request as its input, until that process or ctx ends. It
	// returns the lines that the process has written, also after an error.
	PairChild func(ctx context.Context, request []byte) ([]byte, error)
	// PairBytes is the size of the copy between two GPUs that measures their bandwidth.
	PairBytes int
	// Verbs loads RDMA. It is nil if this build has no RDMA.
	Verbs func() (verbs.Stack, error)
}

// Host returns the machine of this process. version is stepaf's.
func Host(version string, log *slog.Logger) *Machine {
	major, minor, patch := zmq4.Version()
	m := &Machine{
		Root:       os.DirFS("/"),
		Env:        env.OS(),
		Version:    version,
		Go:         runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH,
		LibZMQ:     fmt.Sprintf("%d.%d.%d", major, minor, patch),
		HasCurve:   zmq4.HasCurve(),
		Transports: van.Transports(),
		Backends:   backend.Names(),
		CPUs:       runtime.NumCPU(),
		Interfaces: choose.Interfaces,
		Source:     hostaddr.Source,
		Resolve:    Resolve,
		Open:       open,
		Limits:     systemLimits(),
		ZMQ:        zmq.New,
		GPUs:       backend.GPUs,
		OpenGPU:    openGPU,
		PairChild:  startPairChild,
		PairBytes:  largeCopy,
		Verbs:      func() (verbs.Stack, error) { return verbs.Load(verbs.Options{Log: log}) },
	}
	if !slices.Contains(m.Transports, ibverbs) {
		m.Verbs = nil
	}
	return m
}

// Resolve returns the IPv4 address of a host name, from this host's name service, and any address unmapped.
func Resolve(ctx context.Context, host string) (netip.Addr, error) {
	return hostaddr.Resolve(ctx, "ip4", host)
}

func open(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// ofDoctor is the number of open files of this process that a node does not have.
const ofDoctor = 8

func systemLimits() limits.System {
	s := limits.OS()
	s.Open = func() int { return ofDoctor }
	s.Memlock = func() (uint64, error) {
		var l unix.Rlimit
		err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l)
		return l.Cur, os.NewSyscallError("getrlimit", err)
	}
	return s
}
