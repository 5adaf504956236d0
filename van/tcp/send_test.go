package tcp

// Sending: values of all lengths, partial writes, cancellation, and the send budget.

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestSizes: values of every length around the limits of buffers arrive as they were sent, alone and one after the other, pushed to a
// registered buffer, pulled into named memory, and without either.
func TestSizes(t *testing.T) { both(t, sizes) }

func sizes(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	sizes := []int{0, 1, 7, 33, 34, placeFrom - 1, placeFrom, lendFrom - 1, lendFrom, bufLen/2 - 400, bufLen / 2, bufLen - 1, bufLen, bufLen + 1, 3*bufLen + 5, readLimit + 77, 5 << 20}
	registered := make([]byte, 6<<20)
	for round := range 2 {
		for i, n := range sizes {
			worker.must(dataMessage(8, i, true, true, pattern(n, i)))
			pull := dataMessage(8, 100+i, true, false, nil)
			into := make([]byte, n)
			pull.Into = backend.Bytes(into)
			worker.must(pull)
			push := server.next()
			if got := push.Vals.Host(); !bytes.Equal(got, pattern(n, i)) || push.Placed != (round == 1 && n > 0) {
				t.Errorf("round %d: a push of %d bytes arrived as %d bytes, placed %t", round, n, len(got), push.Placed)
			}
			push.Release()
			server.next().Release()
			server.must(dataMessage(9, 100+i, false, false, pattern(n, i+1)))
			answer := worker.next()
			if got := answer.Vals.Host(); !bytes.Equal(got, pattern(n, i+1)) || answer.Placed != (n >= placeFrom) {
				t.Errorf("an answer of %d bytes arrived as %d bytes, placed %t", n, len(got), answer.Placed)
			} else if answer.Placed && !bytes.Equal(into, got) {
				t.Errorf("an answer of %d bytes is not in the memory of the request", n)
			}
			answer.Release()
		}
		if err := server.RegisterRecvBuffer(9, 1, backend.Bytes(registered)); err != nil {
			t.Fatal(err)
		}
	}
	if s := worker.Stats(); s.SentMessages != uint64(4*len(sizes)) {
		t.Errorf("sent %d messages, want %d", s.SentMessages, 4*len(sizes))
	}
}

// TestManyPartlyWritten: long and short messages follow each other while the receiver reads slowly, so that the
// socket accepts parts of messages. All arrive once, in order and intact, and each lent value is released.
func TestManyPartlyWritten(t *testing.T) { both(t, manyPartlyWritten) }

func manyPartlyWritten(t *testing.T, options func(*van.Options)) {
	worker, server := pair(t, options)
	var done atomic.Int32
	const count = 400
	go func() {
		for i := range count {
			m := dataMessage(8, i, true, true, pattern((i*7919)%200000, i))
			m.Done = counter{&done}
			if err := worker.Send(m); err != nil {
				t.Errorf("message %d: %v", i, err)
			}
		}
	}()
	for i := range count {
		m := server.next()
		if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), pattern((i*7919)%200000, i)) {
			t.Fatalf("message %d arrived as %d, %d bytes", i, m.Timestamp, m.Vals.Len())
		}
		m.Release()
	}
	vantest.Eventually(t, limit, "all values are given back", func() bool { return done.Load() == count })
}

type counter struct{ n *atomic.Int32 }

func (c counter) Sent() { c.n.Add(1) }

// stuck makes a server whose receiver does not take anything until open is called.
func stuck(t *testing.T, options func(*van.Options)) (worker, server *end, open func()) {
	worker, server = pair(t, options)
	gate := make(chan struct{})
	server.source.deliver = func(m *van.Message) {
		<-gate
		server.in <- m.Retain()
	}
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	return worker, server, open
}

// TestCancel: the memory of canceled requests is the caller's again. A message of which a part was written arrives as it was sent,
// the others do not arrive.
func TestCancel(t *testing.T) { both(t, cancelQueued) }

func cancelQueued(t *testing.T, options func(*van.Options)) {
	worker, server, open := stuck(t, func(o *van.Options) { options(o); o.Config.RecvBudgetPeer = 1 << 20 })
	var done atomic.Int32
	const count, size = 12, 4 << 20
	values := make([][]byte, count)
	for i := range values {
		values[i] = pattern(size, i)
		m := dataMessage(8, i, true, true, values[i])
		m.Done = counter{&done}
		worker.must(m)
	}
	before := int(done.Load())
	worker.Cancel(van.Requests{First: 0, Count: count})
	if n := done.Load(); n != count {
		t.Errorf("%d of %d values were given back", n, count)
	}
	for _, b := range values {
		clear(b)
	}
	worker.must(dataMessage(8, count, true, true, []byte("last")))
	open()
	got := 0
	for {
		m := server.next()
		if m.Timestamp == count {
			break
		}
		if !bytes.Equal(m.Vals.Host(), pattern(size, int(m.Timestamp))) {
			t.Errorf("message %d arrived with other bytes", m.Timestamp)
		}
		got++
		m.Release()
	}
	if got < before || got > before+1 || got == count {
		t.Errorf("%d messages arrived, %d had been written completely before", got, before)
	}
}

// TestCancelAnywhere: a request is canceled after each possible number of its bytes was written. If no byte was written, none is sent.
// Otherwise the rest is sent from a copy. The next message follows intact.
func TestCancelAnywhere(t *testing.T) {
	next := dataMessage(8, 2, true, true, []byte("next"))
	queue := func(messages ...*van.Message) *outConn {
		c := newOutConn(&common{cfg: env.Default()}, &new(peer).Peer, -1, nil)
		c.blocked = true // the test takes the bytes in place of the socket
		for _, m := range messages {
			if err := c.send(m); err != nil {
				t.Fatal(err)
			}
		}
		return c
	}
	long := func(value []byte) *van.Message { return dataMessage(8, 1, true, true, value) }
	rest, whole := unwritten(queue(next)), unwritten(queue(long(pattern(lendFrom, 1)), next))
	front := len(whole) - len(rest) - lendFrom
	for _, n := range append(rangeTo(front+2), front+lendFrom-1, front+lendFrom, front+lendFrom+1) {
		value, done := pattern(lendFrom, 1), atomic.Int32{}
		m := long(value)
		m.Done = counter{&done}
		c := queue(m, next)
		c.written(n)
		c.cancel(&van.Requests{First: 1, Count: 1})
		if done.Load() != 1 {
			t.Errorf("canceled after %d bytes: the value was given back %d times", n, done.Load())
		}
		clear(value)
		want := whole[n:]
		if n == 0 {
			want = rest
		}
		got := unwritten(c)
		if !bytes.Equal(got, want) {
			t.Errorf("canceled after %d bytes of %d: %d bytes follow, want %d", n, front+lendFrom, len(got), len(want))
		}
		if c.written(len(got)); c.unsent() != 0 || len(c.queue) != 0 {
			t.Errorf("canceled after %d bytes: %d bytes and %d messages count as unsent at the end", n, c.unsent(), len(c.queue))
		}
	}
}

// TestCancelOthers: only the named requests are canceled. Other requests, requests of other applications and customers, and answers
// stay in the queue.
func TestCancelOthers(t *testing.T) {
	const first, count, app, customer = 10, 2, 3, 4
	c := newOutConn(&common{cfg: env.Default()}, &new(peer).Peer, -1, nil)
	c.blocked = true
	dones := map[string]*atomic.Int32{}
	add := func(name string, ts int, app, customer int32, request bool) {
		m := dataMessage(8, ts, request, true, pattern(lendFrom, ts))
		m.AppID, m.CustomerID = app, customer
		dones[name] = new(atomic.Int32)
		m.Done = counter{dones[name]}
		if err := c.send(m); err != nil {
			t.Fatal(err)
		}
	}
	canceled := []string{"first", "last"}
	add("the request before", first-1, app, customer, true)
	add("first", first, app, customer, true)
	add("another application", first, app+1, customer, true)
	add("another customer", first, app, customer+1, true)
	add("an answer", first, app, customer, false)
	add("last", first+count-1, app, customer, true)
	add("the request after", first+count, app, customer, true)
	c.cancel(&van.Requests{App: app, Customer: customer, First: first, Count: count})
	for name, n := range dones {
		if is := n.Load() == 1; is != slices.Contains(canceled, name) {
			t.Errorf("%s: canceled %t", name, is)
		}
	}
	if want := (len(dones) - len(canceled)) * lendFrom; c.lent != want {
		t.Errorf("%d bytes of values are unsent, want %d", c.lent, want)
	}
}

func rangeTo(n int) (l []int) {
	for i := range n {
		l = append(l, i)
	}
	return l
}

// unwritten returns the bytes that c has not written.
func unwritten(c *outConn) (b []byte) {
	for _, v := range c.iov[:c.parts()] {
		b = append(b, unsafe.Slice(v.Base, v.Len)...)
	}
	return b
}

// TestSendBudget: for a peer that does not read, STEPAF_SEND_BUDGET bytes are accepted.
func TestSendBudget(t *testing.T) { both(t, sendBudget) }

func sendBudget(t *testing.T, options func(*van.Options)) {
	for _, size := range []int{1 << 20, lendFrom / 2} { // values that are written from where they lie, and values that are copied
		worker, _, open := stuck(t, func(o *van.Options) { options(o); o.Config.SendBudget, o.Config.RecvBudgetPeer = 8<<20, 1<<20 })
		sent, pulls := 0, 0
		for refused := uint64(1); ; refused++ { // the socket may accept more after a message was refused
			var err error
			for ; err == nil && sent < 200<<20/size; sent++ {
				err = worker.Send(dataMessage(8, sent, true, true, pattern(size, sent)))
			}
			vantest.Fails(t, err, van.ErrQueueFull, "STEPAF_SEND_BUDGET", "8388608")
			if n := worker.Stats().RefusedSends; n != refused {
				t.Errorf("values of %d bytes: counted %d refused messages, want %d", size, n, refused)
			}
			pull := dataMessage(8, 1<<20+pulls, true, false, nil)
			pull.Into = backend.Bytes(make([]byte, placeFrom))
			if err := worker.Send(pull); err != nil {
				vantest.Fails(t, err, van.ErrQueueFull)
				break
			}
			pulls++
		}
		if n := worker.own.places.Expected(); n != pulls {
			t.Errorf("answers to %d pulls are expected, and %d were sent", n, pulls)
		}
		open()
	}
}

// TestFull: a connection accepts messages until the budget or the number of messages is used up. Every unsent byte counts.
func TestFull(t *testing.T) {
	const budget = 1000
	for _, c := range []struct {
		budget, encoded, written, lent, messages int
		full                                     bool
	}{
		{budget, budget - 1, 0, 0, 1, false},
		{budget, budget, 0, 0, 1, true},
		{budget, budget, 1, 0, 1, false},
		{budget, 0, 0, budget - 1, 1, false},
		{budget, 0, 0, budget, 1, true},
		{budget, budget / 2, 0, budget / 2, 1, true},
		{budget, 0, 0, 0, maxQueue - 1, false},
		{budget, 0, 0, 0, maxQueue, true},
		{0, budget, 0, budget, maxQueue - 1, false},
		{0, 0, 0, 0, maxQueue, true},
	} {
		cfg := env.Default()
		cfg.SendBudget = c.budget
		o := newOutConn(&common{cfg: cfg}, &new(peer).Peer, -1, nil)
		o.buf, o.read, o.lent, o.queue = make([]byte, c.encoded), c.written, c.lent, make([]outEntry, c.messages)
		if o.full() != c.full {
			t.Errorf("%+v: full %t", c, o.full())
		}
	}
}

// TestLongQueueIsFreed: a connection that was stuck keeps no memory of its long queue when all is written.
func TestLongQueueIsFreed(t *testing.T) {
	c := newOutConn(&common{cfg: env.Default()}, &new(peer).Peer, -1, nil)
	c.buf, c.queue = make([]byte, 32*maxQueue), make([]outEntry, maxQueue)
	for i := range c.queue {
		c.queue[i].front = 32
	}
	c.written(len(c.buf))
	if cap(c.buf) > 0 || cap(c.queue) > 0 {
		t.Errorf("it keeps %d bytes and %d entries", cap(c.buf), cap(c.queue))
	}
}

// TestLostWithTLS: a message that is encrypted and not written counts as lost when its connection is closed.
func TestLostWithTLS(t *testing.T) {
	for _, queued := range []int{0, 1, 2} {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		c := newOutConn(&common{cfg: env.Default()}, &new(peer).Peer, fd, func(int) {})
		c.tls, c.queue = &encrypted{under: &socket{out: make([]byte, 10), written: 4}}, make([]outEntry, queued)
		if lost := c.Close(); lost != max(queued, 1) {
			t.Errorf("%d messages in the queue: %d are lost", queued, lost)
		}
	}
}
