package landing

import (
	"context"
	"errors"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestAnswersApart: a peer whose answers have no place of their own does not wait for others that have places.
func TestAnswersApart(t *testing.T) {
	places := New(1<<10, false)
	places.mu.Lock()
	defer places.mu.Unlock()
	done := make(chan struct{})
	go func() {
		places.Answered(&van.Message{Sender: 8})
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("it waits for others")
	}
}

// TestTakenBack: memory is taken back before an answer is found, or after that and before its bytes are written. From then on neither the host nor a
// device writes to the memory, and the place can be used for the next answer.
func TestTakenBack(t *testing.T) {
	const peer = 8
	mem := backend.Bytes(make([]byte, 4096))
	pull, answer := &van.Message{}, &van.Message{}
	for _, m := range []*van.Message{pull, answer} {
		m.Reset()
		m.Timestamp = 1
	}
	pull.Request, pull.Receiver, pull.Into, answer.Sender = true, peer, mem, peer
	var place Place // one for all cases, since transports reuse places
	for _, c := range []struct {
		name                 string
		before, between      bool // memory is taken back before Find, or after it
		other                bool // other memory is taken back
		found, written, fine bool
	}{
		{name: "not at all", found: true, written: true, fine: true},
		{name: "before the answer", before: true},
		{name: "after the answer was found", between: true, found: true},
		{name: "other memory", before: true, between: true, other: true, found: true, written: true, fine: true},
	} {
		for _, device := range []bool{false, true} {
			back := mem
			if c.other {
				back = backend.Bytes(make([]byte, 4096))
			}
			takeBack := func(when bool, places *Table) {
				if when {
					if err := places.Invalidate(t.Context(), back); err != nil {
						t.Errorf("%s: %v", c.name, err)
					}
				}
			}
			places := New(1, false)
			if !places.Expect(pull) || places.Expected() != 1 {
				t.Fatalf("%s: %d places, want 1", c.name, places.Expected())
			}
			takeBack(c.before, places)
			if _, found := places.Find(answer, 0, mem.Len(), &place, false); found != c.found || place.Used() != c.found {
				t.Errorf("%s: found %t, used %t, want %t", c.name, found, place.Used(), c.found)
			}
			if !c.found {
				continue
			}
			takeBack(c.between, places)
			calls := 0
			var err error
			if device {
				_, err = place.Fill(func() (backend.Event, error) { calls++; return nil, nil })
			} else {
				err = place.Write(func() error { calls++; return nil })
			}
			if (calls == 1) != c.written || errors.Is(err, ErrInvalidated) == c.written {
				t.Errorf("%s, device %t: written %d times, %v", c.name, device, calls, err)
			}
			if err := places.Finish(&place); (err == nil) != c.fine || place.Used() || places.Finish(&place) != nil {
				t.Errorf("%s, device %t: the end is %v, in use %t", c.name, device, err, place.Used())
			}
		}
	}
}

// copying is the event of a device's copy. The copy ends when done is closed.
type copying struct {
	backend.Event
	waits, done chan struct{}
}

func (c *copying) Sync(ctx context.Context) error {
	close(c.waits)
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestTakenBackWhileCopied: Invalidate waits for a device's copy until the copy or the context ends.
func TestTakenBackWhileCopied(t *testing.T) {
	for _, how := range []string{"ends", "does not end", "has ended"} {
		t.Run(how, func(t *testing.T) {
			mem := backend.Bytes(make([]byte, 64))
			p := &peerPlaces{}
			place := &Place{mem: mem, of: p}
			p.writing = []*Place{place}
			places := New(1, false)
			places.by.Store(&map[int]*peerPlaces{8: p})
			c := &copying{waits: make(chan struct{}), done: make(chan struct{})}
			if _, err := place.Fill(func() (backend.Event, error) { return c, nil }); err != nil {
				t.Fatal(err)
			}
			if how == "has ended" {
				place.Filled()
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			over := make(chan error, 1)
			go func() { over <- places.Invalidate(ctx, mem) }()
			if how != "has ended" {
				<-c.waits
			}
			switch how {
			case "ends":
				close(c.done)
			case "does not end":
				cancel()
			}
			if err := <-over; (err != nil) != (how == "does not end") {
				t.Errorf("Invalidate ends with %v", err)
			}
		})
	}
}
