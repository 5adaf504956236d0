package core

// GiveBack returns to the queue batches of GetBatch that could not be used: the next
// GetBatch has them, each before those of its worker that came later. The items are not
// the caller's any more. A batch that was answered meanwhile is released.
func (s *Session) GiveBack(items []Item) { s.queue.giveBack(items) }

func (q *queue) giveBack(items []Item) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, it := range items {
		if it.acked {
			delete(q.acked, it.ID)
		} else if _, ok := q.out[it.ID]; ok {
			delete(q.out, it.ID)
		} else {
			it.Release()
			continue
		}
		w := &q.workers[it.SenderRank()]
		w.PutFront(it)
		for i, all := 0, w.All(); i+1 < len(all) && all[i].ID > all[i+1].ID; i++ {
			all[i], all[i+1] = all[i+1], all[i]
		}
		if w.Len() == 1 {
			q.filled++
		}
	}
	if q.filled == len(q.workers) {
		q.signal()
	}
}
