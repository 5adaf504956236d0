package local

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// exists returns the number of allocated bytes of a file in memory.
func exists(t testing.TB, fd int) int {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return int(st.Blocks) * 512
}

// TestRingMemory is a model of both ends of a ring: records of all lengths, a receiver that is slow or fast, and requests for
// memory that fail now and then. Every record arrives as it was written. Neither end accesses memory that is not allocated. The
// allocated memory is the memory that the sender has requested.
func TestRingMemory(t *testing.T) {
	fd, err := memfd.New(bellLen)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	bell, err := mapBell(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer bell.unmap()
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		refuse := false
		m := &ringMemory{log: slog.New(slog.DiscardHandler), budget: 1 << 20 << rng.IntN(3), make: memfd.Part,
			extend: func(fd, from, to int) error {
				if refuse {
					return unix.ENOSPC
				}
				return memfd.Extend(fd, from, to)
			}}
		f, err := newRingFile(m)
		if err != nil {
			t.Fatal(err)
		}
		seg, err := mapSegment(f.fd)
		if err != nil {
			t.Fatal(err)
		}
		out := outRing{seg: seg, file: f, bell: bell}
		type sent struct {
			size int
			mark byte
		}
		var under []sent
		head, longest := uint64(0), 1+rng.IntN(maxRecord/recordAlign)
		for range 2000 {
			refuse = rng.IntN(3) == 0
			f.again = 0 // the test does not wait
			if rng.IntN(2) == 0 {
				s := sent{recordAlign * (1 + rng.IntN(longest)), byte(rng.Uint32())}
				if out.fits(s.size, 8) {
					b := seg.at(out.tail)[:s.size]
					for i := range b {
						b[i] = s.mark
					}
					b[4] = kindMessage
					out.advance(s.size)
					under = append(under, s)
				} else if len(under) == 0 && head == out.tail && f.have >= sureLen {
					t.Fatalf("seed %d: a record of %d bytes does not fit in an empty ring with %d", seed, s.size, f.have)
				}
			} else {
				for range rng.IntN(8) {
					if head == out.tail {
						break
					}
					b := seg.at(head)
					if b[4] == kindPad {
						size, _, err := peek(b, int(out.tail-head))
						if err != nil {
							t.Fatal(err)
						}
						head += uint64(size)
						continue
					}
					s := under[0]
					under = under[1:]
					want := bytes.Repeat([]byte{s.mark}, s.size)
					want[4] = kindMessage
					if !bytes.Equal(b[:s.size], want) {
						t.Fatalf("seed %d: record at %d differs", seed, head)
					}
					head += uint64(s.size)
				}
				seg.head().Store(head)
			}
			if have := exists(t, f.fd); have != f.have || int64(have) > m.budget {
				t.Fatalf("seed %d: %d bytes exist, the sender has asked for %d, the budget is %d", seed, have, f.have, m.budget)
			}
		}
		if f.close(); m.used.Load() != 0 {
			t.Errorf("seed %d: %d bytes of the budget are not given back", seed, m.used.Load())
		}
		seg.unmap()
	}
}

// TestSmallTrafficSmallMemory: many short messages, longer together than the ring, use only its first part if the receiver keeps up.
func TestSmallTrafficSmallMemory(t *testing.T) {
	worker, server := pair(t)
	value := make([]byte, 1<<10)
	for i := range 2 * segmentLen / len(value) {
		worker.must(data(8, i, value))
		m := server.next()
		if int(m.Timestamp) != i {
			t.Fatalf("message %d, want %d", m.Timestamp, i)
		}
		m.Release()
	}
	if have := exists(t, worker.peers.link(8).file.fd); have > firstLen {
		t.Errorf("%d bytes exist, want %d", have, firstLen)
	}
}

// TestMemoryOnFirstData: nodes that know each other share no memory until one of them sends data. That node then makes all its links at once.
func TestMemoryOnFirstData(t *testing.T) {
	n := inproc.NewNetwork()
	worker := newNode(t, n, 9, nil)
	worker.start()
	var servers [3]*node
	for i := range servers {
		servers[i] = newNode(t, n, 8+2*i, nil)
		servers[i].start()
		for _, err := range []error{worker.Connect(t.Context(), 8+2*i, servers[i].self), servers[i].Connect(t.Context(), 9, worker.self)} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if used, links := worker.tx.memory.used.Load(), len(worker.peers.Outs()); used != 0 || links != 0 {
		t.Errorf("%d links share %d bytes before any data", links, used)
	}
	worker.Disconnect(10) // this settles that there is no link
	worker.must(data(8, 1, []byte("x")))
	servers[0].next().Release()
	eventually(t, "the links to the others are made, too", func() bool { return worker.peers.link(12) != nil })
	if worker.peers.link(10) != nil || servers[0].peers.link(9) != nil {
		t.Error("a link was made that nobody needs")
	}
}

// TestSHMBudget: a peer beyond STEPAF_SHM_BUDGET gets its data over the van inside; a log line reports it, and a counter counts it. When the
// link of another peer has ended, there is memory again.
func TestSHMBudget(t *testing.T) {
	n := inproc.NewNetwork()
	worker := newNode(t, n, 9, func(v *Van) { v.tx.memory.budget = 2 * sureLen })
	worker.start()
	var servers [3]*node
	for i := range servers {
		servers[i] = newNode(t, n, 8+2*i, nil)
		servers[i].start()
		servers[i].connect(worker)
	}
	worker.connect(servers[0])
	worker.connect(servers[1])
	if err := worker.Connect(t.Context(), 12, servers[2].self); err != nil {
		t.Fatal(err)
	}
	if worker.Linked(12) {
		t.Fatal("a link was made beyond the budget")
	}
	worker.must(data(12, 1, []byte("x")))
	servers[2].next().Release()
	worker.says("STEPAF_SHM_BUDGET is 524288 bytes")
	if got := worker.Stats().RefusedRings; got != 1 {
		t.Errorf("RefusedRings is %d, want 1", got)
	}
	// A value for which the ring would grow is sent with the present memory.
	value := pattern(1, 3<<20)
	worker.must(data(8, 2, value))
	m := servers[0].next()
	if !bytes.Equal(m.Vals.Host(), value) {
		t.Error("the value differs")
	}
	m.Release()
	if used := worker.tx.memory.used.Load(); used > worker.tx.memory.budget {
		t.Errorf("%d bytes are in use, the budget is %d", used, worker.tx.memory.budget)
	}
	worker.says("does not grow")
	worker.Disconnect(8)
	eventually(t, "the memory of the link is given back", func() bool { return worker.tx.memory.used.Load() == sureLen })
}

// TestNoMemoryToGrow: if the system has no memory for a message, the message waits until there is memory. The order is kept.
func TestNoMemoryToGrow(t *testing.T) {
	for _, mode := range readModes {
		t.Run(mode.name, func(t *testing.T) {
			var full atomic.Bool
			worker, server := pairWith(t, func(v *Van) {
				if mode.set != nil {
					mode.set(v)
				}
				v.receiver.maxSleep = maxSleep // the node asks for memory again after that
				v.tx.memory.extend = func(fd, from, to int) error {
					if full.Load() {
						return fmt.Errorf("no shared memory: %w", syscall.ENOSPC)
					}
					return memfd.Extend(fd, from, to)
				}
			})
			full.Store(true)
			// A record longer than the allocated part.
			long := data(8, 0, pattern(1, streamFrom-1))
			long.Keys = data(8, 0, pattern(2, streamFrom-8)).Vals
			long.Body = pattern(3, streamFrom/2)
			worker.must(long)
			value := pattern(4, 1<<20)
			worker.must(data(8, 1, value))
			worker.says("does not grow")
			worker.says("no space left on device")
			full.Store(false)
			for i, want := range [][]byte{long.Vals.Host(), value} {
				m := server.next()
				if int(m.Timestamp) != i || !bytes.Equal(m.Vals.Host(), want) {
					t.Fatalf("message %d with %d bytes, want %d with %d", m.Timestamp, m.Vals.Len(), i, len(want))
				}
				m.Release()
			}
		})
	}
}

// TestNoMemoryForLinks: if a process lacks a resource for a link, its data goes over the van inside, and a log line names the resource.
func TestNoMemoryForLinks(t *testing.T) {
	for name, x := range map[string]struct {
		set  func(*Van)
		says string
	}{
		"no files":  {func(v *Van) { v.tx.memory.make = func(int, int) (int, error) { return -1, unix.EMFILE } }, "too many open files"},
		"no space":  {func(v *Van) { v.tx.memory.make = func(int, int) (int, error) { return -1, unix.ENOSPC } }, "no space left on device"},
		"no budget": {func(v *Van) { v.tx.memory.budget = sureLen - 1 }, "STEPAF_SHM_BUDGET"},
		"a file that cannot be mapped": {func(v *Van) {
			v.tx.memory.make = func(int, int) (int, error) { return unix.Open("/proc/self/status", unix.O_RDONLY|unix.O_CLOEXEC, 0) }
		}, "mmap"},
	} {
		t.Run(name, func(t *testing.T) {
			n := inproc.NewNetwork()
			var log vantest.Log
			worker, server := newNode(t, n, 9, func(v *Van) { v.logTo(log.Logger()); x.set(v) }), newNode(t, n, 8, nil)
			worker.start()
			server.start()
			if err := worker.Connect(t.Context(), 8, server.self); err != nil {
				t.Fatal(err)
			}
			worker.must(data(8, 3, []byte("x")))
			server.next().Release()
			if worker.Linked(8) {
				t.Error("linked")
			}
			if text := log.String(); !strings.Contains(text, x.says) {
				t.Errorf("log %q, want %q", text, x.says)
			}
			if used := worker.tx.memory.used.Load(); used != 0 {
				t.Errorf("%d bytes of the budget are not given back", used)
			}
		})
	}
}

// TestPeerWithoutPads: if the version of a peer does not know pads, the whole ring is allocated for it, or it gets none.
func TestPeerWithoutPads(t *testing.T) {
	for _, enough := range []bool{true, false} {
		n := inproc.NewNetwork()
		worker := newNode(t, n, 9, nil)
		if !enough {
			worker.tx.memory.budget = segmentLen - 1
		}
		file, err := newRingFile(worker.tx.memory)
		if err != nil {
			t.Fatal(err)
		}
		seg, err := mapSegment(file.fd)
		if err != nil {
			t.Fatal(err)
		}
		near, far := looseEnds(t)
		old := reply{verdict: verdictStream}
		if _, _, err := far.WriteMsgUnix(old.encode(), unix.UnixRights(worker.own.bell.fd), nil); err != nil {
			t.Fatal(err)
		}
		l, err := worker.dialer.finish(near, new(outPeer), seg, file)
		if !enough {
			if !errors.Is(err, errNoBudget) {
				t.Errorf("error %v, want %v", err, errNoBudget)
			}
			file.close()
			seg.unmap()
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if have := exists(t, file.fd); have != segmentLen {
			t.Errorf("%d bytes exist, want %d", have, segmentLen)
		}
		l.close(true)
	}
}
