package zmq

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
)

// older makes n's record that of a version without bundles.
func (n *node) older() *node {
	identity, _ := n.self.Extension()
	identity.Bundles = false
	n.self.Endpoint = identity.Encode()
	return n
}

// sealed assembles a bundle of messages like a node: the metas and the copied frames of each message.
func sealed(messages ...[][]byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(messages)))
	b = append(b, bundleMagic...)
	for _, m := range messages {
		var head [recordHead]byte
		binary.LittleEndian.PutUint32(head[0:], uint32(len(m[0])))
		binary.LittleEndian.PutUint32(head[4:], uint32(len(m)-1))
		for i, f := range m[1:] {
			binary.LittleEndian.PutUint32(head[recordFrames+4*i:], uint32(len(f)))
		}
		b = append(b, head[:]...)
		for _, f := range m {
			b = append(b, f...)
			b = append(b, make([]byte, -len(b)&7)...)
		}
	}
	return b
}

// TestBundleOnTheWire: messages that are sent together are one libzmq message. Short values are in its first frame;
// long values and the cancel byte of a request follow as frames. A version without bundles and a node of the
// original get single messages.
func TestBundleOnTheWire(t *testing.T) {
	short, long := filled(1000, 1), filled(bundleBelow, 2)
	for name, tt := range map[string]struct {
		identity *van.NodeExtension
		want     [][]int // lengths of the frames of each message behind the sender's name, but of metas
	}{
		"bundles":  {&van.NodeExtension{Incarnation: 5, Bundles: true}, [][]int{{-1, len(long), 1}}},
		"older":    {&van.NodeExtension{Incarnation: 5}, [][]int{{-1, 8, 1000, 1}, {-1, 8, len(long), 1}, {-1, 8, 0}}},
		"original": {nil, [][]int{{-1, 8, 1000}, {-1, 8, len(long)}, {-1, 8, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			router, err := zmq4.NewSocket(zmq4.ROUTER)
			if err != nil {
				t.Fatal(err)
			}
			defer router.Close()
			_ = router.SetRcvtimeo(limit)
			if err := router.Bind("tcp://127.0.0.1:*"); err != nil {
				t.Fatal(err)
			}
			end, err := router.GetLastEndpoint()
			if err != nil {
				t.Fatal(err)
			}
			rec := van.Node{Role: van.Server, ID: 8, Hostname: "127.0.0.1", AuxID: -1}
			if _, err := fmt.Sscanf(end, "tcp://127.0.0.1:%d", &rec.Port); err != nil {
				t.Fatal(err)
			}
			if tt.identity != nil {
				rec.Endpoint = tt.identity.Encode()
			}
			worker := newNode(t, 9, 7, nil, nil)
			if err := worker.Connect(t.Context(), 8, rec); err != nil {
				t.Fatal(err)
			}
			for i, vals := range [][]byte{short, long, nil} {
				m := push(8, i, vals)
				m.More = i < 2
				worker.must(t, m)
			}
			for _, want := range tt.want {
				got, err := router.RecvMessageBytes(0)
				if err == nil && len(got) == 2 && len(got[1]) == 0 {
					got, err = router.RecvMessageBytes(0) // that was the probe
				}
				if err != nil {
					t.Fatal(err)
				}
				lens := []int{-1}
				for _, f := range got[2:] {
					lens = append(lens, len(f))
				}
				if !slices.Equal(lens, want) {
					t.Errorf("frames of %v bytes, want %v", lens, want)
				}
				if tt.identity != nil && tt.identity.Bundles {
					if r, n, err := openBundle(got[1], want[1:]); n != 3 || err != nil {
						t.Errorf("a bundle of %d messages, %v; want 3", n, err)
					} else if !bytes.Contains(r, short) {
						t.Error("the short value is not in it")
					}
					if van.DecodeMeta(got[1], new(van.Meta)) == nil {
						t.Error("it can be read as a meta")
					}
				} else if err := van.DecodeMeta(got[1], new(van.Meta)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestBundleOrder: bundled messages of any length arrive complete and in order, from a worker and as a server's
// answers, even if a Poll returns before it has received the whole bundle.
func TestBundleOrder(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	lengths := []int{0, 1, 7, 8, 100, bundleBelow - 1, bundleBelow, 3000, 4000, 4000, 4000, 4000, 1 << 20, 1 << 20, 1 << 20, 0, 5}
	const n = 200
	for _, way := range []struct {
		from, to *node
		request  bool
	}{{worker, server, true}, {server, worker, false}} {
		var done counter
		for i := range n {
			m := push(way.to.self.ID, i, filled(lengths[i%len(lengths)], byte(i)))
			m.Request, m.Done, m.More = way.request, &done, i%20 != 19
			way.from.must(t, m)
		}
		for i := range n {
			m := way.to.next(t)
			if want := filled(lengths[i%len(lengths)], byte(i)); int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), want) || m.Keys.Len() != 8 {
				t.Fatalf("message %d with %d bytes, want %d with %d", m.Timestamp, m.Vals.Len(), i, len(want))
			}
			m.Release()
		}
		until(t, "release of all", func() bool { return done.n.Load() == n })
	}
	// A Poll that ends after the first message of a bundle.
	for round := range 100 {
		for i := range 3 {
			m := push(9, i, []byte("x"))
			m.Request, m.More = false, i < 2
			server.must(t, m)
		}
		worker.engine.Poll(func() bool { return len(worker.in) > 0 })
		for i := range 3 {
			if m := worker.next(t); int(m.Timestamp) != i {
				t.Fatalf("round %d: message %d, want %d", round, m.Timestamp, i)
			} else {
				m.Release()
			}
		}
	}
}

// TestBundleCounts: a kept message of a bundle counts with all memory that it keeps. The memory is freed with the last
// message.
func TestBundleCounts(t *testing.T) {
	server, worker := newNode(t, 8, 5, nil, nil), newNode(t, 9, 7, nil, nil)
	link(t, server, worker)
	worker.must(t, push(8, 0, nil)) // so that the connection is known
	server.next(t).Release()
	until(t, "no bytes", func() bool { return server.flow.waiting.Load() == 0 })
	go func() {
		for i := range 4 {
			m := push(8, i, filled(2000, byte(i)))
			m.More = i < 3
			worker.must(t, m)
		}
	}()
	var all []*van.Message
	for range 4 {
		m := server.next(t)
		if n, kind := weight(m); n < 4*2000 || kind != ofMember {
			t.Errorf("a message of four counts %d bytes, kind %d; want 8000 and more", n, kind)
		}
		all = append(all, m)
	}
	for i, m := range all { // views stay valid until the last is released
		if !bytes.Equal(m.Vals.Host(), filled(2000, byte(i))) {
			t.Errorf("message %d has changed", i)
		}
		m.Release()
	}
	until(t, "no bytes", func() bool { return server.flow.waiting.Load() == 0 })
}

// TestCloseBehindAStrangeBundle: the memory of a refused bundle is freed once, even if no message follows the
// bundle.
func TestCloseBehindAStrangeBundle(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	server.connect(t, newNode(t, 9, 7, nil, nil))
	good := [][]byte{packed(t, push(8, 1, nil)), make([]byte, 8), {}}
	dialRaw(t, server, "ps9.00000007").send(sealed(good, [][]byte{packed(t, heartbeat(8, 1))}, good))
	server.next(t).Release()
	until(t, "refusal", func() bool { return server.Stats().Malformed == 1 })
	if err := server.Close(t.Context()); err != nil { // libc ends the process at the second time
		t.Error(err)
	}
}

// TestStrangeBundles: a malformed bundle is dropped with an error and counted. The connection remains
// usable.
func TestStrangeBundles(t *testing.T) {
	server := newNode(t, 8, 5, nil, nil)
	server.connect(t, newNode(t, 9, 7, nil, nil))
	meta, key := packed(t, push(8, 1, nil)), make([]byte, 8)
	control := packed(t, heartbeat(8, 1))
	good := [][]byte{meta, key, {}}
	edit := func(at int, v uint32) []byte {
		b := sealed(good)
		binary.LittleEndian.PutUint32(b[at:], v)
		return b
	}
	long := sealed(good, good)
	var many [][][]byte
	for range maxBundle + 1 {
		many = append(many, good)
	}
	first := bundleHead
	for name, frames := range map[string][][]byte{
		"none":               {edit(0, 0)},
		"too many":           {sealed(many...)},
		"more than come":     {edit(0, 2)},
		"head only":          {sealed()},
		"cut":                {sealed(good)[:bundleHead+10]},
		"rest":               {append(sealed(good), 0)},
		"long meta":          {edit(first, 1<<20)},
		"longest meta":       {edit(first, 1<<32-1)},
		"short meta":         {edit(first, 8)},
		"one frame":          {edit(first+4, 1)},
		"four frames":        {edit(first+4, 4)},
		"long frame":         {edit(first+recordFrames, 1<<20)},
		"frame that misses":  {edit(first+recordFrames, outside|8)},
		"other length":       {edit(first+recordFrames, outside|8), {1}},
		"frame too many":     {sealed(good), {1}},
		"mark that misses":   {edit(first+recordMark, 1)},
		"strange mark":       {edit(first+recordMark, 2), {0}},
		"mark without value": {edit(first+recordMark, 1), {0}},
		"value without mark": {edit(first+recordFrames+4, outside|5), make([]byte, 5)},
		"control":            {sealed([][]byte{control})},
		"no meta":            {sealed([][]byte{make([]byte, 288)[:100]})},
		"longer than many":   {sealed(good, [][]byte{meta, key, make([]byte, bundleRoom)})},
		"many frames":        {long, {1}, {1}, {1}, {1}, {1}, {1}, {1}},
	} {
		before := server.Stats()
		r := dialRaw(t, server, "ps9.00000007")
		r.send(frames...)
		until(t, "refusal of "+name, func() bool { return server.Stats().Malformed == before.Malformed+1 })
		if n := server.Stats().ReceivedMessages; n != before.ReceivedMessages {
			t.Errorf("%s: %d messages were received", name, n-before.ReceivedMessages)
		}
		_ = r.Close()
	}
	// One whose second meta is wrong ends there; one of a node of the original is no bundle.
	r := dialRaw(t, server, "ps9.00000007")
	before := server.Stats().Malformed
	r.send(sealed(good, [][]byte{control}, good))
	if m := server.next(t); m.Timestamp != 1 {
		t.Errorf("message %d, want 1", m.Timestamp)
	}
	until(t, "refusal of the second", func() bool { return server.Stats().Malformed == before+1 })
	marked := edit(first+recordFrames+4, outside|5)
	binary.LittleEndian.PutUint32(marked[first+recordMark:], 1)
	r.send(marked, []byte("value"), []byte{1}) // the request was canceled
	r.send(marked, []byte("value"), []byte{2})
	until(t, "refusal of a mark", func() bool { return server.Stats().Malformed == before+2 })
	r.send(marked, []byte("value"), []byte{0})
	if m := server.next(t); string(m.Vals.Host()) != "value" {
		t.Errorf("value %q", m.Vals.Host())
	}
	o := dialRaw(t, server, "ps11")
	o.send(sealed(good))
	until(t, "refusal of the original's", func() bool { return server.Stats().Malformed == before+3 })
	select {
	case m := <-server.in:
		t.Errorf("message %d came", m.Timestamp)
	case <-time.After(10 * time.Millisecond):
	}
}

// FuzzBundle: parsing arbitrary bytes neither panics nor reads beyond them, and records that openBundle has checked
// can be read.
func FuzzBundle(f *testing.F) {
	good := [][]byte{make([]byte, 288), make([]byte, 8), []byte("value")}
	f.Add(sealed(good), []byte{})
	f.Add(sealed(good, good[:1]), []byte{1, 5})
	f.Add(sealed(good)[:30], []byte{})
	f.Fuzz(func(t *testing.T, b, lens []byte) {
		if len(b) < bundleHead {
			return
		}
		var behind []int
		for _, n := range lens[:min(len(lens), maxParts)] {
			behind = append(behind, int(n))
		}
		rest, n, err := openBundle(b, behind)
		if err != nil {
			if err.Error() == "" || n != 0 || rest != nil {
				t.Errorf("%d messages with the error %q", n, err)
			}
			return
		}
		if n < 1 || n > maxBundle {
			t.Fatalf("%d messages", n)
		}
		for range n {
			var r record
			size := len(rest)
			if rest, err = r.read(rest, behind); err != nil {
				t.Fatalf("checked, and then: %v", err)
			}
			took := len(r.meta)
			for i := range r.frames {
				took += len(r.frame[i].data)
			}
			if took > size-len(rest) {
				t.Errorf("%d bytes of a record of %d", took, size-len(rest))
			}
			behind = behind[r.outside:]
		}
		if len(rest) > 0 || len(behind) > 0 {
			t.Errorf("%d bytes and %d frames are left", len(rest), len(behind))
		}
	})
}
