package local

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/inproc"
)

// dialVar is the variable that makes the test binary a process that connects to a socket, and hands its end to the
// listener.
const dialVar = "LOCAL_DIAL"

func TestMain(m *testing.M) {
	if addr := os.Getenv(dialVar); addr != "" {
		if err := dialAndShare(addr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if addr := os.Getenv(stranger); addr != "" {
		if err := dialAndAsk(addr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// stranger is the variable that makes the test binary a process that connects to a socket and writes the reply to
// its standard output.
const stranger = "LOCAL_HELLO"

func dialAndAsk(addr string) error {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: addr, Net: "unixpacket"})
	if err != nil {
		return err
	}
	b := make([]byte, replyHead+2*maxWhy)
	n, err := c.Read(b)
	if err == nil {
		_, err = os.Stdout.Write(b[:n])
	}
	return err
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

// TestEndOfProcess: a peer that dies is noticed even if another process, such as a forked child, has its end of
// the socket.
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
	cmd.Env = []string{dialVar + "=" + x.address()}
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

// TestOtherUser: if the socket does not keep a process of another user away, the process is refused, regardless of
// its claims.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	server := newNode(t, inproc.NewNetwork(), 8, nil)
	server.start()
	self, err := os.Open("/proc/self/exe") // which the other user may not find
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	cmd := exec.Command("/proc/self/fd/3")
	cmd.ExtraFiles, cmd.Dir, cmd.Stderr = []*os.File{self}, "/", os.Stderr
	cmd.Env = []string{stranger + "=" + server.own.token.address()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	b, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if len(b) < replyHead || b[4] != verdictNo || !strings.Contains(string(b), "runs as user 65534, want 0") {
		t.Errorf("the answer is %q, want no, because of the user", b)
	}
}
