package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/choose"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// rdmaRun adds the comparison with perftest to a benchmark over RDMA.
type rdmaRun struct{ at choose.Result }

// run is one run of a benchmark with processes.
type run struct {
	c    *cli.Context
	rdma *rdmaRun // nil unless over RDMA
	host string   // of the processes
	v    verdict
}

func newRun(c *cli.Context) (r run, err error) {
	r = run{c: c, host: c.String("host")}
	if c.String("van") == ibverbs {
		if r.rdma, err = newRDMARun(c.Context, r.host); err == nil {
			r.host = r.rdma.at.Host.String()
		}
	}
	return r, err
}

// newRDMARun chooses the port: the port of host, or without host as a node does.
func newRDMARun(ctx context.Context, host string) (*rdmaRun, error) {
	stack, err := verbs.Load(verbs.Options{})
	if err != nil {
		return nil, fmt.Errorf("bench: --van ibverbs: %w", err)
	}
	devices, err := stack.Devices()
	if err != nil && len(devices) == 0 {
		return nil, fmt.Errorf("bench: --van ibverbs: %w", err)
	}
	nets, err := choose.Interfaces()
	if err != nil {
		return nil, err
	}
	cfg, _ := env.LoadFrom(env.OS()) // its errors matter only for nodes
	ask := choose.Request{Interface: cfg.Interface}
	if host == "" {
		host = cfg.NodeHost
	} else {
		ask.Interface = ""
	}
	if host != "" {
		if ask.Host, err = hostaddr.Resolve(ctx, "ip4", host); err != nil {
			return nil, fmt.Errorf("bench: host %q: %w", host, err)
		}
	}
	at, err := choose.Choose(choose.Machine{Devices: devices, Interfaces: nets, Root: os.DirFS("/")}, ask)
	if err != nil {
		return nil, fmt.Errorf("bench: --van ibverbs: %w", err)
	}
	return &rdmaRun{at: at}, nil
}

// bulk is the payload from which a round trip's bandwidth is meaningful, and the largest message that every device
// accepts.
const bulk = 1 << 20

// perftest measures ib_write_lat for lat bytes, unless lat is 0, and ib_write_bw if bw is set. It returns nil if r is nil.
func (r *rdmaRun) perftest(c *cli.Context, lat int, bw bool) (x *rdmaReport, err error) {
	if r == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	x = &rdmaReport{Host: r.at.Host.String(), Device: r.at.Device, Port: r.at.Port, GIDIndex: r.at.GIDIndex}
	if lat > 0 && lat <= bulk {
		x.WriteLat, err = r.writeLat(ctx, lat)
	}
	if err == nil && bw {
		x.WriteBW, err = r.writeBW(ctx)
	}
	if errors.Is(err, errNoPerftest) {
		x.WriteLat, x.Missing = 0, err.Error()
	} else if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	return x, nil
}

// rdmaReport compares a figure with perftest's figures of the same run.
type rdmaReport struct {
	Host     string  `json:"host"`
	Device   string  `json:"device"`
	Port     int     `json:"port"`
	GIDIndex int     `json:"gid_index"`
	Missing  string  `json:"perftest_missing,omitempty"`
	WriteLat float64 `json:"ib_write_lat_us,omitempty"` // one way, typical
	LatRatio float64 `json:"ratio_ib_write_lat,omitempty"`
	LatGoal  float64 `json:"goal_ib_write_lat,omitempty"` // maximum of LatRatio
	Bps      float64 `json:"bytes_per_s,omitempty"`       // both ways, at the median
	WriteBW  float64 `json:"ib_write_bw_bytes_per_s,omitempty"`
	BWRatio  float64 `json:"ratio_ib_write_bw,omitempty"`
	BWGoal   float64 `json:"goal_ib_write_bw,omitempty"` // minimum of BWRatio
	Missed   bool    `json:"missed"`
}

// compare compares a report with perftest's figures, and adds missed goals to v.
func (x *rdmaReport) compare(rep *latencyReport, v *verdict) {
	rep.RDMA, x.Bps = x, float64(rep.PushBytes+rep.PullBytes)/rep.P50*1e6
	x.compareTime(rep.P50)
	if x.WriteBW > 0 {
		x.BWRatio = x.Bps / x.WriteBW
	}
	p := payload{rep.PushBytes, rep.PullBytes}
	x.judge(p, course{ibverbs, cpu}.goal(p), v)
}

// compareTime sets the ratio of a time in microseconds to ib_write_lat. x may be nil.
func (x *rdmaReport) compareTime(us float64) {
	if x != nil && x.WriteLat > 0 {
		x.LatRatio = us / x.WriteLat
	}
}

// judge compares with the goal of p, and adds a missed goal to v.
func (x *rdmaReport) judge(p fmt.Stringer, g goal, v *verdict) {
	ratio := 0.0
	switch g.of {
	case ibWriteLat:
		x.LatGoal, ratio = g.limit, x.LatRatio
	case ibWriteBW:
		x.BWGoal, ratio = g.limit, x.BWRatio
	}
	if g.limit > 0 && x.Missing != "" {
		v.miss(p, x.Missing)
		return
	}
	x.Missed = v.judge(p, g, ratio)
}

// print prints the comparison of what.
func (x *rdmaReport) print(w io.Writer, what string) {
	if x.Missing != "" {
		fmt.Fprintf(w, "no comparison with perftest: %s\n", x.Missing)
	}
	if x.WriteLat > 0 {
		fmt.Fprintf(w, "ib_write_lat, one way: %.2f us; %s takes %.2f times that%s\n", x.WriteLat, what, x.LatRatio, goal{limit: x.LatGoal}.text())
	}
	if x.WriteBW > 0 {
		fmt.Fprintf(w, "ib_write_bw, %d bytes: %.1f MB/s; %s moves %.1f MB/s at p50, %.2f of that%s\n",
			bwSize, x.WriteBW/1e6, what, x.Bps/1e6, x.BWRatio, goal{limit: x.BWGoal, least: true}.text())
	}
}
