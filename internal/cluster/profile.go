package cluster

// The profile of received messages that ENABLE_PROFILING asks for.

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// profile writes a line for each data message received, in C++ StepMesh's format: the low 16 bits of the key, role
// and operation, and the time in microseconds since 1970. It ends with the first line that cannot be written
// completely.
type profile struct {
	log  *slog.Logger
	role string

	mu    sync.Mutex // guards the fields below
	f     *os.File
	lines int
	ended bool
}

// openProfile opens the file whose name consists of PROFILE_PATH and the role. If another node has that
// file open, for example another worker of this host, the process id is appended to the name. It returns
// nil if ENABLE_PROFILING is off, and for the scheduler.
func openProfile(cfg *Config, role van.Role, log *slog.Logger) (*profile, error) {
	if !cfg.Profiling || role == van.Scheduler {
		return nil, nil
	}
	name := fmt.Sprintf("pslite_profile_van_%s_%d", role, time.Now().UnixMicro())
	if cfg.ProfilePath != "" {
		name = fmt.Sprintf("%s_van_%s", cfg.ProfilePath, role)
	}
	f, err := ownFile(name)
	if err != nil {
		return nil, &van.Error{Op: "start", Detail: "PROFILE_PATH", Err: fmt.Errorf("%w: %w", van.ErrInvalid, err)}
	}
	log.Info("profile of received messages (ENABLE_PROFILING)", "file", f.Name())
	return &profile{log: log, role: role.String(), f: f}, nil
}

// ownFile empties the file name and opens it for writing. Only the first node that asks gets this file;
// others get name_PID, name_PID_2 and so on. The file is locked until it is closed, or the process ends.
// If files cannot be locked, every node gets the file name.
func ownFile(name string) (*os.File, error) {
	path := name
	for i := 1; ; i++ {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err != nil || !info.Mode().IsRegular() { // a pipe or a device may have several writers
			return f, nil
		}
		if !errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK) {
			if err := f.Truncate(0); err != nil {
				return nil, errors.Join(err, f.Close())
			}
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		path = fmt.Sprintf("%s_%d", name, os.Getpid())
		if i > 1 {
			path = fmt.Sprintf("%s_%d", path, i)
		}
	}
}

// received adds a line for one message. A nil profile does nothing.
func (p *profile) received(m *van.Meta) {
	if p == nil {
		return
	}
	kind := "pull"
	if m.Push {
		kind = "push"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	if _, err := fmt.Fprintf(p.f, "%d\t%s_van_recv_%s\t%d\n", m.Key&0xffff, p.role, kind, time.Now().UnixMicro()); err != nil {
		p.ended = true
		p.log.Warn("the profile of received messages ends here (ENABLE_PROFILING): a line could not be written", "file", p.f.Name(), "lines", p.lines, "err", err)
		return
	}
	p.lines++
}

func (p *profile) close() error {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	return p.f.Close()
}
