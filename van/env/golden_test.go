package env

import (
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// TestLoadGolden: the result of Load for arbitrary environments.
func TestLoadGolden(t *testing.T) {
	values := []string{"", "0", "1", "-1", "2", "7", "8", "31", "32", "100", "1000", "65535", "65536", "2147483647", "2147483648", "9999999999999999999999", " 1\n", "32x", "true", "false", "on",
		"0x10", "1e3", "a,b", "a:1,[::1]:2", "auto", "ibverbs", "zmq", "worker", "server", "scheduler", "joint", "10.0.0.1", "eth0", "CPU", "gpu", "1.5", "10s", "-0", "+1", "\xff\x00", "x"}
	golden.Check(t, "load", 30, func(rng *rand.Rand, w io.Writer) {
		for range 20 {
			set := map[string]string{}
			for range 1 + rng.IntN(4) {
				v := &table[rng.IntN(len(table))]
				name := v.name
				if n := len(v.aliases); n > 0 && rng.IntN(3) == 0 {
					name = v.aliases[rng.IntN(n)]
				}
				set[name] = values[rng.IntN(len(values))]
				if rng.IntN(3) == 0 {
					set[name] = v.def
				}
			}
			if rng.IntN(2) == 0 {
				for name, v := range map[string]string{"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "8000"} {
					if _, has := set[name]; !has {
						set[name] = v
					}
				}
			}
			c, err := LoadFrom(Source{Lookup: func(name string) (string, bool) { v, ok := set[name]; return v, ok }})
			fmt.Fprintln(w, golden.Err(err))
			if err != nil {
				continue
			}
			for _, e := range c.Table() {
				fmt.Fprintln(w, e.Name, e.Value, e.Origin)
			}
			every, limit := c.Heartbeats()
			fmt.Fprintln(w, len(c.Warnings), len(c.Notes), golden.Err(c.Validate()), every, limit, c.Rank(), cmp.Compare(c.BusyPoll.Spin(), 0)) // its length depends on the machine
		}
	})
}
