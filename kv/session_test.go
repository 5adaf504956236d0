package kv_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// sentMessage is one data message as it left a node: the packed meta and the data
// frames, in hex.
type sentMessage struct {
	From   int      `json:"from"`
	To     int      `json:"to"`
	Frames []string `json:"frames"`
}

// recorder keeps what all vans of a cluster send.
type recorder struct {
	mu  sync.Mutex
	all []sentMessage
}

// recording is a van that tells the recorder of each data message.
type recording struct {
	van.Van
	r  *recorder
	id int
}

func (v *recording) Unwrap() van.Van { return v.Van }

func (v *recording) SetID(id int) {
	v.id = id
	v.Van.SetID(id)
}

func (v *recording) Send(m *van.Message) error {
	if !m.IsControl() {
		b, err := m.Meta.AppendTo(nil)
		if err != nil {
			return err
		}
		s := sentMessage{From: v.id, To: m.Receiver, Frames: []string{normal(b)}}
		for i := range m.Frames {
			s.Frames = append(s.Frames, hex.EncodeToString(m.Frame(i).Host()))
		}
		v.r.mu.Lock()
		v.r.all = append(v.r.all, s)
		v.r.mu.Unlock()
	}
	return v.Van.Send(m)
}

// normal clears what differs between runs: the address, except for whether there
// is one, and the traces.
func normal(meta []byte) string {
	if slices.ContainsFunc(meta[88:96], func(b byte) bool { return b != 0 }) {
		for i := 88; i < 96; i++ {
			meta[i] = 0xff
		}
	}
	clear(meta[184:264])
	return hex.EncodeToString(meta)
}

// TestSessions makes the requests of recorded sessions of the original and
// compares the messages byte for byte, those of each pair of nodes in order.
func TestSessions(t *testing.T) {
	for _, x := range []struct {
		name    string
		servers int
		simple  bool
	}{{"s1w1_kv", 1, false}, {"s2w1_kv", 2, false}, {"s1w1_simple", 1, true}, {"s2w1_simple", 2, true}} {
		t.Run(x.name, func(t *testing.T) {
			rec := &recorder{}
			c := testcluster.Start(t, testcluster.Options{Servers: x.servers, Rand: testcluster.Zero, Wrap: func(_ string, _ int, f van.Factory) van.Factory {
				return func(o van.Options) (van.Van, error) {
					v, err := f(o)
					return &recording{Van: v, r: rec}, err
				}
			}})
			if x.simple {
				simpleSession(t, c)
			} else {
				kvSession(t, c, x.servers)
			}
			rec.mu.Lock()
			sent := slices.Clone(rec.all) // without what nodes of this library tell each other at the end
			rec.mu.Unlock()
			c.Finalize(t)
			want := readSession(t, x.name)
			compare(t, byPair(sent), byPair(want))
		})
	}
}

func kvSession(t *testing.T, c *testcluster.Cluster, servers int) {
	sums[float32](t, c)
	w := newWorker[float32](t, c.Workers[0])
	keys, vals := []kv.Key{1, 3}, []float32{1.5, 2.5}
	if servers == 2 {
		keys, vals = append(keys, 1<<63+4), append(vals, 3.5)
	}
	do(t, w)(w.Push(keys, vals))
	do(t, w)(w.Push([]kv.Key{3}, []float32{9}))
	got := make([]float32, len(keys))
	do(t, w)(w.Pull(keys, &got))
	if got[0] != 1.5 || got[1] != 11.5 {
		t.Errorf("pulled %v", got)
	}
}

func simpleSession(t *testing.T, c *testcluster.Cluster) {
	for _, n := range c.Servers {
		simple(t, n, func(d kv.SimpleMessage) {
			if err := d.Respond(append([]byte("re:"), d.Body...)); err != nil {
				t.Error(err)
			}
		})
	}
	a := simple(t, c.Workers[0], nil)
	ts, err := a.Request(42, []byte("hello"), postoffice.ServerGroup)
	if err == nil {
		err = ts.Wait(context.Background())
	}
	if err != nil {
		t.Error(err)
	}
}

func readSession(t *testing.T, name string) []sentMessage {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name+".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []sentMessage
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var m sentMessage
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		meta, err := hex.DecodeString(m.Frames[0])
		if err != nil {
			t.Fatal(err)
		}
		m.Frames[0] = normal(meta)
		all = append(all, m)
	}
	if err := lines.Err(); err != nil || len(all) == 0 {
		t.Fatalf("%s: %d messages, %v", name, len(all), err)
	}
	return all
}

func byPair(all []sentMessage) map[[2]int][]sentMessage {
	m := map[[2]int][]sentMessage{}
	for _, s := range all {
		p := [2]int{s.From, s.To}
		m[p] = append(m[p], s)
	}
	return m
}

func compare(t *testing.T, got, want map[[2]int][]sentMessage) {
	t.Helper()
	for p, w := range want {
		g := got[p]
		delete(got, p)
		if len(g) != len(w) {
			t.Errorf("%d to %d: %d messages, want %d", p[0], p[1], len(g), len(w))
			continue
		}
		for i := range w {
			if !slices.Equal(g[i].Frames, w[i].Frames) {
				t.Errorf("%d to %d, message %d:\n got %v\nwant %v", p[0], p[1], i, g[i].Frames, w[i].Frames)
			}
		}
	}
	if len(got) > 0 {
		t.Errorf("messages of other pairs: %v", got)
	}
}
