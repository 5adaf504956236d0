package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

func (x *exam) versions(context.Context) []Finding {
	m := x.m
	return []Finding{{
		Text:    fmt.Sprintf("stepaf %s, %s, libzmq %s", m.Version, m.Go, m.LibZMQ),
		Details: []string{"transports: " + strings.Join(m.Transports, ", "), "backends: " + strings.Join(m.Backends, ", ")},
		Data:    map[string]any{"stepaf": m.Version, "go": m.Go, "libzmq": m.LibZMQ, "transports": m.Transports, "backends": m.Backends},
	}}
}

// lowMemory is the memory that a node with its buffers may need without tensors.
const lowMemory = 512 << 20

func (x *exam) system(context.Context) []Finding {
	kernel := x.line("proc/sys/kernel/osrelease")
	total, free := x.memory()
	f := Finding{
		Text: fmt.Sprintf("Linux %s, %s, %s of memory, %s free", cmp.Or(kernel, "of unknown version"), Count(x.m.CPUs, "CPU"), size(total), size(free)),
		Data: map[string]any{"kernel": kernel, "cpus": x.m.CPUs, "memory_bytes": total, "memory_free_bytes": free},
	}
	switch {
	case total > 0 && free < lowMemory:
		f.Status, f.Remedy = Warn, "stop programs that use much memory: a node needs "+size(lowMemory)+" besides its tensors"
	case x.cfg.BusyPoll == env.SpinForever && x.m.CPUs < 4:
		f.Status, f.Remedy = Warn, "unset STEPAF_BUSY_POLL_ENABLE: threads that spin forever need a CPU each, and this machine has few"
	}
	return []Finding{f}
}

// memory returns the memory of the machine and the available part, 0 if it is not known.
func (x *exam) memory() (total, free uint64) {
	of := func(name string) uint64 {
		number, _, _ := strings.Cut(x.entry("proc/meminfo", name), " ") // in KiB
		kib, err := strconv.ParseUint(number, 10, 54)
		if err != nil {
			return 0
		}
		return kib << 10
	}
	return of("MemTotal"), of("MemAvailable")
}

func (x *exam) environment(ctx context.Context) []Finding {
	err := x.cfgErr
	if x.cfg.Role != "" { // the variables are those of a node
		err = x.cfg.Validate() // Validate repeats the errors of LoadFrom
	}
	var found []Finding
	fail := func(errs []error, remedy string) {
		for _, e := range errs {
			found = append(found, Finding{Status: Fail, Text: e.Error(), Remedy: remedy + `; "stepaf env --explain" shows what each variable means`})
		}
	}
	fail(slices.DeleteFunc(Unwarned(x.cfg, err), ofSecret), "correct it")
	fail(x.absentNames(ctx), "correct it, or unset it")
	if interfaces, err := x.m.Interfaces(); err == nil {
		fail(Unreachable(ctx, x.cfg, hostaddr.Host{Interfaces: interfaces, Source: x.m.Source}, x.m.Resolve), "correct it")
	}
	for _, w := range x.cfg.Warnings {
		found = append(found, Finding{Status: Warn, Text: w, Remedy: `see "stepaf env --explain"`})
	}
	var set []string
	table := x.cfg.Table()
	for _, v := range table {
		// The two variables of the transport name each other as origin; only one is shown.
		other := slices.ContainsFunc(table, func(o env.Effective) bool { return o.Name == v.Origin })
		if v.Origin != "default" && !other {
			set = append(set, v.Name+"="+v.Value)
		}
	}
	f := Finding{Text: "no variable is set", Details: set}
	if len(set) > 0 {
		f.Text = Count(len(set), "variable") + " set: " + strings.Join(set, " ")
	}
	return append(found, f)
}

// ofSecret reports whether err is about the secret, which has its own check.
func ofSecret(err error) bool {
	e, ok := errors.AsType[*env.Error](err)
	return ok && (e.Name == "STEPAF_SECRET" || e.Name == "STEPAF_SECRET_FILE" || e.Name == "STEPAF_AUTH" && e.Why != "")
}

// Absent returns an error if this build does not have the transport or backend that a variable names.
func Absent(cfg *env.Config, name, value string, have []string) error {
	if value == "" || slices.Contains(have, value) {
		return nil
	}
	if o := cfg.Origin(name); o != "environment" && o != "default" {
		name = o // the alias that is set
	}
	return fmt.Errorf("%s=%q: want one of those of this build, %s, or a program that has registered that one%s", name, value, strings.Join(have, ", "), env.DidYouMean(value, have))
}

// Unwarned lists the errors that err, an error of cfg, joins. It leaves out the errors that cfg's warnings already contain.
func Unwarned(cfg *env.Config, err error) []error {
	return slices.DeleteFunc(slices.Clone(exit.Unjoin(err)), func(e error) bool { return slices.Contains(cfg.Warnings, e.Error()) })
}

// absentNames returns errors about variables that name something that this build or machine does not have. A node of
// this build would be refused at its start. RDMA and GPUs have checks of their own.
func (x *exam) absentNames(ctx context.Context) (errs []error) {
	if !x.needRDMA {
		errs = append(errs, Absent(x.cfg, "DMLC_ENABLE_RDMA", x.cfg.VanType, x.m.Transports))
	}
	if !x.needGPU() {
		errs = append(errs, Absent(x.cfg, "STEPMESH_BAKCEND", x.cfg.Backend, x.m.Backends))
	}
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	interfaces, _ := x.m.Interfaces() // nil: the interfaces are unknown
	if x.needRDMA {
		interfaces = nil // another check covers the address
	}
	return append(errs, AbsentAddresses(ctx, x.cfg, interfaces, x.m.Resolve)...)
}

// AbsentAddresses returns errors about variables with hosts that have no address, and about a node's own address or interface that
// this host, which has these interfaces, does not have. With nil interfaces it does not check the node's own.
func AbsentAddresses(ctx context.Context, cfg *env.Config, interfaces []hostaddr.Interface, resolve func(context.Context, string) (netip.Addr, error)) (errs []error) {
	if cfg.RootURI != "" && (cfg.Role != scheduler || cfg.Kubernetes) { // for other schedulers the address is compared with this host
		if _, err := resolve(ctx, cfg.RootURI); err != nil {
			errs = append(errs, fmt.Errorf("DMLC_PS_ROOT_URI=%q: %w; want the name or an address of the scheduler's host", cfg.RootURI, err))
		}
	}
	if interfaces == nil {
		return errs
	}
	interfaces = slices.Clone(interfaces)
	var have []string
	for k := range interfaces {
		i := &interfaces[k]
		i.Addrs = slices.DeleteFunc(slices.Clone(i.Addrs), func(a netip.Addr) bool { return !a.Is4() })
		have = append(have, fmt.Sprintf("%s (%s)", i.Name, cmp.Or(strings.Trim(fmt.Sprint(i.Addrs), "[]"), "no IPv4 address")))
	}
	want := "want %s this host, which has " + strings.Join(have, ", ")
	local := func(name, host string) {
		addr, err := resolve(ctx, host)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s=%q: %w; "+want, name, host, err, "an address of"))
		case addr.Is4() && !addr.IsLoopback() && !addr.IsUnspecified() &&
			!slices.ContainsFunc(interfaces, func(i hostaddr.Interface) bool { return slices.Contains(i.Addrs, addr) }):
			errs = append(errs, fmt.Errorf("%s=%q: "+want, name, host, "an address of"))
		}
	}
	switch {
	case cfg.Role == scheduler:
		if cfg.RootURI != "" && !cfg.Kubernetes {
			local("DMLC_PS_ROOT_URI", cfg.RootURI)
		}
	case cfg.NodeHost != "":
		local("DMLC_NODE_HOST", cfg.NodeHost)
	case cfg.Interface != "" && !strings.EqualFold(cfg.Interface, "auto"):
		match := hostaddr.Named(interfaces, cfg.Interface)
		if len(match) != 1 || len(match[0].Addrs) == 0 {
			errs = append(errs, fmt.Errorf("DMLC_INTERFACE=%q: "+want, cfg.Interface, "one interface with an IPv4 address of"))
		}
	}
	return errs
}

const setOther = "set DMLC_NODE_HOST or DMLC_INTERFACE"

// Unreachable returns the reasons why nodes of other hosts cannot reach a node that starts on host h with cfg: an
// address that they cannot reach, or no route to the scheduler. Names without an address are not reported here.
func Unreachable(ctx context.Context, cfg *env.Config, h hostaddr.Host, resolve func(context.Context, string) (netip.Addr, error)) []error {
	scheduler, err := resolve(ctx, cfg.RootURI)
	if cfg.RootURI == "" || err != nil || cfg.Local {
		return nil
	}
	if cfg.Role == "scheduler" {
		if scheduler.IsLoopback() && cfg.RootURI != scheduler.String() && !strings.HasPrefix(cfg.RootURI, "localhost") && !cfg.Kubernetes {
			return []error{fmt.Errorf("DMLC_PS_ROOT_URI=%q: it is %s on this host, which no other host can reach; want an address, or a name whose line in /etc/hosts has one",
				cfg.RootURI, scheduler)}
		}
		return nil
	}
	if scheduler.Is4() && !h.Has(scheduler) {
		if _, err := h.Source(scheduler); err != nil {
			return []error{fmt.Errorf("DMLC_PS_ROOT_URI=%q: this host has no route to %s: %w", cfg.RootURI, scheduler, err)}
		}
	}
	addr, name := namedAddress(ctx, cfg, h, scheduler, resolve)
	if why := h.Doubt(addr, scheduler); addr.IsValid() && why != "" {
		return []error{fmt.Errorf("%s: a node would listen at %s, which the scheduler at %s cannot reach: %s; %s", name, addr, scheduler, why, setOther)}
	}
	return nil
}

// namedAddress returns the address that the configuration names for a worker or server of host h, and the variable that names it. The
// address is invalid if the name has none, and the variable is "" if the configuration names none. scheduler is the scheduler's address.
func namedAddress(ctx context.Context, cfg *env.Config, h hostaddr.Host, scheduler netip.Addr,
	resolve func(context.Context, string) (netip.Addr, error)) (addr netip.Addr, variable string) {
	switch {
	case cfg.NodeHost != "":
		addr, _ = resolve(ctx, cfg.NodeHost) // absentNames reports the error
		return addr, fmt.Sprintf("DMLC_NODE_HOST=%q", cfg.NodeHost)
	case cfg.Interface != "" && !strings.EqualFold(cfg.Interface, "auto"):
		if match := hostaddr.Named(h.Interfaces, cfg.Interface); len(match) == 1 {
			addr = h.Of(match[0], scheduler)
		}
		return addr, fmt.Sprintf("DMLC_INTERFACE=%q", cfg.Interface)
	}
	return addr, ""
}

// zmqTime is more than enough for a message over loopback.
const zmqTime = 5 * time.Second

func (x *exam) zmqLoopback(ctx context.Context) []Finding {
	ctx, cancel := context.WithTimeout(ctx, zmqTime)
	defer cancel()
	took, at, err := echo(ctx, x.m.ZMQ)
	if err != nil {
		f := Finding{Status: Fail, Text: err.Error(),
			Remedy: "see that the loopback interface is up (ip link show lo) and that no firewall drops TCP on 127.0.0.1"}
		if x.needRDMA {
			f.Status = Warn
		}
		return []Finding{f}
	}
	return []Finding{{Text: fmt.Sprintf("bound %s, connected, and received a message in %s", at, round(took)),
		Data: map[string]any{"ns": took.Nanoseconds()}}}
}

// echo sends one message from a van to itself and returns the time of the whole operation.
func echo(ctx context.Context, f van.Factory) (took time.Duration, at string, err error) {
	start := time.Now()
	v, err := f(van.Options{Config: env.Default()})
	if err != nil {
		return 0, "", err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace/2)
		defer cancel()
		err = errors.Join(err, v.Close(ctx))
	}()
	self := van.Node{Role: van.Worker, ID: van.Empty, Hostname: "127.0.0.1"}
	if self.Port, err = v.Bind(ctx, self); err != nil {
		return 0, "", err
	}
	const mark = 4711
	got := make(chan bool, 1)
	v.Start(func(m *van.Message) {
		select {
		case got <- m.Timestamp == mark:
		default: // one message is enough
		}
	})
	self.ID = van.WorkerID(0)
	v.SetID(self.ID)
	if err := v.Connect(ctx, self.ID, self); err != nil {
		return 0, "", err
	}
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp = self.ID, mark
	if err := v.Send(m); err != nil {
		return 0, "", err
	}
	select {
	case right := <-got:
		if !right {
			return 0, "", fmt.Errorf("a message from %s to itself was changed on its way", self.Addr())
		}
		return time.Since(start), self.Addr(), nil
	case <-ctx.Done():
		return 0, "", fmt.Errorf("a message from %s to itself did not arrive: %w", self.Addr(), context.Cause(ctx))
	}
}
