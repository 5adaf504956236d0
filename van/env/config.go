package env

// Config: every setting of a node as a typed field, and values derived from several.

import (
	"cmp"
	"log/slog"
	"runtime"
	"time"
)

// Config is the configuration of one node, read once from the environment by
// Load or filled by hand (start from Default). Every field names its variable;
// the table in table.go has types, ranges and help.
type Config struct {
	// Cluster shape and identity.
	Role       string // DMLC_ROLE: "worker", "server", "scheduler", "joint"
	NumWorkers int    // DMLC_NUM_WORKER: worker groups
	NumServers int    // DMLC_NUM_SERVER: server groups
	GroupSize  int    // DMLC_GROUP_SIZE: instances of a group, at least 1
	NodeRank   int    // DMLC_NODE_RANK: group rank; -1 when unset
	RankOffset int    // DMLC_RANK_OFFSET
	InstanceID int    // DMLC_INSTANCE_ID; -1 when unset
	ClusterID  string // STEPAF_CLUSTER_ID: a name for the cluster
	Foreign    bool   // STEPAF_FOREIGN: nodes of C++ StepMesh may be in a cluster with a name

	// Admission to the cluster.
	SecretFile string // STEPAF_SECRET_FILE: a file with the cluster's secret
	Secret     Secret // STEPAF_SECRET: the secret itself
	Auth       string // STEPAF_AUTH: AuthOff, AuthWarn or AuthRequire; "" see AuthMode
	TLS        bool   // STEPAF_TLS: data over TCP is encrypted

	// Addresses.
	RootURI    string // DMLC_PS_ROOT_URI: scheduler host
	RootPort   int    // DMLC_PS_ROOT_PORT
	NodeHost   string // DMLC_NODE_HOST: host to advertise
	Interface  string // DMLC_INTERFACE: a name, or "auto"
	Port       int    // DMLC_PORT: first port to try; 0 any
	NumPorts   int    // DMLC_NUM_PORTS
	Local      bool   // DMLC_LOCAL: ipc instead of TCP
	Kubernetes bool   // DMLC_USE_KUBERNETES: the scheduler binds every address

	// Transport.
	VanType       string // DMLC_ENABLE_RDMA, else DMLC_PS_VAN_TYPE: "zmq", "ibverbs", ...
	ZMQMaxSockets int    // BYTEPS_ZMQ_MAX_SOCKET
	ZMQIOThreads  int    // BYTEPS_ZMQ_NTHREADS
	EnableIPC     int    // BYTEPS_ENABLE_IPC: 0 never, 1 yes, -1 unset
	SHMMap        bool   // STEPAF_SHM_MAP: map tensors of AllocShared instead of copying them
	Data          string // STEPAF_DATA: DataTCP or DataZMQ

	// RDMA.
	QPNum            int  // STEPAF_QP_NUM
	SplitQPLag       bool // STEPMESH_SPLIT_QP_LAG
	RDMAStartDepth   int  // BYTEPS_RDMA_START_DEPTH; 0: by role
	RDMARxDepth      int  // BYTEPS_RDMA_RX_DEPTH; 0: by role
	RDMAMaxConcurrWR int  // BYTEPS_RDMA_MAX_CONCURR_WR
	AddressPoolSize  int  // BYTEPS_ADDRESS_POOL_SIZE
	PrintRDMALog     bool // BYTEPS_PRINT_RDMA_LOG
	RDMAAckTimeout   int  // STEPAF_RDMA_ACK_TIMEOUT: exponent, 4.096 us << it

	// Reliability and logs.
	Verbose           int           // PS_VERBOSE
	DropMsg           int           // PS_DROP_MSG: percent of received messages
	Resend            bool          // PS_RESEND
	ResendTimeout     time.Duration // PS_RESEND_TIMEOUT (ms)
	HeartbeatInterval time.Duration // PS_HEARTBEAT_INTERVAL (s); 0 off, -1 unset, see Heartbeats
	HeartbeatTimeout  time.Duration // PS_HEARTBEAT_TIMEOUT (s); 0 off, -1 unset, see Heartbeats
	Profiling         bool          // ENABLE_PROFILING
	ProfilePath       string        // PROFILE_PATH
	StartTimeout      time.Duration // STEPAF_START_TIMEOUT (s): how long Start waits for the others
	StopTimeout       time.Duration // STEPAF_STOP_TIMEOUT (s): how long Finalize waits for the others
	BarrierTimeout    time.Duration // STEPAF_BARRIER_TIMEOUT (s): how long a barrier waits for the others
	ReplaceTimeout    time.Duration // STEPAF_REPLACE_TIMEOUT (s): how long a barrier waits for replacements

	// Budgets, in bytes.
	RecvBudgetPeer int // STEPAF_RECV_BUDGET_PEER: of one peer, waiting for the application
	RecvBudget     int // STEPAF_RECV_BUDGET: of all peers
	SendBudget     int // STEPAF_SEND_BUDGET: to one peer, not sent yet
	StrangerBudget int // STEPAF_STRANGER_BUDGET: held for senders that are not members
	RDMAPeerBudget int // STEPAF_RDMA_PEER_BUDGET: registered for one peer
	SHMBudget      int // STEPAF_SHM_BUDGET: shared with peers of this host
	RDMABudget     int // STEPAF_RDMA_BUDGET: registered for all peers

	// Devices, threads, queues.
	Backend           string   // STEPMESH_BAKCEND: "CPU", "GPU", a registered name; "" choose
	GPU               int      // STEPMESH_GPU
	MemSync           bool     // STEPMESH_MEM_SYNC
	BindCPUCore       bool     // STEPMESH_BIND_CPU_CORE
	CPUCoresPerSocket int      // STEPMESH_CPU_CORES_PER_SOCKET
	CPUCoresPerGPU    int      // STEPMESH_CPU_CORES_PER_GPU
	CPUStartOffset    int      // STEPMESH_CPU_START_OFFSET
	BusyPoll          BusyPoll // STEPAF_BUSY_POLL_ENABLE

	// Scheduler.
	OrderedHosts []string // BYTEPS_ORDERED_HOSTS: ip or ip:port

	// Bench is for the test programs; nodes do not use it.
	Bench Bench

	// Warnings of Load: misspelt names, settings without effect. Start logs them once.
	Warnings []string

	// Notes are less important findings of Load, such as names that are set but empty.
	// Start logs them at level 1.
	Notes []string

	origins  map[string]string // of values that are not defaults
	loaded   map[string]string // all values after Load
	problems []problem         // values that Load refused
	misspelt []Suggestion
	meant    map[string]string // by required variable that is not set: the name that was set instead
}

// Values of Config.Data.
const (
	DataTCP = "tcp"
	DataZMQ = "zmq"
)

// Bench holds what the test programs and benchmarks read.
type Bench struct {
	Iterations int // BENCHMARK_ITER: 0 endless
	Size       int // BENCHMARK_SIZE: elements, bytes in the register test
	Warmup     int // BENCHMARK_WARMUP: rounds that are not measured
	BatchMax   int // UTEST_WORKER_BATCH_MAX: batches of 1 to BatchMax-1
	Tensors    int // UTEST_WORKER_TENSOR_NUM: tensors of a batch
}

// BusyPoll is how waits behave.
type BusyPoll int

// Ways to wait.
const (
	SpinThenBlock BusyPoll = iota // unset: spin for a bounded time, then block
	SpinForever                   // 1
	AlwaysBlock                   // 0
)

// How long a wait spins before it sleeps. A wake-up takes some 10 µs, in a virtual machine
// 50; on a machine with many processors a longer spin takes none from other work.
const (
	shortSpin = 50 * time.Microsecond
	longSpin  = 250 * time.Microsecond
	manyCPUs  = 8
)

// Spin returns how long a wait spins before it sleeps: 0 not at all, negative forever.
func (b BusyPoll) Spin() time.Duration {
	switch {
	case b == SpinForever:
		return -1
	case b == AlwaysBlock:
		return 0
	case runtime.NumCPU() >= manyCPUs:
		return longSpin
	default:
		return shortSpin
	}
}

// Heartbeats of nodes of this library when nothing is set.
const (
	heartbeatInterval = 2 * time.Second
	heartbeatTimeout  = 10 * time.Second
	heartbeatsMissed  = 3 // intervals that make a timeout, when only one of the two is set
)

// Heartbeats returns the time between two heartbeats and the silence after which a node is
// dead; 0 is none and never. A value that was not set itself applies only to nodes of this
// library.
func (c *Config) Heartbeats() (interval, timeout time.Duration) {
	interval, timeout = c.HeartbeatInterval, c.HeartbeatTimeout
	switch {
	case interval < 0 && timeout < 0:
		return heartbeatInterval, heartbeatTimeout
	case interval < 0 && timeout == 0:
		interval = 0
	case interval < 0:
		interval = min(heartbeatInterval, timeout/heartbeatsMissed)
	case timeout < 0:
		timeout = interval * heartbeatsMissed
	}
	return interval, timeout
}

// Rank returns the preferred instance rank of this process, GroupSize*NodeRank +
// GPU + RankOffset with a NodeRank of 0 when unset, as fserver computes it.
func (c *Config) Rank() int { return c.GroupSize*max(c.NodeRank, 0) + c.GPU + c.RankOffset }

// RDMADepths returns RDMAStartDepth and RDMARxDepth, or the defaults of the role.
func (c *Config) RDMADepths() (start, rx int) {
	start, rx = 128, 256
	if c.Role == roleScheduler {
		start, rx = 256, 16
	}
	return cmp.Or(c.RDMAStartDepth, start), cmp.Or(c.RDMARxDepth, rx)
}

// LogLevel maps PS_VERBOSE to slog: 0 shows warnings and errors, 1 adds
// connection set-up (info), 2 every message (debug), 3 and 4 more, -1 hides
// everything.
func (c *Config) LogLevel() slog.Level {
	switch {
	case c.Verbose < 0:
		return slog.Level(100)
	case c.Verbose == 0:
		return slog.LevelWarn
	case c.Verbose == 1:
		return slog.LevelInfo
	default:
		return slog.LevelDebug - slog.Level(4*(c.Verbose-2))
	}
}
