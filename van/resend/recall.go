package resend

// What is kept for requests that were given up.

import "github.com/stepaf/stepaf-go/van"

// Cancel implements van.Canceler: what is kept for these requests is not sent again, nor what was kept a moment ago
// and was about to be.
func (v *Van) Cancel(q van.Requests) {
	found := v.kept.recalled(&q, int(v.id.Load()))
	for _, e := range found {
		e.sending.Lock() // who is sending it again has ended then
		e.dropped = true
		e.sending.Unlock()
	}
	for _, e := range found {
		next, ok := v.kept.unkeep(e)
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
