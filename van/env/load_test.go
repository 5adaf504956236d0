package env

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func load(t testing.TB, environ ...string) *Config {
	t.Helper()
	c, err := LoadFrom(FromList(environ))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestRead covers every row of the table: an accepted text, the canonical form,
// and a refused text.
func TestRead(t *testing.T) {
	tests := []struct {
		name string
		ok   string // a list: text>canonical, or text alone when both are the same
		bad  string // a list of texts
		want string // of the first bad one
	}{
		{"DMLC_ROLE", "worker server scheduler joint", "Worker wroker all", "one of worker, server, scheduler, joint"},
		{"DMLC_NUM_WORKER", "1 16379 +7>7 007>7", "32x 0 -1 16380 1e3 1_000 0x10 true 99999999999999999999 1.5", "an integer from 1 to 16379"},
		{"DMLC_NUM_SERVER", "1 40", "0 16380", "an integer from 1 to 16379"},
		{"DMLC_GROUP_SIZE", "1 8", "0 abc", "an integer from 1 to 16379"},
		{"DMLC_NODE_RANK", "0 3", "-1 16379", "an integer from 0 to 16378"},
		{"DMLC_RANK_OFFSET", "0 -7 7", "x -16380", "an integer from -16379 to 16379"},
		{"DMLC_INSTANCE_ID", "0 7", "-1", "an integer from 0 to 16378"},
		{"STEPAF_CLUSTER_ID", "run-7 a", "", ""},
		{"STEPAF_FOREIGN", "0 1 2>1", "yes", "0 (off) or 1 (on); write 1"},
		{"STEPAF_SECRET_FILE", "/run/secrets/stepaf", "", ""},
		{"STEPAF_SECRET", "0123456789abcdef>(set)", "", ""},
		{"STEPAF_AUTH", "off warn require", "on Off", "one of off, warn, require"},
		{"STEPAF_TLS", "0 1 2>1", "on", "0 (off) or 1 (on); write 1"},
		{"DMLC_PS_ROOT_URI", "10.0.0.1 node-1.example ::1", "10.0.0.1:8123 tcp://x a/b", "a host name or address without port"},
		{"DMLC_PS_ROOT_PORT", "1 8123 65535", "0 65536 http", "an integer from 1 to 65535"},
		{"DMLC_NODE_HOST", "127.0.0.1", "127.0.0.1:1", "a host name or address without port"},
		{"DMLC_INTERFACE", "eth0 auto AUTO>auto aUTo>auto Autos", "eth0/1", "the name of one network interface, or auto"},
		{"DMLC_PORT", "0> 5000 65535", "65536 -1", "an integer from 0 to 65535"},
		{"DMLC_NUM_PORTS", "1 32", "0 33", "an integer from 1 to 32"},
		{"DMLC_LOCAL", "0 1 2>1 -3>1 00>0", "true yes on false 4294967296 x", "0 (off) or 1 (on); write 1"},
		{"DMLC_USE_KUBERNETES", "0 1 5>1 -1>0", "no", "0 (off) or 1 (on); write 0"},
		{"DMLC_ENABLE_RDMA", "zmq ZMQ>zmq 0>zmq ibverbs IbVerbs>ibverbs 1>ibverbs inproc my_van-2", "ucx fabric tp multivan MULTIVAN true rdma 2 a.b é", "zmq or ibverbs (ucx is not supported)"},
		{"DMLC_PS_VAN_TYPE", "zmq 0>zmq ibverbs 1>ibverbs", "2 tp false", "zmq or ibverbs"},
		{"BYTEPS_ZMQ_MAX_SOCKET", "1 65535", "0 65536", "an integer from 1 to 65535"},
		{"BYTEPS_ZMQ_NTHREADS", "1 64", "0 65", "an integer from 1 to 64"},
		{"BYTEPS_ENABLE_IPC", "0 1 3>1", "True", "0 (off) or 1 (on); write 1"},
		{"STEPAF_SHM_MAP", "0 1", "on", "0 (off) or 1 (on); write 1"},
		{"STEPAF_DATA", "tcp zmq", "udp", "one of tcp, zmq"},
		{"STEPAF_QP_NUM", "1 2", "0 3", "an integer from 1 to 2"},
		{"STEPMESH_SPLIT_QP_LAG", "0 1", "-1 2 true", "an integer from 0 to 1"},
		{"BYTEPS_RDMA_START_DEPTH", "1 65536", "0", "an integer from 1 to 65536"},
		{"BYTEPS_RDMA_RX_DEPTH", "1 2048", "0 -5", "an integer from 1 to 65536"},
		{"BYTEPS_RDMA_MAX_CONCURR_WR", "1 4224", "0", "an integer from 1 to 1048576"},
		{"BYTEPS_ADDRESS_POOL_SIZE", "1 32768", "32769", "an integer from 1 to 32768"},
		{"BYTEPS_PRINT_RDMA_LOG", "0 1", "on", "0 (off) or 1 (on); write 1"},
		{"STEPAF_RDMA_ACK_TIMEOUT", "10 22", "9 23 1s", "an integer from 10 to 22"},
		{"PS_RESEND", "0 1", "Yes", "0 (off) or 1 (on); write 1"},
		{"PS_RESEND_TIMEOUT", "1 1000", "0 1s", "a whole number of milliseconds from 1 to 86400000"},
		{"PS_DROP_MSG", "0 100", "101 -1 10%", "a percentage from 0 to 100"},
		{"PS_HEARTBEAT_INTERVAL", "0 5", "-1 5s", "a whole number of seconds from 0 to 86400"},
		{"PS_HEARTBEAT_TIMEOUT", "0 15", "1.5", "a whole number of seconds from 0 to 86400"},
		{"STEPAF_START_TIMEOUT", "1 300", "0", "a whole number of seconds from 1 to 604800"},
		{"STEPAF_STOP_TIMEOUT", "1 30", "0", "a whole number of seconds from 1 to 604800"},
		{"STEPAF_BARRIER_TIMEOUT", "1 3600", "0", "a whole number of seconds from 1 to 604800"},
		{"STEPAF_REPLACE_TIMEOUT", "0 10", "-1", "a whole number of seconds from 0 to 86400"},
		{"STEPAF_RECV_BUDGET_PEER", "1M 256m>256M 1048577 1073741824>1G", "1K 1T -1M M", "a number of bytes from 1M to 1024G, such as 64M or 1G"},
		{"STEPAF_RECV_BUDGET", "1G 2048M>2G 2147483648>2G 5000000000", "0 9007199254740993K 17179869185G 9223372036854775808", "a number of bytes from 1M to 1024G, such as 64M or 1G"},
		{"STEPAF_SEND_BUDGET", "256M 262144K>256M", "1.5G", "a number of bytes from 1M to 1024G, such as 64M or 1G"},
		{"STEPAF_STRANGER_BUDGET", "64K 65536>64K", "2G", "a number of bytes from 64K to 1G, such as 64M or 1G"},
		{"STEPAF_SHM_BUDGET", "1M 1048576>1M 2147483648>2G", "64K", "a number of bytes from 1M to 1024G, such as 64M or 1G"},
		{"STEPAF_RDMA_PEER_BUDGET", "1M 64m>64M", "1K", "a number of bytes from 1M to 1024G, such as 64M or 1G"},
		{"STEPAF_RDMA_BUDGET", "1M 1g>1G", "1K", "a number of bytes from 1M to 1024G, such as 64M or 1G"},
		{"PS_VERBOSE", "-1 0 4 100", "info -2", "an integer from -1 to 1000"},
		{"ENABLE_PROFILING", "0 1", "y", "0 (off) or 1 (on); write 1"},
		{"PROFILE_PATH", "/tmp/p p", "", ""},
		{"STEPMESH_BAKCEND", "CPU cpu>CPU gpu>GPU Npu>NPU", "", ""},
		{"STEPMESH_GPU", "0 8", "-1 cuda:0", "an integer from 0 to 16378"},
		{"STEPMESH_MEM_SYNC", "0 1", "off", "0 (off) or 1 (on); write 0"},
		{"STEPMESH_BIND_CPU_CORE", "0 1", "?", "0 (off) or 1 (on)"},
		{"STEPMESH_CPU_CORES_PER_SOCKET", "1 64", "0", "an integer from 1 to 4096"},
		{"STEPMESH_CPU_CORES_PER_GPU", "1 5", "0", "an integer from 1 to 4096"},
		{"STEPMESH_CPU_START_OFFSET", "0 15", "-1", "an integer from 0 to 65535"},
		{"STEPAF_BUSY_POLL_ENABLE", "0 1 2>1", "spin", "0 (off) or 1 (on)"},
		{"BYTEPS_ORDERED_HOSTS", "10.0.0.1 10.0.0.1:1,10.0.0.2 [::1]:5 ::1", "a,,b a,a:1 a:0 a:x [::1] ,", "host[:port],host[:port],..."},
		{"BENCHMARK_ITER", "0 2147483647", "-1", "an integer from 0 to 2147483647"},
		{"BENCHMARK_SIZE", "1", "0", "an integer from 1 to 2147483647"},
		{"BENCHMARK_WARMUP", "0 10", "-1", "an integer from 0 to 2147483647"},
		{"UTEST_WORKER_BATCH_MAX", "2 128", "1", "an integer from 2 to 32768"},
		{"UTEST_WORKER_TENSOR_NUM", "1", "0", "an integer from 1 to 65535"},
	}
	for i := range table {
		if i >= len(tests) || tests[i].name != table[i].name {
			t.Fatalf("row %d of the table, %s, has no test in its place", i, table[i].name)
		}
		tt, v := tests[i], &table[i]
		t.Run(tt.name, func(t *testing.T) {
			if got := v.get(Default()); got != v.def {
				t.Errorf("default is %q, want %q", got, v.def)
			}
			for s := range strings.FieldsSeq(tt.ok) {
				text, canon, both := strings.Cut(s, ">")
				if !both {
					canon = text
				}
				if got := v.get(load(t, tt.name+"="+text)); got != canon {
					t.Errorf("%q gives %q, want %q", text, got, canon)
				}
				if v.kind == Path {
					continue
				}
				if got := v.get(load(t, tt.name+"= \t"+text+"\r\n")); got != canon {
					t.Errorf("%q with blanks gives %q, want %q", text, got, canon)
				}
			}
			for k, s := range strings.Fields(tt.bad) {
				c, err := LoadFrom(FromList([]string{tt.name + "=" + s}))
				var e *Error
				if !errors.As(err, &e) || e.Name != tt.name || e.Value != s || e.Want == "" {
					t.Errorf("%q: error %v", s, err)
				} else if want, _, _ := strings.Cut(e.Want, "; did you mean "); k == 0 && want != tt.want {
					t.Errorf("%q: want %q, not %q", s, e.Want, tt.want)
				}
				if got := v.get(c); got != v.def {
					t.Errorf("%q refused, but the value is %q, not the default %q", s, got, v.def)
				}
			}
			if tt.name == secret || tt.name == secretFile {
				return // see TestEmptySecret
			}
			c := load(t, tt.name+"=")
			if got := v.get(c); got != v.def || c.Origin(tt.name) != "default" {
				t.Errorf("empty gives %q from %s", got, c.Origin(tt.name))
			}
			if len(c.Notes) != 1 || !strings.Contains(c.Notes[0], tt.name) || len(c.Warnings) != 0 {
				t.Errorf("empty: notes %q, warnings %q", c.Notes, c.Warnings)
			}
		})
	}
	if len(tests) != len(table) {
		t.Errorf("%d tests for %d rows", len(tests), len(table))
	}
}

func TestTypedFields(t *testing.T) {
	c := load(t, "PS_RESEND_TIMEOUT=250", "PS_HEARTBEAT_TIMEOUT=15", "BYTEPS_ORDERED_HOSTS=a:1, b", "DMLC_LOCAL=1",
		"STEPAF_BUSY_POLL_ENABLE=0", "PROFILE_PATH= p ", "STEPMESH_SPLIT_QP_LAG=1")
	if c.ResendTimeout != 250*time.Millisecond || c.HeartbeatTimeout != 15*time.Second || !c.Local || c.BusyPoll != AlwaysBlock ||
		c.ProfilePath != " p " || !c.SplitQPLag || !slices.Equal(c.OrderedHosts, []string{"a:1", "b"}) {
		t.Errorf("%+v", c)
	}
	d := Default()
	if d.NodeRank != -1 || d.InstanceID != -1 || d.EnableIPC != -1 || d.BusyPoll != SpinThenBlock || !d.MemSync ||
		d.StartTimeout != 300*time.Second || d.StopTimeout != 30*time.Second || d.GroupSize != 1 || d.Bench.Iterations != 10000 {
		t.Errorf("defaults: %+v", d)
	}
}

func TestErrorText(t *testing.T) {
	_, err := LoadFrom(FromList([]string{"DMLC_NUM_WORKER=32x", "PS_RESEND=true", "DMLC_ROLE=slave\n"}))
	want := `DMLC_ROLE="slave": want one of worker, server, scheduler, joint
DMLC_NUM_WORKER="32x": want an integer from 1 to 16379
PS_RESEND="true": want 0 (off) or 1 (on); write 1`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	// A launch script that found two addresses.
	_, err = LoadFrom(FromList([]string{"DMLC_NODE_HOST=10.0.0.1\n10.0.0.2"}))
	if want := `DMLC_NODE_HOST="10.0.0.1\n10.0.0.2": want one host name or address`; err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
}

func TestVan(t *testing.T) {
	tests := []struct {
		environ  string
		van, err string
		warning  string
		origin   string // of DMLC_PS_VAN_TYPE
	}{
		{"", "zmq", "", "", "default"},
		{"DMLC_PS_VAN_TYPE=ibverbs", "ibverbs", "", "", "environment"},
		{"DMLC_ENABLE_RDMA=ibverbs", "ibverbs", "", "", "DMLC_ENABLE_RDMA"},
		{"DMLC_ENABLE_RDMA= DMLC_PS_VAN_TYPE=ibverbs", "ibverbs", "", "", "environment"},
		{"DMLC_ENABLE_RDMA=0 DMLC_PS_VAN_TYPE=ibverbs", "zmq", "", `DMLC_ENABLE_RDMA="0" wins over DMLC_PS_VAN_TYPE="ibverbs": the transport is zmq`, "DMLC_ENABLE_RDMA"},
		{"DMLC_ENABLE_RDMA=ibverbs DMLC_PS_VAN_TYPE=IBVERBS", "ibverbs", "", "", "DMLC_ENABLE_RDMA"},
		{"DMLC_ENABLE_RDMA=zmq DMLC_PS_VAN_TYPE=ucx", "zmq", "", `DMLC_ENABLE_RDMA="zmq" wins over DMLC_PS_VAN_TYPE="ucx": the transport is zmq`, "DMLC_ENABLE_RDMA"},
		{"DMLC_ENABLE_RDMA=1", "ibverbs", "", "DMLC_ENABLE_RDMA=1 is deprecated and means ibverbs; write DMLC_ENABLE_RDMA=ibverbs", "DMLC_ENABLE_RDMA"},
		{"DMLC_PS_VAN_TYPE=1", "ibverbs", "", "DMLC_PS_VAN_TYPE=1 is deprecated and means ibverbs; write DMLC_PS_VAN_TYPE=ibverbs", "environment"},
		{"DMLC_ENABLE_UCX=0 DMLC_PS_VAN_TYPE=ibverbs", "ibverbs", "", "", "environment"},
		{"DMLC_ENABLE_UCX=1 DMLC_ENABLE_RDMA=zmq", "zmq",
			`DMLC_ENABLE_UCX="1": want 0 or nothing (UCX is not supported); choose zmq or ibverbs with DMLC_ENABLE_RDMA`, "", "default"},
		{"DMLC_ENABLE_UCX=yes", "zmq", `DMLC_ENABLE_UCX="yes": want 0 (off) or 1 (on); write 1`, "", "default"},
		{"DMLC_ENABLE_RDMA=MultiVan", "zmq", `DMLC_ENABLE_RDMA="MultiVan": want zmq or ibverbs (multivan is not supported)`, "", "default"},
		{"DMLC_PS_VAN_TYPE=fabric", "zmq", `DMLC_PS_VAN_TYPE="fabric": want zmq or ibverbs (fabric is not supported)`, "", "default"},
		{"DMLC_ENABLE_RDMA=true", "zmq", `DMLC_ENABLE_RDMA="true": want zmq or ibverbs; write ibverbs`, "", "default"},
	}
	for _, tt := range tests {
		t.Run(tt.environ, func(t *testing.T) {
			c, err := LoadFrom(FromList(strings.Fields(tt.environ)))
			if got := errText(err); got != tt.err {
				t.Errorf("error %q, want %q", got, tt.err)
			}
			if got := strings.Join(c.Warnings, "\n"); got != tt.warning {
				t.Errorf("warnings %q, want %q", got, tt.warning)
			}
			if c.VanType != tt.van || c.Origin("DMLC_PS_VAN_TYPE") != tt.origin {
				t.Errorf("van %s from %s, want %s from %s", c.VanType, c.Origin("DMLC_PS_VAN_TYPE"), tt.van, tt.origin)
			}
		})
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestAliases(t *testing.T) {
	tests := []struct {
		environ, variable, value, origin, err string
	}{
		{"STEPMESH_BACKEND=cpu", "STEPMESH_BAKCEND", "CPU", "STEPMESH_BACKEND", ""},
		{"STEPAF_BACKEND=CPU", "STEPMESH_BAKCEND", "CPU", "STEPAF_BACKEND", ""},
		{"STEPMESH_BAKCEND= STEPAF_BACKEND=CPU", "STEPMESH_BAKCEND", "CPU", "STEPAF_BACKEND", ""},
		{"STEPMESH_BAKCEND=CPU STEPMESH_BACKEND=cpu", "STEPMESH_BAKCEND", "CPU", "environment", ""},
		{"STEPMESH_BAKCEND=CPU STEPMESH_BACKEND=GPU", "STEPMESH_BAKCEND", "CPU", "environment",
			`STEPMESH_BACKEND="GPU" (STEPMESH_BAKCEND="CPU"): want the same value, or only one of the two`},
		{"STEPAF_GPU=3", "STEPMESH_GPU", "3", "STEPAF_GPU", ""},
		{"STEPAF_GPU=x", "STEPMESH_GPU", "0", "default", `STEPAF_GPU="x": want an integer from 0 to 16378`},
		{"STEPAF_GPU=3 STEPMESH_GPU=03", "STEPMESH_GPU", "3", "environment", ""},
		{"STEPAF_MEM_SYNC=0", "STEPMESH_MEM_SYNC", "0", "STEPAF_MEM_SYNC", ""},
	}
	for _, tt := range tests {
		t.Run(tt.environ, func(t *testing.T) {
			c, err := LoadFrom(FromList(strings.Fields(tt.environ)))
			if got := errText(err); got != tt.err {
				t.Errorf("error %q, want %q", got, tt.err)
			}
			if v := find(tt.variable).get(c); v != tt.value || c.Origin(tt.variable) != tt.origin {
				t.Errorf("%s from %s, want %s from %s", v, c.Origin(tt.variable), tt.value, tt.origin)
			}
		})
	}
}

func TestAdvice(t *testing.T) {
	tests := []struct {
		environ        string
		warning, notes string // parts of the only one
	}{
		{"PS_DROP_MSG=5", "without PS_RESEND=1", ""},
		{"PS_DROP_MSG=5 PS_RESEND=1", "", ""},
		{"PS_RESEND=1 DMLC_NUM_WORKER=125", "125 instances", ""},
		{"PS_RESEND=1 DMLC_NUM_WORKER=124", "", ""},
		{"PS_RESEND=1 DMLC_NUM_SERVER=16 DMLC_GROUP_SIZE=8", "128 instances", ""},
		{"BYTEPS_ENABLE_IPC=0", "", ""},
		{"BYTEPS_ENABLE_IPC=1", "", ""},
		{"DMLC_LOCAL=1", "", ""},
		{"DMLC_LOCAL=1 DMLC_ENABLE_RDMA=ibverbs", "the transport is ibverbs", ""},
		{"DMLC_RANK=3", "", "it is not a rank"},
		{"DEBUG_MODE=1", "", "DEBUG_MODE has no effect"},
		{"BYTEPS_ENABLE_MIXED_MODE=0", "", ""},
		{"BYTEPS_ENABLE_MIXED_MODE=1", "mixed mode is not supported", ""},
		{"DMLC_NUM_CPU_DEV=1", "UCX is not supported", ""},
		{"PSLITE_UCX_RNDV_THRESH=8k", "UCX is not supported", ""},
		{"UCX_RNDV_THRESH=8k", "", "UCX_RNDV_THRESH has no effect"},
		{"DMLC_USE_RECVCTX=1", "TensorPipe is not supported", ""},
		{"BYTEPS_JOB_ID=0", "BytePS's shared memory is not supported", ""},
	}
	one := func(t *testing.T, what string, got []string, want string) {
		switch {
		case want == "" && len(got) == 0:
		case want != "" && len(got) == 1 && strings.Contains(got[0], want):
		default:
			t.Errorf("%s %q, want one with %q", what, got, want)
		}
	}
	for _, tt := range tests {
		t.Run(tt.environ, func(t *testing.T) {
			c := load(t, strings.Fields(tt.environ)...)
			one(t, "warnings", c.Warnings, tt.warning)
			one(t, "notes", c.Notes, tt.notes)
		})
	}
}

func TestLoadLookup(t *testing.T) {
	c, err := LoadFrom(Source{Lookup: func(name string) (string, bool) { return "7", name == "STEPMESH_GPU" }})
	if err != nil || c.GPU != 7 {
		t.Errorf("GPU %d, error %v", c.GPU, err)
	}
	t.Setenv("STEPMESH_GPU", "5")
	t.Setenv("STEPMESH_GPUU", "5")
	c, err = LoadFrom(OS())
	if err != nil || c.GPU != 5 {
		t.Errorf("GPU %d, error %v", c.GPU, err)
	}
	if !slices.Contains(c.Unknown(), Suggestion{"STEPMESH_GPUU", "STEPMESH_GPU"}) {
		t.Errorf("unknown: %v", c.Unknown())
	}
}

// FuzzLoad checks that no value panics, that an error names the variable and stays
// on one line, and that an accepted value survives a trip through Environ.
func FuzzLoad(f *testing.F) {
	for i := range table {
		for _, s := range []string{"", "0", "1", " -1\n", "32x", "true", "0x10", "1e3", "9999999999999999999999", table[i].def,
			"a,b", "a:1,[::1]:2", "auto", "ibverbs", "\xff\x00"} {
			f.Add(uint8(i), s)
		}
	}
	f.Fuzz(func(t *testing.T, row uint8, value string) {
		v := &table[int(row)%len(table)]
		c, err := LoadFrom(Source{Lookup: func(name string) (string, bool) { return value, name == v.name }})
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Name != v.name || strings.Contains(err.Error(), "\n") {
				t.Fatalf("error %q", err)
			}
			return
		}
		again, err := LoadFrom(FromList(c.Environ()))
		if err != nil {
			t.Fatalf("Environ gives %q: %v", c.Environ(), err)
		}
		values := func(c *Config) []string {
			var list []string
			for _, e := range c.Table() {
				list = append(list, e.Value)
			}
			return list
		}
		if !reflect.DeepEqual(values(c), values(again)) {
			t.Fatalf("%q became %q", values(c), values(again))
		}
	})
}

// TestHeartbeats: on between our nodes, unless something is set.
func TestHeartbeats(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		env               string
		interval, timeout time.Duration
	}{
		{"", 2 * s, 10 * s},
		{"PS_HEARTBEAT_INTERVAL=1", 1 * s, 3 * s},
		{"PS_HEARTBEAT_INTERVAL=0", 0, 0},
		{"PS_HEARTBEAT_TIMEOUT=0", 0, 0},
		{"PS_HEARTBEAT_TIMEOUT=3", 1 * s, 3 * s},
		{"PS_HEARTBEAT_TIMEOUT=60", 2 * s, 60 * s},
		{"PS_HEARTBEAT_INTERVAL=5 PS_HEARTBEAT_TIMEOUT=15", 5 * s, 15 * s},
		{"PS_HEARTBEAT_INTERVAL=0 PS_HEARTBEAT_TIMEOUT=15", 0, 15 * s},
		{"PS_HEARTBEAT_INTERVAL=5 PS_HEARTBEAT_TIMEOUT=0", 5 * s, 0},
	} {
		i, o := load(t, strings.Fields(c.env)...).Heartbeats()
		if i != c.interval || o != c.timeout {
			t.Errorf("%q: %s, %s; want %s, %s", c.env, i, o, c.interval, c.timeout)
		}
	}
}
