// Package liveness finds out whether a process is alive although it may be unable to run goroutines. A thread of each process, which only the
// operating system schedules, answers probes: UDP datagrams. A stopped or killed process does not answer, nor does its child that has
// inherited the socket, nor another process at its address.
package liveness

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/internal/random"
)

// Layout of a datagram. An answer repeats the probe's random number. It differs from a probe, so that two threads never answer each other, and
// is not longer, so that it does not amplify an attack.
//
//	0  char[4]  "SAFQ" probe, "SAFA" answer
//	4  u32      incarnation of the probed process
//	8  u64      random number
const (
	probe    = "SAFQ"
	answer   = "SAFA"
	numberAt = 8
	size     = 16
)

var le = binary.LittleEndian

// head returns the part of a datagram that says what it is and for which process.
func head(kind string, incarnation uint32) []byte {
	return le.AppendUint32(append(make([]byte, 0, size), kind...), incarnation)
}

// Process is a process to probe: the address of its responder, and its incarnation.
type Process struct {
	Addr        netip.AddrPort
	Incarnation uint32
}

// key returns p in the form in which answers name it. They name the zone of a link-local address differently.
func (p Process) key() Process {
	p.Addr = netip.AddrPortFrom(p.Addr.Addr().Unmap().WithZone(""), p.Addr.Port())
	return p
}

// A process is probed perLimit times within the limit, and an answer to one of its latest probes counts. latest is smaller than perLimit, since
// the silence of a stopped process begins with its last heartbeat, which may precede its last answer.
const (
	perLimit = 8
	latest   = 6
)

// Prober probes processes at regular intervals.
type Prober struct {
	conn    *net.UDPConn
	every   time.Duration
	targets func() []Process
	end     chan struct{}
	wg      sync.WaitGroup

	mu     sync.Mutex
	probed map[Process]*history // by key; the processes of the last round
}

// history holds the latest probes of one process.
type history struct {
	numbers [latest]uint64
	times   [latest]time.Time
	next    int       // index of the next probe in these
	alive   time.Time // time of the latest probe that was answered
}

// StartProber begins to probe the processes that targets returns. It sends the probes from the address from, or from any address if from is not
// valid, and from any port but avoid, the port of the scheduler. A process that does not answer within limit counts as dead.
func StartProber(from netip.Addr, avoid int, limit time.Duration, targets func() []Process) (*Prober, error) {
	var local *net.UDPAddr
	if from.IsValid() {
		local = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	var c *net.UDPConn
	_, err := freeport.Except(avoid, func() (_ int, _ func(), err error) {
		if c, err = net.ListenUDP("udp", local); err != nil {
			return 0, nil, err
		}
		first := c
		return c.LocalAddr().(*net.UDPAddr).Port, func() { _ = first.Close() }, nil
	})
	if err != nil {
		return nil, err
	}
	a := &Prober{conn: c, every: max(limit/perLimit, time.Millisecond), targets: targets, end: make(chan struct{}), probed: map[Process]*history{}}
	a.wg.Go(a.run)
	a.wg.Go(a.receive)
	return a, nil
}

// Close ends the probes. Call it once.
func (a *Prober) Close() {
	close(a.end)
	_ = a.conn.Close()
	a.wg.Wait()
}

// Alive reports whether p has answered one of its latest probes.
func (a *Prober) Alive(p Process) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.probed[p.key()]
	return h != nil && time.Since(h.alive) < latest*a.every
}

// run probes all processes, again and again.
func (a *Prober) run() {
	tick := time.Tick(a.every)
	for {
		all := a.targets()
		probed := make(map[Process]*history, len(all))
		for _, p := range all {
			b := le.AppendUint64(head(probe, p.Incarnation), a.record(probed, p.key()))
			_, _ = a.conn.WriteToUDPAddrPort(b, p.Addr) // like a datagram that is lost in the network
		}
		a.mu.Lock()
		a.probed = probed // without the processes that are no longer probed
		a.mu.Unlock()
		select {
		case <-tick:
		case <-a.end:
			return
		}
	}
}

// record stores a probe of p, in probed too, and returns its number.
func (a *Prober) record(probed map[Process]*history, p Process) uint64 {
	number := random.Uint64()
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.probed[p]
	if h == nil {
		h = new(history)
		a.probed[p] = h // the answer may arrive before the round ends
	}
	probed[p] = h
	h.numbers[h.next], h.times[h.next] = number, time.Now()
	h.next = (h.next + 1) % latest
	return number
}

// receive reads answers.
func (a *Prober) receive() {
	var b [size + 1]byte // longer datagrams are truncated
	for {
		n, from, err := a.conn.ReadFromUDPAddrPort(b[:])
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			time.Sleep(a.every) // an unexpected error must not keep a processor busy
		case n == size:
			a.handleAnswer(from, b[:n])
		}
	}
}

// handleAnswer handles a datagram, which any host may have sent.
func (a *Prober) handleAnswer(from netip.AddrPort, b []byte) {
	if string(b[:len(answer)]) != answer {
		return
	}
	p, number := Process{from, le.Uint32(b[len(answer):])}.key(), le.Uint64(b[numberAt:])
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.probed[p]
	if h == nil {
		return
	}
	for i, at := range h.times {
		if h.numbers[i] == number && at.After(h.alive) {
			h.alive = at
		}
	}
}
