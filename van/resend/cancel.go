package resend

// The cancellation of requests.

import "github.com/stepaf/stepaf-go/van"

// Cancel implements van.Canceler. Messages of these requests are not sent again, including messages that have just left the
// table and are about to be sent.
func (v *Van) Cancel(q van.Requests) {
	found := v.kept.canceled(&q, int(v.id.Load()))
	for _, e := range found {
		e.sending.Lock() // waits for a transmit in progress
		e.dropped = true
		e.sending.Unlock()
	}
	for _, e := range found {
		next, ok := v.kept.removeAny(e)
		if ok {
			e.release()
		}
		e.release()
		v.launch(next)
	}
	if r, ok := van.As[van.Canceler](v.inner); ok {
		r.Cancel(q)
	}
}
