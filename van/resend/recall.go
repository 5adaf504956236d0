package resend

import "github.com/stepaf/stepaf-go/van"

// Recall implements van.Recaller: what is kept for these requests is not sent again.
func (v *Van) Recall(q van.Requests) {
	found := v.recalled(&q)
	for _, e := range found {
		e.sending.Lock() // who is sending it again has ended then
		e.dropped = true
		e.sending.Unlock()
	}
	for _, e := range found {
		next, ok := v.unkeep(e)
		if ok {
			e.release()
		}
		e.release()
		v.launch(next)
	}
	if r, ok := van.As[van.Recaller](v.inner); ok {
		r.Recall(q)
	}
}

// unkeep is remove for an entry that may be behind others of its key.
func (v *Van) unkeep(e *entry) (next *entry, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	before := v.kept[e.key]
	if before == e || !e.held {
		return v.removeLocked(e)
	}
	for before.behind != e {
		before = before.behind
	}
	before.behind, e.behind, e.held = e.behind, nil, false
	v.fewerLocked(1)
	return nil, true
}

// recalled returns what is kept for q, each with a hold.
func (v *Van) recalled(q *van.Requests) (found []*entry) {
	var m van.Meta
	m.Reset()
	m.Request, m.AppID, m.CustomerID = true, q.App, q.Customer
	self := int(v.id.Load())
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.count == 0 {
		return nil
	}
	for peer := range v.conns {
		for m.Timestamp = q.First; m.Timestamp-q.First < q.Count; m.Timestamp++ {
			for e := v.kept[key{peer, signature(&m, self, peer)}]; e != nil; e = e.behind {
				if q.Has(&e.msg.Meta) {
					e.refs.Add(1)
					found = append(found, e)
				}
			}
		}
	}
	return found
}
