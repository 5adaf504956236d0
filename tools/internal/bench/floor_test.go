package bench

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// TestHostFloors: each baseline in host memory answers all rounds, also when every byte is
// touched in between, and ends.
func TestHostFloors(t *testing.T) {
	for _, touch := range []bool{false, true} {
		tcp, err := newTCPServer(3000, 5000, touch)
		if err != nil {
			t.Fatal(err)
		}
		zmq, err := newZMQServer(5000, touch)
		if err != nil {
			t.Fatal(err)
		}
		overTCP, err := dialTCP(tcp.addr, 3000, 5000, touch)
		if err != nil {
			t.Fatal(err)
		}
		overZMQ, err := dialZMQ(zmq.addr, 3000, 5000, touch)
		if err != nil {
			t.Fatal(err)
		}
		for name, b := range map[string]baseline{"TCP": overTCP, "ZMQ": overZMQ} {
			ns, err := b.measure(50)
			if err != nil || len(ns) != 50 {
				t.Fatalf("%s, touch %t: %d rounds, %v, want 50", name, touch, len(ns), err)
			}
			for i, n := range ns {
				if n <= 0 {
					t.Errorf("%s, touch %t: round %d took %d ns", name, touch, i, n)
				}
			}
			b.close()
		}
		tcp.close()
		zmq.close()
	}
}

// TestBareReport: the report has libzmq's own round trip if it was measured.
func TestBareReport(t *testing.T) {
	r := &result{Ours: []int64{60000}, Floor: []int64{20000}, Bare: []int64{50000}, Checked: true}
	for _, c := range []struct {
		bare []int64
		want bool
	}{{r.Bare, true}, {nil, false}} {
		r.Bare = c.bare
		rep := newLatencyReport(zmq, place{}, both(1024), 1, r, nil)
		rep.Load, rep.Touch = true, true
		var text, line bytes.Buffer
		if err := rep.print(&text); err != nil {
			t.Fatal(err)
		}
		if err := json.NewEncoder(&line).Encode(rep); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(text.String(), "libzmq by itself"); got != c.want {
			t.Errorf("the table has libzmq: %t, want %t:\n%s", got, c.want, &text)
		}
		var back latencyReport
		if err := json.Unmarshal(line.Bytes(), &back); err != nil {
			t.Fatal(err)
		}
		if c.want && (back.Bare == nil || back.Bare.RatioP50 != 1.2) {
			t.Errorf("in JSON: %+v, want a ratio of 1.2", back.Bare)
		}
		if !c.want && back.Bare != nil {
			t.Errorf("in JSON: %+v, want none", back.Bare)
		}
		if !back.Load || !back.Touch {
			t.Errorf("load %t, touch %t, want both", back.Load, back.Touch)
		}
	}
}
