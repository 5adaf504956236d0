package local

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// dialer is the variable that makes the test binary a process that connects to a
// socket, and hands its end to the one who listens.
const dialer = "LOCAL_DIAL"

func TestMain(m *testing.M) {
	if addr := os.Getenv(dialer); addr != "" {
		if err := dialAndShare(addr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func dialAndShare(addr string) error {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: addr, Net: "unixpacket"})
	if err != nil {
		return err
	}
	file, err := c.File()
	if err != nil {
		return err
	}
	if _, _, err := c.WriteMsgUnix([]byte("mine"), unix.UnixRights(int(file.Fd())), nil); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// TestEndOfProcess: a peer that dies is noticed even when somebody else has its end
// of the socket, as a child that it has forked does.
func TestEndOfProcess(t *testing.T) {
	x, err := newToken()
	if err != nil {
		t.Fatal(err)
	}
	l, err := listen(&x)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = []string{dialer + "=" + x.address()}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, fds, err := receive(c, 4)
	if err != nil || len(fds) != 1 {
		t.Fatalf("got %d files: %v", len(fds), err)
	}
	defer closeAll(fds)
	ended := make(chan struct{})
	go func() {
		awaitEnd(c)
		close(ended)
	}()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(limit):
		t.Error("the end of the process was not noticed")
	}
	_ = cmd.Wait()
}
