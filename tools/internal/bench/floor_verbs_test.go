package bench

import "testing"

// TestVerbsFloor does rounds of several sizes over a device, within one process.
func TestVerbsFloor(t *testing.T) {
	run, err := newRDMARun(t.Context(), "")
	if err != nil {
		t.Skipf("no RDMA here (make rdma-test PKGS=./tools/internal/bench has some): %v", err)
	}
	for _, size := range [][2]int{{1, 1}, {0, 4096}, {1 << 20, 3}, {20 << 20, 1 << 10}} {
		kind := verbsFloor{floors{push: size[0], pull: size[1]}, run.at.Host}
		s, err := kind.serve()
		if err != nil {
			t.Fatal(err)
		}
		c, err := kind.dial([]string{s.addr})
		if err != nil {
			s.close()
			t.Fatal(err)
		}
		for _, n := range []int{0, 3} {
			ns, err := c.measure(n)
			if err != nil || len(ns) != n {
				t.Errorf("push %d, pull %d: %d of %d rounds, %v", size[0], size[1], len(ns), n, err)
			}
			for _, x := range ns {
				if x <= 0 {
					t.Errorf("a round took %d ns", x)
				}
			}
		}
		c.close()
		s.close()
	}
}
