// Package drop implements PS_DROP_MSG: a wrapper around a van that drops a share of
// the received messages, to test recovery. Unlike ps-lite, which draws once for all
// messages of a second, it draws for each message.
package drop

import (
	"cmp"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Van drops received messages. The embedded van.Van does everything else.
type Van struct {
	van.Van
	percent int
	log     *slog.Logger
	enabled atomic.Bool
	dropped atomic.Uint64

	mu  sync.Mutex
	rng *rand.Rand
}

var (
	_ van.Van     = (*Van)(nil)
	_ van.Wrapper = (*Van)(nil)
)

// New wraps inner. percent is the share of received messages, control messages
// included, that are dropped after Enable: none below 1, all from 100 on. A seed of 0 is
// replaced by one from the time. The seed is logged, so that the sequence of draws can
// be repeated. log may be nil.
//
// resend must wrap this van, not the reverse. Use van.As to find the optional
// interfaces of inner.
func New(inner van.Van, percent int, seed uint64, log *slog.Logger) *Van {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	seed = cmp.Or(seed, uint64(time.Now().UnixNano()))
	if percent > 0 {
		log.Warn("received messages will be dropped", "percent", percent, "seed", seed)
	}
	return &Van{Van: inner, percent: percent, log: log, rng: rand.New(rand.NewPCG(seed, seed))}
}

// Enable starts dropping. Call it when the node is ready.
func (v *Van) Enable() { v.enabled.Store(true) }

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.Van }

// Start implements van.Van.
func (v *Van) Start(recv van.Receiver) {
	if v.percent <= 0 {
		v.Van.Start(recv)
		return
	}
	v.Van.Start(func(m *van.Message) {
		if v.enabled.Load() && v.draw() {
			v.dropped.Add(1)
			v.log.Warn("dropped a message", "from", van.NodeName(m.Sender), "msg", &m.Meta)
			return
		}
		recv(m)
	})
}

func (v *Van) draw() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.rng.IntN(100) < v.percent
}
