//go:build linux && cgo && !nordma

package verbs

/*
#cgo CFLAGS: -O2 -Wall -Wextra
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options configures Load. The zero value is usable.
type Options struct {
	Log *slog.Logger // for the results of loading; nil: no log

	// Paths, which tests change. Empty: the usual ones.
	libVerbs, libCM, libMLX5 string
	sysfs, dev               string
}

// stack holds the opened libraries. They are never closed: closing librdmacm is unsafe while one of its threads or devices lives.
type stack struct {
	c       *C.sv_lib
	opt     Options
	log     *slog.Logger
	devices atomic.Uint32 // number of opened devices; it makes handles unique
}

// Load opens libibverbs and librdmacm, and libmlx5 if there is one. The error wraps ErrUnavailable and says what is missing and how to install
// it. Load does not look for devices; NewChannel reports a missing one.
func Load(o Options) (Stack, error) {
	o.libVerbs = cmp.Or(o.libVerbs, "libibverbs.so.1")
	o.libCM = cmp.Or(o.libCM, "librdmacm.so.1")
	o.libMLX5 = cmp.Or(o.libMLX5, "libmlx5.so.1")
	o.sysfs = cmp.Or(o.sysfs, "/sys/class/infiniband")
	o.dev = cmp.Or(o.dev, "/dev/infiniband")
	s := &stack{opt: o, log: o.Log}
	s.log = cmp.Or(s.log, slog.New(slog.DiscardHandler))
	verbs, cm, mlx5 := C.CString(o.libVerbs), C.CString(o.libCM), C.CString(o.libMLX5)
	defer C.free(unsafe.Pointer(verbs))
	defer C.free(unsafe.Pointer(cm))
	defer C.free(unsafe.Pointer(mlx5))
	var what C.int
	var text [512]C.char
	s.c = C.sv_load(verbs, cm, mlx5, &what, &text[0], C.int(len(text)))
	if s.c == nil {
		return nil, loadError(o, what, C.GoString(&text[0]))
	}
	s.log.Debug("rdma: libraries opened", "verbs", o.libVerbs, "cm", o.libCM, "mlx5", C.sv_has_mlx5(s.c) != 0,
		"dmabuf", C.sv_has_dmabuf(s.c) != 0)
	return s, nil
}

func loadError(o Options, what C.int, text string) error {
	switch what {
	case C.SV_LOAD_VERBS:
		return fmt.Errorf("%w: cannot open %s: %s; install it (Debian, Ubuntu: apt install libibverbs1 ibverbs-providers)",
			ErrUnavailable, o.libVerbs, text)
	case C.SV_LOAD_CM:
		return fmt.Errorf("%w: cannot open %s: %s; install it (Debian, Ubuntu: apt install librdmacm1)", ErrUnavailable, o.libCM, text)
	case C.SV_LOAD_VERBS_SYMBOL:
		return fmt.Errorf("%w: %s has no function %s; install a newer one (Debian, Ubuntu: libibverbs1)", ErrUnavailable, o.libVerbs, text)
	case C.SV_LOAD_CM_SYMBOL:
		return fmt.Errorf("%w: %s has no function %s; install a newer one (Debian, Ubuntu: librdmacm1)", ErrUnavailable, o.libCM, text)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, syscall.ENOMEM)
}

// shimErrors are the shim's own error numbers, which no system uses.
var shimErrors = map[C.int]error{
	C.SV_ESTALE:    ErrClosed,
	C.SV_EFULL:     ErrQueueFull,
	C.SV_ENOTREADY: syscall.ENOTCONN,
	C.SV_EINLINE:   syscall.EMSGSIZE,
	C.SV_EOPCODE:   errors.New("unknown opcode"),
	C.SV_EPOLLING:  errors.New("another caller polls"),
}

// failure returns the error for a result of the shim, nil for 0.
func failure(rc C.int, op, device, what string) error {
	if rc == 0 {
		return nil
	}
	if err, ok := shimErrors[rc]; ok {
		e, errno := err.(syscall.Errno)
		if !errno {
			return fmt.Errorf("%s: %w", subject(op, device, what), err)
		}
		rc = C.int(e)
	}
	e := &Error{Op: op, Device: device, What: what, Errno: syscall.Errno(rc)}
	switch e.Errno {
	case syscall.ENOMEM:
		e.Hint = memlockHint()
	case syscall.EACCES, syscall.EPERM:
		e.Hint = "no permission; in a container give it the devices under /dev/infiniband and CAP_IPC_LOCK"
	}
	return e
}

// memlockHint describes the limit of locked memory. Memory registered with a device is locked.
func memlockHint() string {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return "RLIMIT_MEMLOCK may be too low: raise it with ulimit -l unlimited, or LimitMEMLOCK=infinity in systemd"
	}
	if l.Cur == unix.RLIM_INFINITY {
		return "out of memory, or of what the device has; RLIMIT_MEMLOCK is unlimited"
	}
	return fmt.Sprintf("RLIMIT_MEMLOCK, the memory that a process may lock, is %d bytes: raise it with ulimit -l unlimited, "+
		"or LimitMEMLOCK=infinity in systemd", l.Cur)
}
