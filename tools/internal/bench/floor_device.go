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

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// The floor between GPUs. Each way is one copy into the other process's memory, and then, in the same stream, a write
// of a flag in a page of host memory that both processes share. The waiting process does nothing but poll its flag.

var le = binary.LittleEndian

// deviceEnd is one end of the floor. It waits for word and writes theirs.
type deviceEnd struct {
	back   backend.StreamDevice
	conn   *net.UnixConn
	page   *memfd.Page // shared by both processes
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

// newDeviceEnd creates an end that sends out bytes and receives in bytes. own and other are the offsets of the flags in the page.
func newDeviceEnd(b backend.Backend, conn *net.UnixConn, page *memfd.Page, own, other, out, in int) (_ *deviceEnd, err error) {
	d, err := backend.StreamDeviceOf(b)
	if err != nil {
		return nil, fmt.Errorf("floor: %w", err)
	}
	e := &deviceEnd{back: d, conn: conn, page: page}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.free())
		}
	}()
	if e.pinned, err = d.RegisterHost(backend.Bytes(page.Mem)); err != nil {
		return nil, err
	}
	e.word = (*atomic.Uint32)(unsafe.Pointer(&page.Mem[own]))
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

// join tells the other end where this end receives, and imports the memory in which the other end receives.
func (e *deviceEnd) join() error {
	x, err := e.back.Export(e.recv)
	if err != nil {
		return err
	}
	var b [van.ExportLen]byte
	van.PutExport(b[:], &x)
	if _, err := e.conn.Write(b[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(e.conn, b[:]); err != nil {
		return fmt.Errorf("floor: the other end sent nothing: %w", err)
	}
	n := e.src.Len()
	if x, err = van.ParseExport(b[:], max(n, 1)); err != nil {
		return fmt.Errorf("floor: the other end's memory: %w", err)
	}
	e.dst, e.far, err = van.MapExport(e.back, x, n)
	return err
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
	e.page = nil
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

// deviceFloor is the floor between GPUs.
type deviceFloor struct {
	floors
	back backend.Backend
}

// serve starts a server that answers the rounds of clients, those of each in a goroutine of its own. close ends the
// floor, if the clients have not ended it.
func (x deviceFloor) serve() (*floorServer, error) {
	// The kernel chooses an abstract name.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix"})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	return serving(l.Addr().String(), func() {
		if err := x.accept(ctx, l); err != nil {
			fmt.Fprintln(os.Stderr, "bench: floor:", err)
		}
	}, stop, func() {}), nil
}

func (x deviceFloor) accept(ctx context.Context, l *net.UnixListener) error {
	context.AfterFunc(ctx, func() { _ = l.Close() })
	var all errgroup.Group
	for range x.clients {
		conn, err := l.AcceptUnix()
		if err != nil {
			return errors.Join(unlessEnded(err), all.Wait())
		}
		all.Go(func() error { return x.answer(ctx, conn) })
	}
	return all.Wait()
}

// answer answers the rounds of one client.
func (x deviceFloor) answer(ctx context.Context, conn *net.UnixConn) error {
	defer conn.Close()
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	fd, page, err := memfd.NewPage(os.Getpagesize())
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	e, err := newDeviceEnd(x.back, conn, page, serverWord, clientWord, x.pull, x.push)
	if err != nil {
		return err
	}
	return errors.Join(unlessEnded(answerRounds(ctx, e, memfd.Name(fd))), e.free())
}

// unlessEnded returns nil for errors that mean that an end has closed the connection.
func unlessEnded(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// answerRounds tells the client the name of the page, and answers its rounds.
func answerRounds(ctx context.Context, e *deviceEnd, page []byte) error {
	_ = e.conn.SetDeadline(time.Now().Add(floorPatient))
	if _, err := e.conn.Write(page); err != nil {
		return err
	}
	if err := e.join(); err != nil {
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

func (x deviceFloor) dial(addrs []string) (baseline, error) {
	ends, err := dialAll(addrs, x.dialOne)
	return &deviceFloorClient{ends}, err
}

// dialOne connects to one server.
func (x deviceFloor) dialOne(to string) (_ *deviceEnd, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: to, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.Close())
		}
	}()
	_ = conn.SetDeadline(time.Now().Add(floorPatient))
	var name [memfd.NameLen]byte
	if _, err := io.ReadFull(conn, name[:]); err != nil {
		return nil, fmt.Errorf("floor: no page from the other end: %w", err)
	}
	page, err := memfd.MapNamed(name[:], os.Getpagesize(), true)
	if err != nil {
		return nil, err
	}
	e, err := newDeviceEnd(x.back, conn, page, clientWord, serverWord, x.push, x.pull)
	if err != nil {
		return nil, err
	}
	if err := e.join(); err != nil {
		return nil, errors.Join(err, e.free())
	}
	return e, nil
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
	for i := 0; i < len(c.ends) && n > 0; i++ {
		if err := c.ends[i].command(uint32(n)); err != nil {
			return nil, err
		}
	}
	return timed(n, func(int) error {
		for _, e := range c.ends {
			e.seq++
			if err := e.write(); err != nil {
				return err
			}
		}
		for _, e := range c.ends {
			if err := e.arrival(context.Background()); err != nil {
				return err
			}
		}
		return nil
	})
}

func (c *deviceFloorClient) close() {
	for _, e := range c.ends {
		e.close()
	}
}

// close ends the floor of a client: first both ends stop using the other's memory, then both free their own.
func (e *deviceEnd) close() {
	if err := errors.Join(e.command(0), e.unmap(), e.conn.Close(), e.free()); err != nil {
		fmt.Fprintln(os.Stderr, "bench: floor:", err)
	}
}
