package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/freeport"
)

// The tools of the package perftest run with both ends on this host, on one port of a device. They measure the
// hardware, or its emulation, without this library.

// errNoPerftest means that the tools are not installed.
var errNoPerftest = errors.New("perftest is not installed (Debian, Ubuntu: apt install perftest)")

// bwSize is the message size of the bandwidth measurement.
const bwSize = 1 << 20

// writeLat returns the typical (median) time in microseconds of one write of size bytes, one way.
func (r *rdmaRun) writeLat(ctx context.Context, size int) (float64, error) {
	text, err := r.run(ctx, "ib_write_lat", size, min(max(1<<26/size, 100), 2000))
	if err != nil {
		return 0, err
	}
	v, _, err := column(text, size, "t_typical")
	return v, err
}

// writeBW returns the average bandwidth of writes of bwSize bytes, in bytes per second.
func (r *rdmaRun) writeBW(ctx context.Context) (float64, error) {
	text, err := r.run(ctx, "ib_write_bw", bwSize, 200)
	if err != nil {
		return 0, err
	}
	v, unit, err := column(text, bwSize, "BW average")
	if err != nil {
		return 0, err
	}
	return inBytes(v, unit)
}

// inBytes converts a bandwidth to bytes per second.
func inBytes(v float64, unit string) (float64, error) {
	switch unit {
	case "MB/sec", "MiB/sec": // perftest means 2^20 bytes by both
		return v * (1 << 20), nil
	case "Gb/sec":
		return v * 1e9 / 8, nil
	}
	return 0, fmt.Errorf("ib_write_bw: BW average in %q: want MB/sec, MiB/sec or Gb/sec", unit)
}

// The interval between a client's attempts to connect to its server, and the number of attempts.
const (
	knockTime = 100 * time.Millisecond
	knocks    = 100
)

// run runs a server and a client of a tool, and returns the output of the client.
func (r *rdmaRun) run(ctx context.Context, tool string, size, iters int) (string, error) {
	path, err := exec.LookPath(tool)
	if err != nil {
		return "", fmt.Errorf("%s: %w", tool, errNoPerftest)
	}
	port, err := freeport.Find()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The kernel kills the processes when this thread ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	args := []string{"-d", r.at.Device, "-i", strconv.Itoa(r.at.Port), "-x", strconv.Itoa(r.at.GIDIndex),
		"-p", strconv.Itoa(port), "-s", strconv.Itoa(size), "-n", strconv.Itoa(iters), "-F"}
	command := func(out *bytes.Buffer, more ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, path, slices.Concat(args, more)...)
		cmd.Stdout, cmd.Stderr = out, out
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		return cmd
	}
	var said bytes.Buffer
	server := command(&said)
	if err := server.Start(); err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	defer func() {
		cancel()
		<-ended
	}()
	for try := 1; ; try++ {
		var out bytes.Buffer
		err := command(&out, r.at.Host.String()).Run()
		switch {
		case err == nil:
			return out.String(), nil
		case ctx.Err() != nil:
			return "", fmt.Errorf("%s: %w", tool, context.Cause(ctx))
		case try == knocks || !strings.Contains(out.String(), "Couldn't connect"):
			return "", fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, lastLine(out.String()))
		}
		select {
		case err := <-ended:
			ended <- err
			return "", fmt.Errorf("%s %s: the server ended: %v: %s", tool, strings.Join(args, " "), err, lastLine(said.String()))
		case <-time.After(knockTime):
		}
	}
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return strings.TrimSpace(s[strings.LastIndexByte(s, '\n')+1:])
}

// heads matches the headings of perftest's table: "#bytes", "t_min[usec]",
// "BW average[MB/sec]".
var heads = regexp.MustCompile(`#\w+|(?:[\w.%]+ )*[\w.%]+\[[^\]]*\]`)

// column finds the value under the heading name in the line for size, and its unit.
func column(text string, size int, name string) (v float64, unit string, err error) {
	at := -1
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "#bytes") {
			for i, h := range heads.FindAllString(line, -1) {
				if n, u, _ := strings.Cut(h, "["); n == name {
					at, unit = i, strings.TrimSuffix(u, "]")
				}
			}
			continue
		}
		f := strings.Fields(line)
		if at < 0 || len(f) <= at || f[0] != strconv.Itoa(size) {
			continue
		}
		if v, err = strconv.ParseFloat(f[at], 64); err != nil || v <= 0 {
			return 0, "", fmt.Errorf("perftest: %s is %q: want a positive number", name, f[at])
		}
		return v, unit, nil
	}
	if at < 0 {
		return 0, "", fmt.Errorf("perftest: no column %s in: %s", name, lastLine(text))
	}
	return 0, "", fmt.Errorf("perftest: no line for %d bytes in: %s", size, lastLine(text))
}
