package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"
)

// TestHostFloors: each baseline in host memory answers all rounds, also when every byte is
// touched in between, and ends.
func TestHostFloors(t *testing.T) {
	for _, touch := range []bool{false, true} {
		x := floors{push: 3000, pull: 5000, touch: touch, clients: 1, pairs: 1}
		for name, kind := range map[string]floorKind{"TCP": tcpFloor{x}, "ZMQ": zmqFloor{x}} {
			s, err := kind.serve()
			if err != nil {
				t.Fatal(err)
			}
			b, err := kind.dial([]string{s.addr})
			if err != nil {
				t.Fatal(err)
			}
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
			s.close()
		}
	}
}

// TestBareReport: the report has libzmq's own round trip if it was measured.
func TestBareReport(t *testing.T) {
	for _, c := range []struct {
		bare []int64
		want bool
	}{{[]int64{50000}, true}, {nil, false}} {
		rep := newLatencyReport(zmq, place{}, both(1024), 1, []int64{60000}, []int64{20000}, c.bare)
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

// TestFloorOfPairs: clients of several servers make their rounds at the same time, over TCP and through shared memory.
// The bytes of shared memory are the pushed and pulled bytes. A client whose server has ended gets an error.
func TestFloorOfPairs(t *testing.T) {
	const clients, servers, push, pull = 3, 2, 5000, 9000
	const n = clients * servers
	x := floors{push: push, pull: pull, clients: clients, pairs: n}
	for name, kind := range map[string]func(client int) floorKind{
		"TCP":    func(int) floorKind { return tcpFloor{x} },
		"shared": func(client int) floorKind { return sharedFloor{x, client} },
	} {
		t.Run(name, func(t *testing.T) {
			var addrs []string
			var ends []func()
			for range servers {
				s, err := kind(0).serve()
				if err != nil {
					t.Fatal(err)
				}
				addrs, ends = append(addrs, s.addr), append(ends, s.close)
			}
			var all [clients]*pairs
			for i := range all {
				b, err := kind(i).dial(addrs)
				if err != nil {
					t.Fatal(err)
				}
				all[i] = b.(*pairs)
			}
			var group errgroup.Group
			for i, c := range all {
				group.Go(func() error {
					for _, rounds := range []int{0, 20, 1, 30} {
						ns, err := c.measure(rounds)
						if err != nil || len(ns) != rounds || rounds > 0 && slices.Min(ns) <= 0 {
							return fmt.Errorf("client %d: %d rounds: %v, %v", i, rounds, ns, err)
						}
					}
					return nil
				})
			}
			if err := group.Wait(); err != nil {
				t.Error(err)
			}
			want := make([]byte, pull)
			fill(want)
			for _, p := range all[1].all {
				s, ok := p.(*sharedPair)
				if ok && (!bytes.Equal(s.mem[s.pushAt():][:push], want[:push]) || !bytes.Equal(s.mem[s.pullAt():][:pull], want)) {
					t.Error("the shared memory has other bytes than were pushed and pulled")
				}
			}
			if name == "shared" {
				ends[1]()
				if _, err := all[0].measure(5); !errors.Is(err, syscall.EPIPE) {
					t.Errorf("rounds with a server that has ended: %v, want %v", err, syscall.EPIPE)
				}
				ends = ends[:1]
			}
			for _, c := range all {
				c.close()
			}
			for _, end := range ends {
				end()
			}
		})
	}
	for _, addr := range []string{"", "x", "1:", "1:AAAA", "0:AAAAAAAAAAAAAAAA", "1:AAAAAAAAAAAAAAAA"} {
		if _, err := (sharedFloor{floors{push: 1, pull: 1, clients: 1, pairs: 1}, 0}).dial([]string{addr}); err == nil || !strings.Contains(err.Error(), "floor: ") {
			t.Errorf("address %q: %v, want an error of the floor", addr, err)
		}
	}
}
