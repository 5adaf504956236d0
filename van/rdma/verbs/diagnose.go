//go:build linux && cgo && !nordma

package verbs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// diagnose checks the system's requirements for RDMA, and returns an error for the first one that is not met. cause is the error that led to
// the check, or nil.
func (s *stack) diagnose(cause error) error {
	found, err := os.ReadDir(s.opt.sysfs)
	if len(found) == 0 {
		why := "is empty"
		if err != nil {
			why = "cannot be read (" + reason(err) + ")"
		}
		return fmt.Errorf("%w: no RDMA device: %s %s; %s", ErrUnavailable, s.opt.sysfs, why, DeviceRemedy)
	}
	uverbs, err := filepath.Glob(filepath.Join(s.opt.dev, "uverbs*"))
	if err != nil || len(uverbs) == 0 {
		return fmt.Errorf("%w: there are devices (%s), but no %s/uverbs*; load the kernel module ib_uverbs; "+
			"in a container, add --device=/dev/infiniband", ErrUnavailable, names(found), s.opt.dev)
	}
	var denied error
	usable := 0
	for _, u := range uverbs {
		if err := tryOpen(u); err != nil {
			denied = fmt.Errorf("%w: cannot open %s: %s; give the user read and write permission, in a container add --device=/dev/infiniband",
				ErrUnavailable, u, reason(err))
		} else {
			usable++
		}
	}
	if usable == 0 {
		return denied
	}
	cm := filepath.Join(s.opt.dev, "rdma_cm")
	if err := tryOpen(cm); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is missing; load the kernel module rdma_ucm; in a container, add --device=/dev/infiniband",
			ErrUnavailable, cm)
	} else if err != nil {
		return fmt.Errorf("%w: cannot open %s: %s; give the user read and write permission, in a container add --device=/dev/infiniband",
			ErrUnavailable, cm, reason(err))
	}
	if cause != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, cause)
	}
	return nil
}

// tryOpen opens a file as the libraries do. A container may forbid what file permissions allow.
func tryOpen(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// reason returns err without the operation and path, which its caller adds.
func reason(err error) string {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err.Error()
	}
	return err.Error()
}

func names(entries []os.DirEntry) string {
	var n []string
	for _, e := range entries {
		n = append(n, e.Name())
	}
	return strings.Join(n, ", ")
}
