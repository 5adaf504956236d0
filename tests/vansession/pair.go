package vansession

// Which recorded receive belongs to which recorded send.

import "fmt"

// Sent returns, for each event of type Recv, the index in s.Events of the Send
// that it received: messages from one socket of a node to another node arrive in
// order. A Send that is no value of the map never arrived.
func (s *Session) Sent() (map[int]int, error) {
	type channel struct {
		from, to int // from is 0 while the sender had no id
		routed   bool
	}
	onWay := map[channel][]int{}
	sent := map[int]int{}
	for i := range s.Events {
		e := &s.Events[i]
		c := channel{e.From, e.To, false}
		switch e.Type {
		case Send:
			if !e.IDKnown {
				c.from = 0
			}
			c.routed = e.Via.Socket == "ROUTER"
			onWay[c] = append(onWay[c], i)
		case Recv:
			// Messages of a ROUTER arrive at the DEALER that connected to it.
			c.routed = e.Via.Socket == "DEALER"
			q := onWay[c]
			if len(q) == 0 {
				return nil, fmt.Errorf("%s: event %d: nothing is on its way from %d to %d", s.Name, e.Seq, e.From, e.To)
			}
			sent[i], onWay[c] = q[0], q[1:]
		}
	}
	return sent, nil
}

// Full returns the frame as it was sent. The missing end of a truncated frame is its
// beginning repeated: the recorded tensors of that size have one value throughout.
func (f *Frame) Full() []byte {
	b := append(make([]byte, 0, f.Len), f.Bytes...)
	for len(f.Bytes) > 0 && len(b) < f.Len {
		b = append(b, f.Bytes[:min(len(f.Bytes), f.Len-len(b))]...)
	}
	return b
}
