package resend

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// barrierRequest is a node's request to the scheduler.
func barrierRequest(cmd van.Command, customer, ts int) *van.Message {
	m := request(van.SchedulerID, ts)
	m.Push, m.CustomerID = false, int32(customer)
	m.Control.Cmd, m.Control.BarrierGroup = cmd, van.AllNodes
	return m
}

// release is the scheduler's release of a barrier whose last request was by customer.
func release(cmd van.Command, customer, ts int) *van.Message {
	m := from(van.SchedulerID, barrierRequest(cmd, customer, ts))
	m.Request = false
	return m
}

// TestReleaseEndsKeeping: if a C++ StepMesh scheduler releases a barrier, it has received the request, even without an
// acknowledgement. The request is not sent again, since the scheduler would count it for the next barrier. All other
// messages are kept. A release of a scheduler of this library removes no message: that scheduler acknowledges
// requests, and recognizes a repeated one.
func TestReleaseEndsKeeping(t *testing.T) {
	instance, group := van.Command(van.InstanceBarrier), van.Command(van.Barrier)
	for name, c := range map[string]struct {
		sent    []*van.Message
		release *van.Message
		native  bool
		want    []int32 // timestamps of the messages that are sent again
	}{
		"the start barrier":                   {[]*van.Message{barrierRequest(instance, 0, 1)}, release(instance, 0, 7), false, nil},
		"released for another node's request": {[]*van.Message{barrierRequest(instance, 0, 1)}, release(instance, 5, 7), false, nil},
		"of two customers":                    {[]*van.Message{barrierRequest(instance, 0, 1), barrierRequest(instance, 3, 2)}, release(instance, 3, 7), false, []int32{1}},
		"the oldest of two":                   {[]*van.Message{barrierRequest(group, 0, 1), barrierRequest(group, 3, 2)}, release(group, 5, 7), false, []int32{2}},
		"of the other kind":                   {[]*van.Message{barrierRequest(group, 0, 1)}, release(instance, 0, 7), false, []int32{1}},
		"a request to another peer":           {[]*van.Message{request(8, 1), barrierRequest(instance, 0, 2)}, release(instance, 0, 7), false, []int32{1}},
		"of this library":                     {[]*van.Message{barrierRequest(instance, 0, 1)}, release(instance, 0, 7), true, []int32{1}},
		"what is no release":                  {[]*van.Message{barrierRequest(instance, 0, 1)}, from(van.SchedulerID, barrierRequest(instance, 0, 7)), false, []int32{1}},
		"not of the scheduler":                {[]*van.Message{barrierRequest(instance, 0, 1)}, from(8, release(instance, 0, 7)), false, []int32{1}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Options{Timeout: time.Second})
				for _, m := range c.sent {
					time.Sleep(time.Millisecond)
					if err := f.Send(m); err != nil {
						t.Fatal(err)
					}
				}
				f.p.take()
				if c.native {
					c.release.SetIncarnations(3, 0)
				}
				f.p.recv(c.release)
				if len(f.up) != 1 {
					t.Errorf("%d messages were handed up, want the release", len(f.up))
				}
				time.Sleep(1500 * time.Millisecond)
				var again []int32
				for _, s := range f.p.take() {
					if s.meta.Control.Cmd != van.Ack {
						again = append(again, s.meta.Timestamp)
					}
				}
				if len(again) != len(c.want) || len(again) == 1 && again[0] != c.want[0] {
					t.Errorf("sent again: %v, want %v", again, c.want)
				}
			})
		})
	}
}
