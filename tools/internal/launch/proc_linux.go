package launch

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// attributes put a child into a process group of its own and have the kernel kill
// it when the thread that started it ends, so that one must live on.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// waitExit waits until pid has ended and leaves it a zombie, so that its number,
// and that of its group, are not given to another process yet.
func waitExit(pid int) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}
