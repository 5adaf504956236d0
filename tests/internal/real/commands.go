package real

import (
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
)

// Barrier makes the process wait at an instance barrier and returns at once. The channel
// has the result.
func (p *Process) Barrier(group int, limit time.Duration) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := p.Do(Command{Do: doBarrier, Group: group, Limit: Millis(limit.Milliseconds())}, limit+p.c.slowly(patience))
		done <- err
	}()
	return done
}

// Rounds makes a worker do n calls one after the other, and returns the first error.
func (p *Process) Rounds(n int, limit time.Duration) error {
	_, err := p.Do(Command{Do: doRounds, N: n, Limit: 10_000}, limit)
	return err
}

// Flood makes a worker push n values of so many bytes without waiting for any. It returns
// how many it could, and why it could no more.
func (p *Process) Flood(n, size int, limit time.Duration) (int, error) {
	e, err := p.Do(Command{Do: doPush, N: n, Size: size}, limit)
	return e.ID, err
}

// Drain waits until the servers have answered the pushes of Flood, which may take as long
// as messages arrive within each limit.
func (p *Process) Drain(limit time.Duration) error {
	_, err := p.Do(Command{Do: doDrain, Limit: Millis(limit.Milliseconds())}, 5*time.Minute)
	return err
}

// Block makes a server's handler wait, or go on.
func (p *Process) Block(on bool) error {
	do := doUnblock
	if on {
		do = doBlock
	}
	_, err := p.Do(Command{Do: do}, p.c.slowly(patience))
	return err
}

// Loads makes a worker do other loads, or none.
func (p *Process) Loads(l ...plan.Load) error {
	_, err := p.Do(Command{Do: doLoads, Loads: l}, p.c.slowly(patience))
	return err
}

// Finish makes the program end in order, and returns at once.
func (p *Process) Finish() { p.Begin(Command{Do: doFinish}) }

// Leave makes the program end without waiting for other nodes, and returns at once.
func (p *Process) Leave() { p.Begin(Command{Do: doLeave}) }

var bound = regexp.MustCompile(`Bind to [0-9.]+:([0-9]+)`)

// Port is where the node listens.
func (p *Process) Port() (int, error) {
	m := bound.FindStringSubmatch(p.Log())
	if m == nil {
		return 0, fmt.Errorf("the log of %s does not say where it listens", p)
	}
	return strconv.Atoi(m[1])
}
