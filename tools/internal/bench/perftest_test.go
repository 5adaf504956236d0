package bench

import (
	"errors"
	"math"
	"os"
	"strings"
	"testing"
)

func TestColumn(t *testing.T) {
	read := func(name string) string {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	lat, bw := read("ib_write_lat.txt"), read("ib_write_bw.txt")
	for _, c := range []struct {
		name, text, column string
		size               int
		want               float64
		unit, err          string
	}{
		{"latency", lat, "t_typical", 1024, 15.76, "usec", ""},
		{"another column", lat, "99% percentile", 1024, 44.27, "usec", ""},
		{"bandwidth", bw, "BW average", 1 << 20, 58.49, "MB/sec", ""},
		{"newer unit", strings.ReplaceAll(bw, "MB/sec", "MiB/sec"), "BW average", 1 << 20, 58.49, "MiB/sec", ""},
		{"warning between", strings.Replace(lat, "\n 1024 ", "\nConflicting CPU frequency values detected: 1 != 2\n 1024 ", 1), "t_typical", 1024, 15.76, "usec", ""},
		{"another size", lat, "t_typical", 2048, 0, "", "no line for 2048 bytes"},
		{"another tool", lat, "BW average", 1024, 0, "", "no column BW average"},
		{"nothing", "", "t_typical", 1024, 0, "", "no column t_typical"},
		{"zero", strings.Replace(bw, "58.49", "0.00", 1), "BW average", 1 << 20, 0, "", `BW average is "0.00"`},
		{"no number", strings.Replace(lat, "15.76", "nan?", 1), "t_typical", 1024, 0, "", `t_typical is "nan?"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			v, unit, err := column(c.text, c.size, c.column)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error %v, want one with %q", err, c.err)
				}
				return
			}
			if err != nil || v != c.want || unit != c.unit {
				t.Errorf("got %g %s, %v; want %g %s", v, unit, err, c.want, c.unit)
			}
		})
	}
}

func TestBandwidthUnits(t *testing.T) {
	for unit, want := range map[string]float64{"MB/sec": 3 << 20, "MiB/sec": 3 << 20, "Gb/sec": 375e6} {
		if got, err := inBytes(3, unit); err != nil || got != want {
			t.Errorf("3 %s: got %g, %v; want %g", unit, got, err, want)
		}
	}
	if _, err := inBytes(3, "furlong"); err == nil {
		t.Error("no error for an unknown unit")
	}
}

func TestNoPerftest(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := (&rdmaRun{}).writeLat(t.Context(), 8); !errors.Is(err, errNoPerftest) {
		t.Errorf("got %v, want %v", err, errNoPerftest)
	}
}

func TestCompare(t *testing.T) {
	for _, c := range []struct {
		name       string
		push, pull int
		p50        float64
		f          rdmaReport
		want       rdmaReport
		verdict    string // of --check; "" is well
	}{
		{"small, reached", 1024, 1024, 120, rdmaReport{WriteLat: 10}, rdmaReport{LatRatio: 12, LatGoal: 12}, ""},
		{"small, missed", 1024, 1024, 125, rdmaReport{WriteLat: 10}, rdmaReport{LatRatio: 12.5, LatGoal: 12, Missed: true},
			"push 1024, pull 1024: 12.50 times ib_write_lat, want at most 12"},
		{"64 KiB, missed", 65536, 65536, 6100, rdmaReport{WriteLat: 1000}, rdmaReport{LatRatio: 6.1, LatGoal: 6, Missed: true},
			"push 65536, pull 65536: 6.10 times ib_write_lat, want at most 6"},
		// 2,752,512 bytes in 50,000 us are 55,050,240 bytes a second.
		{"attention, reached", 917504, 1835008, 50000, rdmaReport{WriteBW: 70e6}, rdmaReport{BWRatio: 0.786432, BWGoal: 0.75}, ""},
		{"attention, missed", 917504, 1835008, 50000, rdmaReport{WriteBW: 75e6}, rdmaReport{BWRatio: 0.7340032, BWGoal: 0.75, Missed: true},
			"push 917504, pull 1835008: 0.73 of ib_write_bw, want at least 0.75"},
		{"no goal", 2048, 2048, 1e6, rdmaReport{WriteLat: 10}, rdmaReport{LatRatio: 1e5}, ""},
		{"no perftest", 1024, 1024, 120, rdmaReport{Missing: "no tools"}, rdmaReport{LatGoal: 12, Missing: "no tools"}, "push 1024, pull 1024: no tools"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rep := &latencyReport{PushBytes: c.push, PullBytes: c.pull, quantiles: quantiles{tail: tail{P50: c.p50}}}
			var v verdict
			c.f.compare(rep, &v)
			x := rep.RDMA
			near := func(what string, got, want float64) {
				if math.Abs(got-want) > 1e-9*math.Abs(want) {
					t.Errorf("%s: got %g, want %g", what, got, want)
				}
			}
			near("ratio to ib_write_lat", x.LatRatio, c.want.LatRatio)
			near("its goal", x.LatGoal, c.want.LatGoal)
			near("ratio to ib_write_bw", x.BWRatio, c.want.BWRatio)
			near("its goal", x.BWGoal, c.want.BWGoal)
			near("bytes per second", x.Bps, float64(c.push+c.pull)/c.p50*1e6)
			if x.Missed != c.want.Missed || x.Missing != c.want.Missing {
				t.Errorf("got missed %t, missing %q; want %t, %q", x.Missed, x.Missing, c.want.Missed, c.want.Missing)
			}
			err := v.err()
			if (err != nil) != (c.verdict != "") || err != nil && !strings.Contains(err.Error(), c.verdict) {
				t.Errorf("verdict %v, want %q", err, c.verdict)
			}
		})
	}
}

func TestReportText(t *testing.T) {
	rep := newLatencyReport(ibverbs, place{}, both(1024), 2, []int64{100000, 120000}, []int64{30000, 40000}, nil)
	rep.Floor = "verbs"
	(&rdmaReport{Device: "rxe0", Port: 1, GIDIndex: 1, WriteLat: 16, WriteBW: 60e6}).compare(rep, &verdict{})
	var b strings.Builder
	if err := rep.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"push_pull over ibverbs (rxe0 port 1, ",
		"push_pull             120.0      120.0      120.0      120.0\n",
		"floor (verbs)          40.0       40.0       40.0       40.0\n",
		"ib_write_lat, one way: 16.00 us; push_pull takes 7.50 times that (goal: at most 12)\n",
		"ib_write_bw, 1048576 bytes: 60.0 MB/s; push_pull moves 17.1 MB/s at p50, 0.28 of that\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in:\n%s", want, b.String())
		}
	}
}
