// Package liveness finds out whether a process is there in which no goroutine may run: a thread of
// it that only the system schedules answers questions, which are UDP datagrams. A process that
// was stopped or killed does not answer, nor does its child that has the socket, nor another
// process at its address.
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

// Layout of a datagram. An answer repeats the question's numbers. It is no question, so that
// two threads never answer each other, and not longer, so that it is of no use against others.
//
//	0  char[4]  "SAFQ" question, "SAFA" answer
//	4  u32      incarnation of the process that is asked
//	8  u64      random number
const (
	probe    = "SAFQ"
	answer   = "SAFA"
	numberAt = 8
	size     = 16
)

var le = binary.LittleEndian

// head is the part of a datagram that says whom it is for.
func head(kind string, incarnation uint32) []byte {
	return le.AppendUint32(append(make([]byte, 0, size), kind...), incarnation)
}

// Process is what is asked: the address where its thread listens, and which process it is.
type Process struct {
	Addr        netip.AddrPort
	Incarnation uint32
}

// key is p as answers name it, which say a link-local address's zone in words of their own.
func (p Process) key() Process {
	p.Addr = netip.AddrPortFrom(p.Addr.Addr().Unmap().WithZone(""), p.Addr.Port())
	return p
}

// Within a limit each process is asked so often, and an answer to one of its latest questions
// counts. That is less than the limit, as the silence of a process that was stopped begins with
// its last heartbeat, which may have come before the last answer.
const (
	perLimit = 8
	latest   = 6
)

// Prober asks processes all the time.
type Prober struct {
	conn    *net.UDPConn
	every   time.Duration
	targets func() []Process
	end     chan struct{}
	wg      sync.WaitGroup

	mu     sync.Mutex
	probed map[Process]*history // by their keys: those of the last round
}

// history is the latest questions to one process.
type history struct {
	numbers [latest]uint64
	times   [latest]time.Time
	next    int       // of these
	alive   time.Time // when the latest question was asked that was answered
}

// StartProber begins to probe the processes that who returns. The probes are sent from the address from, or from any address if from is
// not valid, and from any port but avoid, the port of the scheduler. A process that does not answer within limit counts as dead.
func StartProber(from netip.Addr, avoid int, limit time.Duration, who func() []Process) (*Prober, error) {
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
	a := &Prober{conn: c, every: max(limit/perLimit, time.Millisecond), targets: who, end: make(chan struct{}), probed: map[Process]*history{}}
	a.wg.Go(a.run)
	a.wg.Go(a.receive)
	return a, nil
}

// Close ends the asking, once.
func (a *Prober) Close() {
	close(a.end)
	_ = a.conn.Close()
	a.wg.Wait()
}

// Alive tells whether p has answered one of its latest questions.
func (a *Prober) Alive(p Process) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.probed[p.key()]
	return h != nil && time.Since(h.alive) < latest*a.every
}

// run asks all, again and again.
func (a *Prober) run() {
	tick := time.Tick(a.every)
	for {
		all := a.targets()
		asked := make(map[Process]*history, len(all))
		for _, p := range all {
			b := le.AppendUint64(head(probe, p.Incarnation), a.record(asked, p.key()))
			_, _ = a.conn.WriteToUDPAddrPort(b, p.Addr) // like one that is lost on its way
		}
		a.mu.Lock()
		a.probed = asked // who is not asked any more is forgotten
		a.mu.Unlock()
		select {
		case <-tick:
		case <-a.end:
			return
		}
	}
}

// record notes a question to p, in what is to be a.asked too, and returns its number.
func (a *Prober) record(asked map[Process]*history, p Process) uint64 {
	number := random.Uint64()
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.probed[p]
	if h == nil {
		h = new(history)
		a.probed[p] = h // the answer may come before the round ends
	}
	asked[p] = h
	h.numbers[h.next], h.times[h.next] = number, time.Now()
	h.next = (h.next + 1) % latest
	return number
}

// receive takes answers.
func (a *Prober) receive() {
	var b [size + 1]byte // the end of a longer datagram is cut off
	for {
		n, from, err := a.conn.ReadFromUDPAddrPort(b[:])
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			time.Sleep(a.every) // whatever it is: it must not keep a processor busy
		case n == size:
			a.handleAnswer(from, b[:n])
		}
	}
}

// handleAnswer takes a datagram. Anybody may have sent it.
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
