package af_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// TestAnswersThatDoNotFit: an answer that does not fit its request fails the call. Afterwards nothing is written to the memory of the call, and
// the next calls succeed.
func TestAnswersThatDoNotFit(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{}
		o.Wrap = hook.Wrap("server", 0)
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], func(b af.Batch) {
			var out []af.KeyTensor
			for _, p := range b.Pulls() {
				out = append(out, af.KeyTensor{Key: p.Key, Val: bytesOf(t, bytes.Repeat([]byte{byte(p.Key)}, p.Len))})
			}
			if err := b.Respond(out); err != nil {
				t.Error(err)
			}
		})
		w := newWorker(t, c.Workers[0])
		for _, x := range []struct {
			name   string
			change func(m *van.Message)
			want   error
		}{
			{"one part fewer", func(m *van.Message) { m.Parts = m.Parts[:len(m.Parts)-1] }, van.ErrMalformed},
			{"one part", func(m *van.Message) { m.Parts = m.Parts[:1] }, van.ErrMalformed},
			{"one part more", func(m *van.Message) { m.Parts = append(m.Parts, m.Parts[0]) }, van.ErrMalformed},
			{"a later timestamp", func(m *van.Message) { m.Timestamp++ }, van.ErrMalformed},
			{"the timestamp of a push", func(m *van.Message) { m.Timestamp-- }, van.ErrMalformed},
			{"the timestamp of another call", func(m *van.Message) { m.Timestamp += 1000 }, van.ErrTimeout},
			{"other keys", func(m *van.Message) { m.Parts[0].Key, m.Parts[1].Key = m.Parts[1].Key, m.Parts[0].Key }, van.ErrMalformed},
			{"one key twice", func(m *van.Message) { m.Parts[2] = m.Parts[0] }, van.ErrMalformed},
			{"a shorter value", func(m *van.Message) {
				p := &m.Parts[1]
				p.Len--
				p.Vals = p.Vals.Sub(0, p.Len)
			}, van.ErrInvalid},
			{"another order", func(m *van.Message) { m.Parts[0], m.Parts[2] = m.Parts[2], m.Parts[0] }, van.ErrMalformed},
		} {
			t.Run(x.name, func(t *testing.T) {
				var into [3][]byte
				call := func() error {
					pushes := []af.KeyTensor{{Key: 7, Val: bytesOf(t, []byte("seven"))}, {Key: 8, Val: bytesOf(t, make([]byte, 100_000))}}
					var pulls []af.KeyTensor
					for i, n := range []int{100, 50_000, 200_000} {
						into[i] = make([]byte, n)
						pulls = append(pulls, af.KeyTensor{Key: uint64(i + 1), Val: bytesOf(t, into[i])})
					}
					call, err := w.PushPull(pushes, [][]af.KeyTensor{pulls}, af.Within(time.Second))
					if err != nil {
						t.Fatal(err)
					}
					return call.Wait(t.Context())
				}
				hook.OnSend(func(m *van.Message) hooks.Verdict {
					if len(m.Parts) > 0 {
						x.change(m)
						m.WriteDirectory()
					}
					return hooks.Pass
				})
				if err := call(); !errors.Is(err, x.want) && !errors.Is(err, van.ErrTimeout) {
					t.Errorf("%v, want %v", err, x.want)
				}
				hook.OnSend(nil)
				for _, b := range into {
					clear(b)
				}
				former := into
				if err := call(); err != nil {
					t.Error(err)
				}
				for i := range into {
					if !bytes.Equal(into[i], bytes.Repeat([]byte{byte(i + 1)}, len(into[i]))) {
						t.Errorf("the value of pull %d differs", i)
					}
					if !bytes.Equal(former[i], make([]byte, len(former[i]))) {
						t.Errorf("the memory of pull %d of the failed call was written to", i)
					}
				}
			})
		}
		if n := w.Customer().InFlight(); n != 0 {
			t.Errorf("%d requests are in flight, want none", n)
		}
	}, all...)
}
