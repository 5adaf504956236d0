package freeport

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestFind: concurrent callers get different free ports.
func TestFind(t *testing.T) {
	var mu sync.Mutex
	got := map[int]bool{}
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			port, err := Find()
			if err != nil {
				t.Error(err)
				return
			}
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Close()
			mu.Lock()
			defer mu.Unlock()
			if got[port] {
				t.Errorf("port %d twice", port)
			}
			got[port] = true
		})
	}
	all.Wait()
}

// TestClaim: a block that a process has is not claimed again. When all are claimed, all ports are used.
func TestClaim(t *testing.T) {
	name := fmt.Sprintf("stepaf-test-%d", os.Getpid())
	got := map[int]int{}
	for range blocks {
		port, n, fd := claim(name)
		if fd < 0 || n != blockLen || port < first || port+n > first+count {
			t.Fatalf("claimed %d ports from %d, socket %d", n, port, fd)
		}
		if _, twice := got[port]; twice {
			t.Errorf("the block at port %d is claimed twice", port)
		}
		got[port] = fd
	}
	if port, n, fd := claim(name); port != first || n != count || fd >= 0 {
		t.Errorf("without a free block: %d ports from %d, socket %d, want all and no socket", n, port, fd)
	}
	for _, fd := range got {
		_ = unix.Close(fd)
	}
	_, n, fd := claim(name)
	if n != blockLen {
		t.Error("a block that was given back is not claimed")
	}
	_ = unix.Close(fd)
}

// TestExcept: the port to avoid is released after another port is found.
func TestExcept(t *testing.T) {
	full := errors.New("no free port")
	for _, c := range []struct {
		free []int
		want int
		held []int
		err  error
	}{
		{[]int{30001, 30000}, 30001, []int{30001}, nil},
		{[]int{30000, 30001}, 30001, []int{30001}, nil},
		{[]int{30000}, 0, nil, full},
		{nil, 0, nil, full},
	} {
		var held []int
		port, err := Except(30000, func() (int, func(), error) {
			if len(c.free) == 0 {
				return 0, nil, full
			}
			p := c.free[0]
			c.free, held = c.free[1:], append(held, p)
			return p, func() { held = slices.DeleteFunc(held, func(h int) bool { return h == p }) }, nil
		})
		if port != c.want || !errors.Is(err, c.err) || !slices.Equal(held, c.held) {
			t.Errorf("port %d, %v, held %v; want %d, %v, %v", port, err, held, c.want, c.err, c.held)
		}
	}
}

func TestEphemeral(t *testing.T) {
	for port, want := range map[int]bool{32767: false, 32768: true, 60999: true, 61000: false} {
		if got := inRange("32768\t60999\n", port); got != want {
			t.Errorf("port %d: %t, want %t", port, got, want)
		}
	}
	if inRange("", 0) {
		t.Error("a port of no range")
	}
}
