//go:build unix && !linux

package launch

import "syscall"

// attributes put a child into a process group of its own. It outlives a launcher
// that is killed.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// waitExit does not wait: the caller's Wait does, and what is left of the group
// is signalled a moment later than on Linux.
func waitExit(int) {}
