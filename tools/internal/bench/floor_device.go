package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/backend"
)

// The floor between GPUs. Each way is one copy into the other process's memory, and then, in the same stream, a write
// of a flag in a page of host memory that both processes share. The waiting process does nothing but poll its flag.

var le = binary.LittleEndian

// deviceMemory are the abilities of a backend that the floor needs.
type deviceMemory interface {
	backend.Backend
	backend.Exporter
	backend.AsyncCopier
	backend.HostPinner
	backend.StreamFlagger
}

// deviceHello tells the other end where to copy to.
type deviceHello struct {
	Handle                         [64]byte
	Allocation, Base, Size, Offset uint64
}

// deviceEnd is one end of the floor. It waits for word and writes theirs.
type deviceEnd struct {
	back   deviceMemory
	conn   *net.UnixConn
	page   []byte // shared by both processes
	pinned backend.Mem
	word   *atomic.Uint32
	theirs backend.Mem
	stream uintptr
	send   backend.Mem
	recv   backend.Mem
	far    backend.Mem // the other end's recv, imported
	src    backend.Mem // the sent part of send
	dst    backend.Mem // its destination in far
	seq    uint32
}

const (
	serverWord = 0
	clientWord = 2048
	// deviceWhole is the granularity of memory that processes can share: a smaller allocation would share other
	// allocations of the same block.
	deviceWhole = 2 << 20
)

// newDeviceEnd creates an end that sends out bytes and receives in bytes. fd is the shared page; it remains the
// caller's. own and other are the offsets of the flags.
func newDeviceEnd(b backend.Backend, conn *net.UnixConn, fd, own, other, out, in int) (_ *deviceEnd, err error) {
	d, ok := b.(deviceMemory)
	if !ok {
		return nil, fmt.Errorf("floor: backend %s cannot share memory with another process", b.Name())
	}
	e := &deviceEnd{back: d, conn: conn}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.free())
		}
	}()
	if e.page, err = unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	if e.pinned, err = d.RegisterHost(backend.Bytes(e.page)); err != nil {
		return nil, err
	}
	e.word = (*atomic.Uint32)(unsafe.Pointer(&e.page[own]))
	e.theirs = e.pinned.Sub(other, 4)
	if e.stream, err = d.NewStream(); err != nil {
		return nil, err
	}
	whole := func(n int) int { return max(n+deviceWhole-1, deviceWhole) / deviceWhole * deviceWhole }
	if e.send, err = d.Alloc(whole(out)); err != nil {
		return nil, err
	}
	e.src = e.send.Sub(0, out)
	e.recv, err = d.Alloc(whole(in))
	return e, err
}

// hello tells the other end where this end receives.
func (e *deviceEnd) hello() error {
	x, err := e.back.Export(e.recv)
	if err != nil {
		return err
	}
	return binary.Write(e.conn, le, deviceHello{x.Handle, x.Allocation, x.Base, uint64(x.Size), uint64(x.Offset)})
}

// meet imports the memory of the other end's hello.
func (e *deviceEnd) meet() error {
	var h deviceHello
	if err := binary.Read(e.conn, le, &h); err != nil {
		return fmt.Errorf("floor: the other end sent nothing: %w", err)
	}
	x := backend.Export{Handle: h.Handle, Allocation: h.Allocation, Base: h.Base, Size: int(h.Size), Offset: int(h.Offset)}
	if n := e.src.Len(); x.Offset < 0 || x.Size < 0 || x.Offset > x.Size-n {
		return fmt.Errorf("floor: the other end has %d bytes, from %d: want %d", x.Size, x.Offset, n)
	}
	var err error
	if e.far, err = e.back.Import(x); err != nil {
		return err
	}
	e.dst = e.far.Sub(x.Offset, e.src.Len())
	return nil
}

// write sends the data and then the flag.
func (e *deviceEnd) write() error {
	if err := e.back.CopyAsync(e.dst, e.src, e.stream); err != nil {
		return err
	}
	return e.back.WriteFlag(e.stream, e.theirs, e.seq)
}

// arrival waits for the flag. ctx ends when the floor is no longer needed.
func (e *deviceEnd) arrival(ctx context.Context) error {
	var start time.Time
	for i := 1; e.word.Load() != e.seq; i++ {
		if i&(1<<14-1) != 0 {
			continue
		}
		switch {
		case ctx.Err() != nil:
			return net.ErrClosed
		case start.IsZero():
			start = time.Now()
		case time.Since(start) > floorPatient:
			return fmt.Errorf("floor: nothing arrived within %s", floorPatient)
		}
		runtime.Gosched()
	}
	return nil
}

// unmap ends the use of the other end's memory.
func (e *deviceEnd) unmap() error {
	if e.far.Len() == 0 {
		return nil
	}
	err := e.back.CloseImport(e.far)
	e.far = backend.Mem{}
	return err
}

// free frees everything. The other end must no longer use this end's memory.
func (e *deviceEnd) free() error {
	errs := []error{e.unmap()}
	for _, m := range []backend.Mem{e.send, e.recv} {
		if m.Len() > 0 {
			errs = append(errs, e.back.Free(m))
		}
	}
	if e.stream != 0 {
		errs = append(errs, e.back.FreeStream(e.stream))
	}
	if e.pinned.Len() > 0 {
		errs = append(errs, e.back.UnregisterHost(e.pinned))
	}
	if e.page != nil {
		errs = append(errs, os.NewSyscallError("munmap", unix.Munmap(e.page)))
	}
	return errors.Join(errs...)
}

// order reads the number of the next rounds, 0 for the end, and answers that this end is ready.
func (e *deviceEnd) order() (uint32, error) {
	var n uint32
	err := binary.Read(e.conn, le, &n)
	if err == nil && n == 0 {
		err = e.unmap()
	}
	if err == nil {
		err = binary.Write(e.conn, le, n)
	}
	return n, err
}

// newDeviceServer starts a server that answers the rounds of clients, those of each in a goroutine of its own. close ends
// the floor, if the clients have not ended it.
func newDeviceServer(b backend.Backend, clients, push, pull int) (*floorServer, error) {
	// The kernel chooses an abstract name.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix"})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := serveDeviceFloor(ctx, l, b, clients, push, pull); err != nil {
			fmt.Fprintln(os.Stderr, "bench: floor:", err)
		}
	}()
	return &floorServer{l.Addr().String(), ended, func() {
		stop()
		<-ended
	}}, nil
}

func serveDeviceFloor(ctx context.Context, l *net.UnixListener, b backend.Backend, clients, push, pull int) error {
	context.AfterFunc(ctx, func() { _ = l.Close() })
	var all errgroup.Group
	for range clients {
		conn, err := l.AcceptUnix()
		if err != nil {
			return errors.Join(unlessEnded(err), all.Wait())
		}
		all.Go(func() error { return serveDevicePair(ctx, conn, b, push, pull) })
	}
	return all.Wait()
}

// serveDevicePair answers the rounds of one client.
func serveDevicePair(ctx context.Context, conn *net.UnixConn, b backend.Backend, push, pull int) error {
	defer conn.Close()
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	fd, err := unix.MemfdCreate("bench floor", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(os.Getpagesize())); err != nil {
		return os.NewSyscallError("ftruncate", err)
	}
	e, err := newDeviceEnd(b, conn, fd, serverWord, clientWord, pull, push)
	if err != nil {
		return err
	}
	return errors.Join(unlessEnded(answerRounds(ctx, e, fd)), e.free())
}

// unlessEnded returns nil for errors that mean that an end has closed the connection.
func unlessEnded(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func answerRounds(ctx context.Context, e *deviceEnd, fd int) error {
	_ = e.conn.SetDeadline(time.Now().Add(floorPatient))
	if _, _, err := e.conn.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil); err != nil {
		return err
	}
	if err := e.hello(); err != nil {
		return err
	}
	if err := e.meet(); err != nil {
		return err
	}
	_ = e.conn.SetDeadline(time.Time{})
	for {
		// The server sleeps here while the library is measured.
		n, err := e.order()
		if err != nil {
			return err
		}
		if n == 0 {
			// The client closes the connection after it has unmapped this end's memory.
			_ = e.conn.SetReadDeadline(time.Now().Add(floorPatient))
			_, err := e.conn.Read(make([]byte, 1))
			return err
		}
		for range n {
			e.seq++
			if err := e.arrival(ctx); err != nil {
				return err
			}
			if err := e.write(); err != nil {
				return err
			}
		}
	}
}

// deviceFloorClient measures rounds with all servers at once. One thread starts the copies to all of them, and then waits
// for all answers.
type deviceFloorClient struct{ ends []*deviceEnd }

// dialDeviceFloor connects to servers of newDeviceServer in other processes.
func dialDeviceFloor(b backend.Backend, addrs []string, push, pull int) (*deviceFloorClient, error) {
	c := &deviceFloorClient{}
	for _, at := range addrs {
		e, err := dialDevicePair(b, at, push, pull)
		if err != nil {
			c.close()
			return nil, err
		}
		c.ends = append(c.ends, e)
	}
	return c, nil
}

// dialDevicePair connects to one server.
func dialDevicePair(b backend.Backend, to string, push, pull int) (_ *deviceEnd, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: to, Net: "unix"})
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(floorPatient))
	fd, err := receiveFD(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	defer unix.Close(fd)
	e, err := newDeviceEnd(b, conn, fd, clientWord, serverWord, push, pull)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if err = e.meet(); err == nil {
		err = e.hello()
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close(), e.free())
	}
	return e, nil
}

// receiveFD receives a file descriptor and the byte that it is sent with.
func receiveFD(conn *net.UnixConn) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		return -1, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		return -1, errors.Join(errors.New("floor: no page from the other end"), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return -1, errors.Join(errors.New("floor: no page from the other end"), err)
	}
	unix.CloseOnExec(fds[0])
	return fds[0], nil
}

// command tells the server the number of the next rounds and waits until it is ready.
func (e *deviceEnd) command(n uint32) error {
	_ = e.conn.SetDeadline(time.Now().Add(floorPatient))
	if err := binary.Write(e.conn, le, n); err != nil {
		return err
	}
	if err := binary.Read(e.conn, le, &n); err != nil {
		return fmt.Errorf("floor: the other end has closed the connection: %w", err)
	}
	return nil
}

// measure does n rounds and returns the nanoseconds of each.
func (c *deviceFloorClient) measure(n int) ([]int64, error) {
	ns := make([]int64, n)
	for i := 0; i < len(c.ends) && n > 0; i++ {
		if err := c.ends[i].command(uint32(n)); err != nil {
			return nil, err
		}
	}
	for i := range ns {
		start := time.Now()
		for _, e := range c.ends {
			e.seq++
			if err := e.write(); err != nil {
				return nil, err
			}
		}
		for _, e := range c.ends {
			if err := e.arrival(context.Background()); err != nil {
				return nil, err
			}
		}
		ns[i] = int64(time.Since(start))
	}
	return ns, nil
}

// close ends the floor: first both ends of a pair stop using the other's memory, then both free their own.
func (c *deviceFloorClient) close() {
	for _, e := range c.ends {
		if err := errors.Join(e.command(0), e.unmap(), e.conn.Close(), e.free()); err != nil {
			fmt.Fprintln(os.Stderr, "bench: floor:", err)
		}
	}
}
