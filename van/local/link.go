package local

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// A link is agreed on over an abstract Unix socket of the receiver's, in one
// message each way:
//
//	sender: hello, with the segment and its bell
//	 0  char[4]  "SAFH"           16  u64  address of a number in the sender
//	 4  u32      version          24  u64  the number
//	 8  i32      sender's id      32  u32  length of the segment
//	12  u32      1: has a device  36  u32  slots
//	             2: names several allocations, see segments.go
//	                              40  u8[16]  the name in the sender's token
//	                              56  the export of that name on its device
//
//	receiver: reply, with its bell unless it refuses
//	 0  char[4]  "SAFR"            5  u8   1: copies from the sender's device, 2: also from several allocations
//	 4  u8       verdict           6  u16  length of the first text
//	                               8  texts: why the verdict, why no device
const (
	helloMagic = "SAFH"
	replyMagic = "SAFR"
	helloLen   = 56 + exportLen
	replyHead  = 8
	maxWhy     = 512 // of a text

	hasDevice   = 1
	hasSegments = 2

	verdictNo     = 0 // refused
	verdictStream = 1 // large parts are to be streamed
	verdictRead   = 2 // large parts are read
	verdictFenced = 3 // refused: another process is the sender's node now
)

// linkTime is how long a handshake may take: a peer that is there answers within
// a millisecond.
const linkTime = 2 * time.Second

var (
	// errRefused is wrapped when a peer listens and does not want the link.
	errRefused = errors.New("the peer refuses the link")

	// errDead is wrapped when the process of the peer is not there any more.
	errDead = errors.New("the peer is gone")
)

// hungUp tells whether err is from a peer that has ended a handshake without an answer.
func hungUp(err error) bool {
	return !errors.Is(err, errDead) && (errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE))
}

// listen opens the socket of t.
func listen(t *token) (*net.UnixListener, error) {
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: t.address(), Net: "unixpacket"})
}

// sameUser checks with the kernel that the process at the other end is the same
// user's, and returns its number.
func sameUser(c *net.UnixConn) (pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return 0, fmt.Errorf("SO_PEERCRED: %w", errors.Join(err, credErr))
	}
	if own := os.Geteuid(); int(cred.Uid) != own {
		return 0, fmt.Errorf("%w: process %d runs as user %d, want %d", van.ErrInvalid, cred.Pid, cred.Uid, own)
	}
	return int(cred.Pid), nil
}

// dial makes the link to the node that t names.
func (v *Van) dial(ctx context.Context, id int, t *token) (l *outLink, err error) {
	ctx, cancel := context.WithTimeout(ctx, linkTime)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", t.address())
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			err = fmt.Errorf("%w: %w", errDead, err)
		}
		return nil, err
	}
	conn := c.(*net.UnixConn)
	pid := 0
	defer func() {
		if err != nil {
			_ = conn.Close()
			if pid > 0 && ended(pid) { // a child that it has forked has the socket
				err = fmt.Errorf("%w: %w", errDead, err)
			}
		}
	}()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	if pid, err = sameUser(conn); err != nil {
		return nil, err
	}
	fd, err := v.memory(segmentLen)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	seg, err := mapSegment(fd)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			seg.bye().Store(1) // a peer that reads the hello later has lost nothing
			seg.unmap()
		}
	}()
	nonce := new([8]byte) // the peer looks for it
	var pin runtime.Pinner
	pin.Pin(nonce)
	defer pin.Unpin()
	if err := v.hello(conn, fd, nonce); err != nil {
		return nil, err
	}
	text, fds, err := receive(conn, replyHead+2*maxWhy)
	defer closeAll(fds)
	if err != nil {
		return nil, err
	}
	if len(text) < replyHead || string(text[:4]) != replyMagic {
		return nil, fmt.Errorf("%w: reply of %d bytes", errProtocol, len(text))
	}
	verdict, device, n := text[4], text[5]&hasDevice != 0 && v.device != nil, int(binary.LittleEndian.Uint16(text[6:]))
	n = min(n, len(text)-replyHead)
	why, noDevice := string(text[replyHead:replyHead+n]), string(text[replyHead+n:])
	if verdict == verdictFenced {
		return nil, fmt.Errorf("%w: %w", errRefused, errReplaced)
	}
	if verdict == verdictNo {
		return nil, fmt.Errorf("%w: %s", errRefused, why)
	}
	if verdict > verdictRead || len(fds) != 1 {
		return nil, fmt.Errorf("%w: verdict %d with %d files", errProtocol, verdict, len(fds))
	}
	if err := checkMemory(fds[0], bellLen); err != nil {
		return nil, fmt.Errorf("bell: %w", err)
	}
	bell, err := mapBell(fds[0])
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Time{})
	how := "ring, and the sender's memory"
	if verdict != verdictRead {
		how = "ring only: " + why
	}
	args := []any{"peer", van.NodeName(id), "large values", how}
	switch {
	case device:
		args = append(args, "values on the device", "from device to device")
	case v.device != nil:
		args = append(args, "values on the device", "through host memory: "+noDevice)
	}
	v.log.Info("data goes through shared memory", args...)
	l = newOutLink(v, id, conn, seg, bell, verdict == verdictRead, device)
	l.segments = device && v.device.sharer != nil && text[5]&hasSegments != 0
	return l, nil
}

// hello introduces this node.
func (v *Van) hello(conn *net.UnixConn, segment int, nonce *[8]byte) error {
	if _, err := rand.Read(nonce[:]); err != nil {
		return err
	}
	b := make([]byte, 0, helloLen)
	le := binary.LittleEndian
	b = append(b, helloMagic...)
	b = le.AppendUint32(b, tokenVersion)
	b = le.AppendUint32(b, uint32(v.id.Load()))
	has, export := uint32(0), [exportLen]byte{}
	if v.device != nil {
		has = hasDevice
		if v.device.sharer != nil {
			has |= hasSegments
		}
		putExport(export[:], &v.device.exports)
	}
	b = le.AppendUint32(b, has)
	b = le.AppendUint64(b, uint64(uintptr(unsafe.Pointer(nonce))))
	b = append(b, nonce[:]...)
	b = le.AppendUint32(b, segmentLen)
	b = le.AppendUint32(b, slotCount)
	b = append(b, v.token.name[:]...)
	b = append(b, export[:]...)
	_, _, err := conn.WriteMsgUnix(b, unix.UnixRights(segment, v.bellFD), nil)
	return err
}

// accept serves the socket until it is closed.
func (v *Van) accept() {
	defer v.wg.Done()
	var failed logx.Sparse
	pause := time.Duration(0)
	for {
		c, err := v.acceptOne()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // as when there are no files left: that may pass
			pause = min(max(2*pause, minPause), maxPause)
			if n, speak := failed.Next(); speak {
				v.log.Warn("no peer can be accepted through shared memory for now", "err", err, "next try in", pause, "so far", n)
			}
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-v.ctx.Done():
				timer.Stop()
			}
			continue
		}
		pause = 0
		v.mu.Lock()
		if v.closed {
			_ = c.Close()
		} else {
			v.greeted[c] = true
			v.wg.Go(func() { v.greet(c) })
		}
		v.mu.Unlock()
	}
}

// Pauses before the listener is tried again, as those of net/http.
const (
	minPause = 5 * time.Millisecond
	maxPause = time.Second
)

func (v *Van) acceptOne() (*net.UnixConn, error) {
	if v.refuse != nil {
		if err := v.refuse(); err != nil {
			return nil, err
		}
	}
	return v.listener.AcceptUnix()
}

// greet answers a peer's hello and then watches its link.
func (v *Van) greet(c *net.UnixConn) {
	defer func() {
		_ = c.Close()
		v.mu.Lock()
		delete(v.greeted, c)
		v.mu.Unlock()
	}()
	_ = c.SetDeadline(time.Now().Add(linkTime))
	r, err := v.admit(c)
	if err != nil {
		r = reply{verdict: verdictNo, why: err.Error()}
		if errors.Is(err, errReplaced) {
			r.verdict = verdictFenced
		}
		v.log.Info("a peer's link through shared memory was refused", "err", err)
	}
	l, b := r.link, r.encode()
	var fds []byte
	if err == nil {
		fds = unix.UnixRights(v.bellFD)
	}
	_, _, sendErr := c.WriteMsgUnix(b, fds, nil)
	if err != nil {
		return
	}
	if sendErr == nil {
		_ = c.SetDeadline(time.Time{})
		if l.dev == nil || l.dev.inbox == nil {
			awaitEnd(c)
		} else {
			var err error
			awaitEndOf(c, func() { err = l.dev.inbox.watch() })
			if errors.Is(err, van.ErrMalformed) {
				l.fail(err)
			}
		}
	}
	v.inLost(l)
}

// awaitEnd returns when the connection or the process at its other end has ended.
func awaitEnd(c *net.UnixConn) {
	awaitEndOf(c, func() {
		var b [1]byte
		_, _ = c.Read(b[:]) // nothing is ever sent
	})
}

// awaitEndOf is awaitEnd where read reads until the connection ends. That may outlast the
// process at its other end: its children have inherited it.
func awaitEndOf(c *net.UnixConn, read func()) {
	if pid, err := sameUser(c); err == nil {
		if fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK); err == nil {
			process := os.NewFile(uintptr(fd), "pidfd")
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				if raw, err := process.SyscallConn(); err == nil && raw.Read(exited) == nil {
					_ = c.Close()
				}
			}()
			defer func() {
				_ = process.SetReadDeadline(time.Unix(1, 0)) // ends the wait
				<-ended
				_ = process.Close()
			}()
		}
	}
	read()
}

// ended tells whether process pid has ended.
func ended(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	return exited(uintptr(fd))
}

// exited tells whether the process of a pidfd has ended.
func exited(fd uintptr) bool {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p[:], 0)
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}

// reply is the answer to a hello.
type reply struct {
	link     *inLink
	verdict  byte
	why      string // when the peer's memory cannot be read
	noDevice string // when its device's cannot be copied
}

func (r *reply) encode() []byte {
	why, noDevice := r.why[:min(len(r.why), maxWhy)], r.noDevice[:min(len(r.noDevice), maxWhy)]
	device := byte(0)
	if r.link != nil && r.link.dev != nil {
		device = hasDevice
		if r.link.dev.inbox != nil {
			device |= hasSegments
		}
	}
	b := append([]byte(replyMagic), r.verdict, device)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(why)))
	return append(append(b, why...), noDevice...)
}

// admit reads and checks a hello and makes the link.
func (v *Van) admit(c *net.UnixConn) (r reply, err error) {
	pid, err := sameUser(c)
	if err != nil {
		return r, err
	}
	b, fds, err := receive(c, helloLen)
	defer closeAll(fds)
	if err != nil {
		return r, err
	}
	le := binary.LittleEndian
	if len(b) != helloLen || string(b[:4]) != helloMagic || le.Uint32(b[4:]) != tokenVersion || len(fds) != 2 ||
		le.Uint32(b[32:]) != segmentLen || le.Uint32(b[36:]) != slotCount {
		return r, fmt.Errorf("%w: hello of %d bytes with %d files", errProtocol, len(b), len(fds))
	}
	id := int(int32(le.Uint32(b[8:])))
	if id <= 0 || id >= van.Empty {
		return r, fmt.Errorf("%w: node id %d", errProtocol, id)
	}
	if err := errors.Join(checkMemory(fds[0], segmentLen), checkMemory(fds[1], bellLen)); err != nil {
		return r, err
	}
	seg, err := mapSegment(fds[0])
	if err != nil {
		return r, err
	}
	bell, err := mapBell(fds[1])
	if err != nil {
		seg.unmap()
		return r, err
	}
	l := &inLink{v: v, from: v.peerOf(id), name: [16]byte(b[40:]), conn: c, pid: pid, seg: seg, bell: bell}
	l.refs.Store(1)
	r = reply{link: l, verdict: verdictRead}
	if l.source, err = v.openSource(pid, le.Uint64(b[16:]), le.Uint64(b[24:])); err != nil {
		r.verdict, r.why = verdictStream, err.Error()
	}
	if has := le.Uint32(b[12:]); has&hasDevice != 0 {
		if l.dev, err = v.openDeviceSource(b[56:], l.name[:]); err == nil {
			if has&hasSegments != 0 && v.device.sharer != nil && !v.device.noSegments.Load() {
				l.dev.inbox = newInbox(v.device, c)
			}
		} else {
			r.noDevice = err.Error()
			v.log.Info("values on a peer's device come through host memory", "peer", van.NodeName(id), "why", err)
		}
	}
	if err := v.addIn(l); err != nil {
		l.unref()
		return r, err
	}
	return r, nil
}

// openSource opens process pid for reading, if that works.
func (v *Van) openSource(pid int, addr, nonce uint64) (*remote, error) {
	if v.streamOnly {
		return nil, errors.New("reading the sender's memory is switched off")
	}
	r, err := openRemote(pid)
	if err != nil {
		return nil, err
	}
	if err := r.canRead(addr, nonce); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// receive reads one message of at most most bytes, and the files that come with it.
func receive(c *net.UnixConn, most int) (b []byte, fds []int, err error) {
	b = make([]byte, most)
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, k, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, nil, fmt.Errorf("no answer over the socket: %w", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:k])
	if err != nil {
		return nil, nil, err
	}
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err == nil {
			fds = append(fds, got...)
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, fds, fmt.Errorf("%w: message longer than %d bytes or 4 files", errProtocol, most)
	}
	return b[:n], fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
