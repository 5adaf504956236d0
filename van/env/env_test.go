package env

import (
	"errors"
	"flag"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

var update = flag.Bool("update", false, "rewrite docs/env.md")

func TestDocument(t *testing.T) {
	const file = "../../docs/env.md"
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	columns := writtenIn(string(got))
	want := markdown(columns)
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(got) != want {
		t.Errorf("%s is stale: rewrite it with go test ./van/env -update", file)
	}
	for i := range table {
		if strings.Count(want, "|`"+table[i].name+"`") != 1 {
			t.Errorf("%s does not have one line", table[i].name)
		}
		if columns[table[i].name].readers == "" {
			t.Errorf("%s: write into %s what reads it, and how it differs from the original", table[i].name, file)
		}
	}
}

func TestTableIsSound(t *testing.T) {
	seen := map[string]bool{}
	for i := range table {
		v := &table[i]
		for _, n := range v.spellings() {
			if seen[n] {
				t.Errorf("%s is there twice", n)
			}
			seen[n] = true
		}
		if v.help == "" || v.field == nil || strings.ContainsAny(v.help, "|\n") {
			t.Errorf("%s: incomplete or not fit for a table", v.name)
		}
		if canon, want := v.parse(v.def); v.def != "" && (want != "" || canon != v.def) {
			t.Errorf("%s: default %q is not canonical: %s", v.name, v.def, want)
		}
	}
	for _, o := range others {
		if seen[o.name] || o.why == "" {
			t.Errorf("%s is there twice, or without reason", o.name)
		}
		seen[o.name] = true
	}
	// The 74 names of the original, four aliases and nineteen of our own.
	if len(seen) != 98 {
		t.Errorf("%d names, want 98", len(seen))
	}
}

func TestMisspelt(t *testing.T) {
	tests := []struct{ name, nearest string }{
		{"DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"},
		{"DMLC_NUM_SEVRER", "DMLC_NUM_SERVER"},
		{"DMLC_ROEL", "DMLC_ROLE"},
		{"DMLC_ROLES", "DMLC_ROLE"},
		{"DMLC_INTERFCE", "DMLC_INTERFACE"},
		{"PS_VERBOS", "PS_VERBOSE"},
		{"DMLC_PS_VERBOSE", "PS_VERBOSE"},
		{"PS_ROOT_URI", "DMLC_PS_ROOT_URI"},
		{"STEPAF_BUSY_POL_ENABEL", "STEPAF_BUSY_POLL_ENABLE"},
		{"STEPMESH_BACKND", "STEPMESH_BACKEND"},
		{"STEPMESH_QP_NUM", "STEPAF_QP_NUM"},
		{"DMLC_GPU", "STEPMESH_GPU"},
		{"STEPAF_ROLE", "DMLC_ROLE"},
		{"DMCL_ROLE", "DMLC_ROLE"},
		{"dmlc_group_size", "DMLC_GROUP_SIZE"},
		{"DMLC-NODE-RANK", "DMLC_NODE_RANK"},
		{"DMLC_NODE_HOST ", "DMLC_NODE_HOST"},
		{"STEPMSEH_GPU", "STEPMESH_GPU"},
		{"enable_profiling", "ENABLE_PROFILING"},
		{"STEPMESH_BIND_CPU_CORES", "STEPMESH_BIND_CPU_CORE"},
		{"BYTEPS_ORDERD_HOSTS", "BYTEPS_ORDERED_HOSTS"},
		{"DMLC_NODE_RANKS", "DMLC_NODE_RANK"},

		{"DMLC_ROLE", ""},         // known
		{"DMLC_ENABLE_UCX", ""},   // known
		{"STEPAF_BACKEND", ""},    // alias
		{"BYTEPS_ENABLE_GDB", ""}, // others' names
		{"BYTEPS_SERVER_ENGINE_THREAD", ""},
		{"PS1", ""},
		{"PS_FORMAT", ""},
		{"DMLC_CORE_TEST", ""},
		{"BENCHMARK_ITR", ""}, // not one of our prefixes
		{"MLC_INTERFACE", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := LoadFrom(FromList([]string{tt.name + "=", "HOME=/"}))
			if err != nil {
				t.Fatal(err)
			}
			var want []Suggestion
			if tt.nearest != "" {
				want = []Suggestion{{tt.name, tt.nearest}}
			}
			if !slices.Equal(c.Unknown(), want) {
				t.Errorf("got %v, want %v", c.Unknown(), want)
			}
			if len(c.Warnings) != len(want) || len(want) == 1 && !strings.Contains(c.Warnings[0], "did you mean "+tt.nearest+"?") {
				t.Errorf("warnings %q", c.Warnings)
			}
		})
	}
}

// TestMeantForRequired: the error of a required variable that is not set has the name that was set instead.
func TestMeantForRequired(t *testing.T) {
	good := map[string]string{"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "8123"}
	tests := map[string]string{
		"DMLC_ROLE":         "DMLC_ROEL DMLC_ROLES DLMC_ROLE STEPAF_ROLE BYTEPS_ROLE dmlc_role Dmlc_Role DMLC_NODE_ROLE ROLE PS_ROLE",
		"DMLC_NUM_WORKER":   "DMLC_NUM_WORKERS DMLC_NUM_WROKER DMLC_NUMWORKER DMLC_WORKER_NUM DMLC_NUM_WRK STEPMESH_NUM_WORKER dmlc_num_worker DMLC_WORKERS NUM_WORKER",
		"DMLC_NUM_SERVER":   "DMLC_NUM_SERVERS DMLC_NUM_SEVRER DMLC_SERVER_NUM STEPAF_NUM_SERVER DMLC-NUM-SERVER PS_NUM_SERVER",
		"DMLC_PS_ROOT_URI":  "DMLC_PS_ROOT_URL DMLC_ROOT_URI PS_ROOT_URI STEPAF_PS_ROOT_URI DMLC_PS_ROOT_IP DMLC_PS_ROOT DMLC_PS_URI dmlc_ps_root_uri",
		"DMLC_PS_ROOT_PORT": "DMLC_PS_ROOT_PROT DMLC_PS_PORT DMLC_ROOT_PORT DMLC_PS_ROOTPORT DMLC_PS_ROOT_PORTS STEPMESH_ROOT_PORT DMLC_PS_ROOT_PRT",
	}
	for name, others := range tests {
		for other := range strings.FieldsSeq(others) {
			list := []string{"PATH=/bin", "ROLE_ARN=x", "NUM_GPUS=8", "PORT=80", "ROOT=/", "PS1=$"}
			for k, v := range good {
				if k == name {
					k = other
				}
				list = append(list, k+"="+v)
			}
			c, err := LoadFrom(FromList(list))
			if err == nil {
				err = c.Validate()
			}
			want := name + " is not set (" + other + "=" + strconv.Quote(good[name]) + " is, which nothing reads; did you mean " + name + "?): want "
			if got := errText(err); !strings.HasPrefix(got, want) || strings.Contains(got, "\n") {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		}
	}
	var list []string
	for k, v := range good {
		if k != "DMLC_ROLE" {
			list = append(list, k+"="+v)
		}
	}
	for _, stranger := range []string{"ROLE_ARN", "USER_ROLE", "DMLC_NUM_ATTEMPT", "DMLC_INTERFACE", "DMLC_NODE_RANK", "HOST"} {
		c := load(t, append(list, stranger+"=1")...)
		if got, want := errText(c.Validate()), "DMLC_ROLE is not set: want one of worker, server, scheduler, joint"; got != want {
			t.Errorf("%s: got %q, want %q", stranger, got, want)
		}
	}
}

// TestMisspeltBesideAnError: an error is followed by the misspelt names that may be its cause.
func TestMisspeltBesideAnError(t *testing.T) {
	c := load(t, "DMLC_ROLE=worker", "DMLC_NUM_WORKER=1", "DMLC_NUM_SERVER=1", "DMLC_PS_ROOT_URI=h", "DMLC_PS_ROOT_PORT=1", "STEPMESH_GPU=1", "DMLC_GROUP_SIZ=2")
	want := `rank="1" (DMLC_GROUP_SIZE 1 * DMLC_NODE_RANK 0 + STEPMESH_GPU 1 + DMLC_RANK_OFFSET 0): want 0 to 0 for one of 1 worker instances (DMLC_NUM_WORKER 1 * DMLC_GROUP_SIZE 1)
DMLC_GROUP_SIZ is not a name that StepAF reads; did you mean DMLC_GROUP_SIZE?`
	if got := errText(c.Validate()); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	_, err := LoadFrom(FromList([]string{"PS_RESEND=true", "DMLC_GROUP_SIZ=2"}))
	want = `PS_RESEND="true": want 0 (off) or 1 (on); write 1
DMLC_GROUP_SIZ is not a name that StepAF reads; did you mean DMLC_GROUP_SIZE?`
	if got := errText(err); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestNamesOfHosts: quotes from a file of variables, references that a shell would have replaced, and the brackets of a
// URL are refused in a name.
func TestNamesOfHosts(t *testing.T) {
	for set, want := range map[string]string{
		`DMLC_PS_ROOT_URI="127.0.0.1"`: `DMLC_PS_ROOT_URI="\"127.0.0.1\"": want a host name or an address; write it without quotes`,
		"DMLC_NODE_HOST='node1'":       "want a host name or an address; write it without quotes",
		"DMLC_PS_ROOT_URI=${HOST}":     `DMLC_PS_ROOT_URI="${HOST}": want a host name or an address`,
		"DMLC_NODE_HOST=*":             "want a host name or an address",
		"DMLC_PS_ROOT_URI=[fe80::1]":   `DMLC_PS_ROOT_URI="[fe80::1]": want a host name or an address; write it without brackets`,
		`DMLC_INTERFACE="eth0"`:        "want the name of a network interface, or auto; write it without quotes",
		"DMLC_PS_ROOT_URI=node-1_a.b":  "",
		"DMLC_NODE_HOST=fe80::1%eth0":  "",
	} {
		c, err := LoadFrom(FromList([]string{set}))
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(set, "=")
		got := ""
		for line := range strings.SplitSeq(errText(c.Validate()), "\n") {
			if strings.HasPrefix(line, name+"=") {
				got = line
			}
		}
		if got == "" != (want == "") || !strings.HasSuffix(got, want) {
			t.Errorf("%s: %q, want it to end with %q", set, got, want)
		}
	}
}

// TestMisspeltValues: if a value resembles an allowed one, or is an allowed one in quotes or with a unit, the error says so.
func TestMisspeltValues(t *testing.T) {
	for set, want := range map[string]string{
		"DMLC_ROLE=workers":          "did you mean worker?",
		"DMLC_ROLE=Server":           "did you mean server?",
		"DMLC_ROLE=sched":            "did you mean scheduler?",
		"DMLC_ROLE=shceduler":        "did you mean scheduler?",
		`DMLC_ROLE="worker"`:         "write it without quotes",
		"DMLC_NUM_WORKER='2'":        "write it without quotes",
		`PS_RESEND="1"`:              "write it without quotes",
		`DMLC_ENABLE_RDMA="zmq"`:     "write it without quotes",
		"STEPAF_START_TIMEOUT=5m":    "write 300",
		"PS_RESEND_TIMEOUT=2s":       "write 2000",
		"PS_RESEND_TIMEOUT=1us":      "a whole number of milliseconds from 1 to 86400000",
		"DMLC_ROLE=clerk":            "want one of worker, server, scheduler, joint",
		"DMLC_ENABLE_RDMA=ibverbs!":  "did you mean ibverbs?",
		"DMLC_PS_VAN_TYPE=0mq":       "did you mean zmq?",
		"BYTEPS_ORDERED_HOSTS=a,b,a": "a is there twice",
	} {
		_, err := LoadFrom(FromList([]string{set}))
		if got := errText(err); !strings.HasSuffix(got, want) {
			t.Errorf("%s: %q, want it to end with %q", set, got, want)
		}
	}
	for _, x := range []struct{ s, want string }{{"ibverb", "ibverbs"}, {"ibv", "ibverbs"}, {"zqm", "zmq"}, {"zmqp", "zmq"}, {"ucx", ""}, {"shm", ""}, {"", ""}} {
		want := ""
		if x.want != "" {
			want = "; did you mean " + x.want + "?"
		}
		if got := DidYouMean(x.s, vanWords); got != want {
			t.Errorf("%s: %q, want %q", x.s, got, want)
		}
	}
}

// TestErrorsAreInvalid: programs recognize an invalid setting by van.ErrInvalid.
func TestErrorsAreInvalid(t *testing.T) {
	_, err := LoadFrom(FromList([]string{"DMLC_ROLE=x"}))
	if !errors.Is(err, ErrInvalid) || !errors.Is(Default().Validate(), ErrInvalid) {
		t.Errorf("%v and %v, want both to be ErrInvalid", err, Default().Validate())
	}
}

// Variables of launch scripts, builds, trackers and consumers are never taken for misspelled ones.
func TestStrangersAreSilent(t *testing.T) {
	names := strings.Fields(`ROLE RNIC BIN NUM_WORKER NUM_SERVER NODE_RANK SCHEDULER_IP BINARY SCHEDULER_BIN SERVER_BIN WORKER_BIN USER
		CUDA_HOME LD_LIBRARY_PATH NCCL_DEBUG STEPMESH_DROP_RATE USE_CUDA USE_RDMA USE_GDR ENABLE_TRACE USE_FABRIC FABRIC_PATH USE_UCX
		UCX_PATH USE_TP TP_INSTALL_PATH USE_KEY32 ASAN CXX DEPS_PATH PROTOC ADD_CFLAGS config WGET ZMQ_URL DMLC_NUM_ATTEMPT
		DMLC_TRACKER_URI DMLC_TRACKER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES
		GPU_VENDOR STEPMESH_CONNECTOR_DEBUG STEPMESH_SCHEDULER_STARTED MLC_INTERFACE AFD_SIZE SGLANG_AFD_X TORCH_CPP_LOG_LEVEL`)
	var list []string
	for _, n := range names {
		list = append(list, n+"=1")
	}
	if c := load(t, list...); len(c.Warnings)+len(c.Notes)+len(c.Unknown()) != 0 {
		t.Errorf("warnings %q, notes %q", c.Warnings, c.Notes)
	}
}

func TestDistance(t *testing.T) {
	tests := []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"", "abc", 3}, {"abc", "abc", 0}, {"abc", "acb", 1}, {"abcd", "badc", 2}, {"kitten", "sitting", 3}, {"ab", "b", 1}}
	for _, tt := range tests {
		if got := distance(tt.a, tt.b); got != tt.want {
			t.Errorf("%q to %q: %d, want %d", tt.a, tt.b, got, tt.want)
		}
		if got := distance(tt.b, tt.a); got != tt.want {
			t.Errorf("%q to %q: %d, want %d", tt.b, tt.a, got, tt.want)
		}
	}
}

func TestOriginAndEnviron(t *testing.T) {
	c := load(t, "DMLC_ROLE=worker", "STEPAF_GPU=2", "DMLC_PS_VAN_TYPE=ibverbs", "DMLC_GROUP_SIZE=1", "PS_HEARTBEAT_INTERVAL=5")
	c.NumWorkers = 4
	c.Verbose = 1
	c.HeartbeatInterval = 1
	for name, want := range map[string]string{
		"DMLC_ROLE": "environment", "STEPMESH_GPU": "STEPAF_GPU", "DMLC_ENABLE_RDMA": "DMLC_PS_VAN_TYPE", "DMLC_PS_VAN_TYPE": "environment",
		"DMLC_NUM_WORKER": "set by the program", "PS_VERBOSE": "set by the program", "DMLC_NUM_SERVER": "default", "no such name": "default",
		"DMLC_GROUP_SIZE": "environment",
	} {
		if got := c.Origin(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	want := []string{"DMLC_ROLE=worker", "DMLC_NUM_WORKER=4", "DMLC_GROUP_SIZE=1", "DMLC_ENABLE_RDMA=ibverbs", "PS_HEARTBEAT_INTERVAL=1", "PS_VERBOSE=1", "STEPMESH_GPU=2"}
	if got := c.Environ(); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	// A transport that the program takes back must reach the child, too.
	c.VanType = "zmq"
	if got := c.Environ(); !slices.Contains(got, "DMLC_ENABLE_RDMA=zmq") {
		t.Errorf("got %q", got)
	}
	by := Default()
	by.Role = "server"
	if got := by.Environ(); !slices.Equal(got, []string{"DMLC_ROLE=server"}) || by.Origin("DMLC_ROLE") != "set by the program" {
		t.Errorf("got %q", got)
	}
}

func TestStrip(t *testing.T) {
	got := Strip([]string{"HOME=/", "STEPAF_GPU=1", "DMLC_ROLE=worker", "DMLC_PS_VAN_TYPE=zmq", "DMLC_TRACKER_URI=x", "=odd"})
	if want := []string{"HOME=/", "DMLC_TRACKER_URI=x", "=odd"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTable(t *testing.T) {
	c := load(t, "PS_VERBOSE=2")
	list := c.Table()
	if len(list) != len(table) {
		t.Fatalf("%d lines for %d rows", len(list), len(table))
	}
	i := slices.IndexFunc(list, func(e Effective) bool { return e.Name == "PS_VERBOSE" })
	e := list[i]
	if e.Value != "2" || e.Origin != "environment" || e.Default != "0" || e.Kind != Int || e.Allowed != "-1 to 1000" || e.Help == "" || e.Topic != "Logs and profiles" {
		t.Errorf("%+v", e)
	}
}

func TestCore(t *testing.T) {
	// Cores of the original's formula for S=48, C=5: B=10 with o=0..4, then B=15
	// with o=2..4.
	want := [8][8]int{
		{10, 11, 12, 13, 14, 17, 18, 19},
		{15, 16, 17, 18, 19, 22, 23, 24},
		{34, 35, 36, 37, 38, 41, 42, 43},
		{39, 40, 41, 42, 43, 46, 47, 48},
		{58, 59, 60, 61, 62, 65, 66, 67},
		{63, 64, 65, 66, 67, 70, 71, 72},
		{82, 83, 84, 85, 86, 89, 90, 91},
		{87, 88, 89, 90, 91, 94, 95, 96},
	}
	c := Default()
	for gpu, row := range want {
		c.GPU = gpu
		var got [8]int
		for o := range 5 {
			c.CPUStartOffset = 10
			got[o] = c.Core(o)
			if o >= 2 {
				c.CPUStartOffset = 15
				got[o+3] = c.Core(o)
			}
		}
		if got != row {
			t.Errorf("gpu %d: %v, want %v", gpu, got, row)
		}
	}
	c = Default()
	if got := c.Core(9); got != 14 {
		t.Errorf("offset beyond the cores of a GPU: %d, want 14", got)
	}
	if c.GPU = -1; c.Core(1) != -1 {
		t.Errorf("no GPU: %d, want -1", c.Core(1))
	}
	c.GPU, c.CPUCoresPerSocket, c.CPUCoresPerGPU = 6, 33, 3
	if got := c.Core(0); got != 6*3+10+16*3-18 { // 33/2 is 16
		t.Errorf("odd socket: %d", got)
	}
}
