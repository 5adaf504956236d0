package env

// MaxInstances is how many instances of a role a cluster may have: 2*rank+9 must fit 15
// bits on the wire.
const MaxInstances = 16379

const (
	maxInt = 1<<31 - 1
	day    = 24 * 60 * 60
)

// table has one row for each variable that has a place in Config, in the order
// of the documentation. It is never written to.
var table = []variable{
	{
		name: "DMLC_ROLE", topic: cluster, kind: Enum, words: roles, needed: true, readers: "all",
		field:   func(c *Config) any { return &c.Role },
		help:    "What this process is. `joint` is one worker and one server instance in one process; only Go programs can start it.",
		differs: "`joint` is refused by the Python module instead of crashing later.",
	}, {
		name: "DMLC_NUM_WORKER", topic: cluster, kind: Int, min: 1, max: MaxInstances, needed: true, readers: "all",
		field:   func(c *Config) any { return &c.NumWorkers },
		help:    "Number of worker groups. The cluster has this many times `DMLC_GROUP_SIZE` worker instances. Must be the same in every process.",
		differs: "No limit of 31 groups.",
	}, {
		name: "DMLC_NUM_SERVER", topic: cluster, kind: Int, min: 1, max: MaxInstances, needed: true, readers: "all",
		field:   func(c *Config) any { return &c.NumServers },
		help:    "Number of server groups, counted like `DMLC_NUM_WORKER`. Must be the same in every process.",
		differs: "0 is refused at once, not at the first request.",
	}, {
		name: "DMLC_GROUP_SIZE", topic: cluster, kind: Int, min: 1, max: MaxInstances, def: "1", readers: "all",
		field: func(c *Config) any { return &c.GroupSize },
		help:  "Instances of each group, one process each. Instance i of a worker group talks to instance i of each server group.",
	}, {
		name: "DMLC_NODE_RANK", topic: cluster, kind: Int, min: 0, max: MaxInstances - 1, none: -1, defNote: "0", readers: "workers, servers",
		field:   func(c *Config) any { return &c.NodeRank },
		help:    "Rank of this group within its role. The instance's rank is `DMLC_GROUP_SIZE * DMLC_NODE_RANK + STEPMESH_GPU + DMLC_RANK_OFFSET`.",
		differs: "The resulting rank is checked before anything is connected.",
	}, {
		name: "DMLC_RANK_OFFSET", topic: cluster, kind: Int, min: -MaxInstances, max: MaxInstances, def: "0", readers: "workers, servers",
		field:   func(c *Config) any { return &c.RankOffset },
		help:    "Added to the rank. Its use: a group of one on GPU k needs -k.",
		differs: "Does not break stopping, and an offset never changes which device is used.",
	}, {
		name: "DMLC_INSTANCE_ID", topic: cluster, kind: Int, min: 0, max: MaxInstances - 1, none: -1, defNote: "rank mod `DMLC_GROUP_SIZE`", readers: "workers, servers",
		field:   func(c *Config) any { return &c.InstanceID },
		help:    "Index of this instance in its group. Only one value is right, so leave it unset.",
		differs: "Any value but rank mod `DMLC_GROUP_SIZE` is an error.",
	}, {
		name: "STEPAF_CLUSTER_ID", topic: cluster, kind: String, readers: "all",
		field:   func(c *Config) any { return &c.ClusterID },
		help:    "Name of the cluster, equal on all nodes. Nodes with another name are refused, and C++ nodes unless `STEPAF_FOREIGN=1`. Identifies nodes after a scheduler restart.",
		defNote: "the scheduler makes one up",
		differs: "New.",
	}, {
		name: "STEPAF_FOREIGN", topic: cluster, kind: Switch, def: "0", readers: "all",
		field:   func(c *Config) any { return &c.Foreign },
		help:    "1: C++ nodes may join a cluster with a `STEPAF_CLUSTER_ID`, and a C++ scheduler may use other addresses. Any process can pretend to be one.",
		differs: "New.",
	},

	{
		name: secretFile, topic: trust, kind: Path, readers: "all",
		field:   func(c *Config) any { return &c.SecretFile },
		help:    "File with the cluster's secret, the same on all nodes (`stepaf secret` makes one). Mode 0600 or 0400, owned by the process's user.",
		differs: "New.",
	}, {
		name: secret, topic: trust, kind: Hidden, readers: "all",
		field:   func(c *Config) any { return &c.Secret },
		help:    "The secret itself, 16 to 4096 bytes, if there is no file. Other processes of the same user can read a process's environment.",
		differs: "New.",
	}, {
		name: authMode, topic: trust, kind: Enum, words: []string{AuthOff, AuthWarn, AuthRequire}, readers: "all",
		defNote: "`require` with a secret, else `off`",
		field:   func(c *Config) any { return &c.Auth },
		help:    "`require`: only peers with a proof. `warn`: peers without proof are admitted, counted and logged. `off`: no proofs. C++ nodes need `warn` or `off` (plaintext).",
		differs: "New.",
	}, {
		name: tlsSwitch, topic: trust, kind: Switch, def: "0", readers: "all",
		field:   func(c *Config) any { return &c.TLS },
		help:    "1: TLS 1.3 for data over TCP, with keys of the secret. Needs `STEPAF_AUTH=require`. The same on all nodes. Not with ibverbs.",
		differs: "New.",
	},

	{
		name: "DMLC_PS_ROOT_URI", topic: addresses, kind: String, needed: true, readers: "all", check: checkHost,
		field:   func(c *Config) any { return &c.RootURI },
		help:    "Host name or address of the scheduler, without port.",
		differs: "Names are resolved. Multicast addresses are errors. With `0.0.0.0` the scheduler listens on every address; nodes of its host may have it, too.",
	}, {
		name: "DMLC_PS_ROOT_PORT", topic: addresses, kind: Int, min: 1, max: 65535, needed: true, readers: "all",
		field: func(c *Config) any { return &c.RootPort },
		help:  "Port of the scheduler. Outside of `net.ipv4.ip_local_port_range` no other program gets it by chance.",
	}, {
		name: "DMLC_NODE_HOST", topic: addresses, kind: String, readers: "workers, servers; all with ibverbs", check: checkHost,
		defNote: "found, see `DMLC_INTERFACE`",
		field:   func(c *Config) any { return &c.NodeHost },
		help:    "Host name or address under which the others reach this node. Must be one of this machine's.",
		differs: "Names are resolved; empty is the same as unset. Addresses that name no host, such as `0.0.0.0`, are errors.",
	}, {
		name: "DMLC_INTERFACE", topic: addresses, kind: String, readers: "workers, servers", check: checkInterface,
		defNote: "the one that leads to `DMLC_PS_ROOT_URI`; ibverbs: if it is no active RDMA port, the first that is",
		field:   func(c *Config) any { return &c.Interface },
		help:    "Interface whose address is advertised if `DMLC_NODE_HOST` is unset. `auto` with ibverbs: the one nearest to the GPU, before `DMLC_NODE_HOST`; with zmq: unset.",
		differs: "A name works (original: `failed to get ip`). `auto` falls back to `DMLC_NODE_HOST`. The original's default is the first interface that is not loopback.",
	}, {
		name: "DMLC_PORT", topic: addresses, kind: Int, min: 0, max: 65535, defNote: "0, any free port", readers: "workers, servers",
		field:   func(c *Config) any { return &c.Port },
		help:    "Port to listen on. If it is taken, or is the scheduler's on this host, a free one is used, with a warning.",
		differs: "No random ports between 10000 and 49999.",
	}, {
		name: "DMLC_NUM_PORTS", topic: addresses, kind: Int, min: 1, max: 32, def: "1", readers: "workers, servers",
		field: func(c *Config) any { return &c.NumPorts },
		help:  "Ports of a node. zmq and ibverbs need 1.",
	}, {
		name: "DMLC_LOCAL", topic: addresses, kind: Switch, def: "0", readers: "zmq",
		field:   func(c *Config) any { return &c.Local },
		help:    "Use Unix sockets `/tmp/<port>` instead of TCP. All nodes must be on one machine and agree.",
		differs: "A dead socket file is removed, a living one is an error, ours is removed at the end.",
	}, {
		name: "DMLC_USE_KUBERNETES", topic: addresses, kind: Switch, def: "0", readers: "scheduler",
		field: func(c *Config) any { return &c.Kubernetes },
		help:  "The scheduler listens on every address, because `DMLC_PS_ROOT_URI` is not its own. On for values above 0.",
	},

	{
		name: "DMLC_ENABLE_RDMA", topic: transport, kind: Enum, words: vanWords, def: "zmq", readers: "all", check: checkVan,
		field:   func(c *Config) any { return &c.VanType },
		help:    "Transport of the whole cluster, scheduler included. `0` is zmq, `1` is ibverbs (deprecated).",
		differs: "Any case; empty is the same as unset. A missing device is an error that names the fix.",
	}, {
		name: "DMLC_PS_VAN_TYPE", topic: transport, kind: Enum, words: vanWords, def: "zmq", readers: "all", check: checkVan,
		field:   func(c *Config) any { return &c.VanType },
		help:    "The same, read only when `DMLC_ENABLE_RDMA` is unset.",
		differs: "A warning when both are set and differ.",
	}, {
		name: "BYTEPS_ZMQ_MAX_SOCKET", topic: transport, kind: Int, min: 1, max: 65535, def: "1024", readers: "zmq",
		field:   func(c *Config) any { return &c.ZMQMaxSockets },
		help:    "Most sockets that libzmq may open.",
		differs: "Failure to set it is reported.",
	}, {
		name: "BYTEPS_ZMQ_NTHREADS", topic: transport, kind: Int, min: 1, max: 64, def: "4", readers: "zmq",
		field:   func(c *Config) any { return &c.ZMQIOThreads },
		help:    "Threads that libzmq uses for input and output.",
		differs: "Failure to set it is reported.",
	}, {
		name: "BYTEPS_ENABLE_IPC", topic: transport, kind: Switch, none: -1, defNote: "unset", readers: "all",
		field:   func(c *Config) any { return &c.EnableIPC },
		help:    "Shared memory for data between nodes of one machine, of one user, that all run this library. Unset or 1: where it works. 0: never.",
		differs: "Does not need segments made by BytePS.",
	}, {
		name: "STEPAF_DATA", topic: transport, kind: Enum, words: dataWords, def: DataTCP, readers: "zmq",
		field:   func(c *Config) any { return &c.Data },
		help:    "Path of data between native nodes that shared memory does not reach. `tcp`: fast, on a data port. `zmq`: as to C++ nodes.",
		differs: "New.",
	},

	{
		name: "STEPAF_QP_NUM", topic: rdma, kind: Int, min: 1, max: 2, def: "2", readers: "ibverbs",
		field:   func(c *Config) any { return &c.QPNum },
		help:    "Queue pairs of each connection. Must be the same on all nodes.",
		differs: "Read at start, not when the library is loaded. A peer with another count is an error, not a hang.",
	}, {
		name: "STEPMESH_SPLIT_QP_LAG", topic: rdma, kind: Int, min: 0, max: 1, def: "0", readers: "ibverbs",
		field:   func(c *Config) any { return &c.SplitQPLag },
		help:    "Spread every value over the queue pairs and these over the ports of a bonded NIC. The sender decides.",
		differs: "Failure to set the port is a log line at level 1. Values below 8 KiB are not split.",
	}, {
		name: "BYTEPS_RDMA_START_DEPTH", topic: rdma, kind: Int, min: 1, max: 1 << 16, defNote: "128; scheduler 256", readers: "ibverbs",
		field: func(c *Config) any { return &c.RDMAStartDepth },
		help:  "With RX_DEPTH the depth of the send queues of each connection, in work requests.",
	}, {
		name: "BYTEPS_RDMA_RX_DEPTH", topic: rdma, kind: Int, min: 1, max: 1 << 16, defNote: "256; scheduler 16", readers: "ibverbs",
		field: func(c *Config) any { return &c.RDMARxDepth },
		help:  "Receive requests of each connection, shared among its queue pairs. Lower it when memory cannot be registered.",
	}, {
		name: "BYTEPS_RDMA_MAX_CONCURR_WR", topic: rdma, kind: Int, min: 1, max: 1 << 20, def: "4224", readers: "ibverbs",
		field:   func(c *Config) any { return &c.RDMAMaxConcurrWR },
		help:    "Messages that may wait for one peer, and the rest of a batch. At least START_DEPTH + 2 * RX_DEPTH.",
		differs: "That sum is computed with the depths in force. More are an error (`van.ErrQueueFull`). Completion queues grow with the connections.",
	}, {
		name: "BYTEPS_ADDRESS_POOL_SIZE", topic: rdma, kind: Int, min: 1, max: 32768, def: "10240", readers: "ibverbs",
		field:   func(c *Config) any { return &c.AddressPoolSize },
		help:    "Receive slots: memory that this node gives to its peers to write to.",
		differs: "Towards our nodes their number follows what is in flight, not the keys. Those of control messages come back.",
	}, {
		name: "BYTEPS_PRINT_RDMA_LOG", topic: rdma, kind: Switch, def: "0", readers: "ibverbs",
		field:   func(c *Config) any { return &c.PrintRDMALog },
		help:    "A log line at level 1 for each event of a connection and each failed attempt to connect.",
		differs: "In every build. Messages are shown by `PS_VERBOSE=2`.",
	}, {
		name: "STEPAF_RDMA_ACK_TIMEOUT", topic: rdma, kind: Int, min: 10, max: 22, def: "15", readers: "ibverbs",
		field:   func(c *Config) any { return &c.RDMAAckTimeout },
		help:    "n: a write without acknowledgement for 4.096 us * 2^n is repeated, 6 times; then the peer is lost. 15: 1 s; 17: 4 s.",
		differs: "New.",
	},

	{
		name: "PS_RESEND", topic: reliability, kind: Switch, def: "0", readers: "all",
		field:   func(c *Config) any { return &c.Resend },
		help:    "Acknowledge every message, and send unacknowledged messages again. Must be the same on all nodes.",
		differs: "The scheduler refuses a node of ours with another value. After 10 tries the request fails, not the process. Its memory is bounded.",
	}, {
		name: "PS_RESEND_TIMEOUT", topic: reliability, kind: Milliseconds, min: 1, max: day * 1000, def: "1000", readers: "all",
		field: func(c *Config) any { return &c.ResendTimeout },
		help:  "The k-th try follows k times this after the first.",
	}, {
		name: "PS_DROP_MSG", topic: reliability, kind: Percent, min: 0, max: 100, def: "0", readers: "all",
		field:   func(c *Config) any { return &c.DropMsg },
		help:    "For tests: share of received messages that is thrown away. Needs `PS_RESEND=1`.",
		differs: "Each message is drawn on its own; the seed is logged.",
	}, {
		name: "PS_HEARTBEAT_INTERVAL", topic: reliability, kind: Seconds, min: 0, max: day, none: -1, defNote: "2 towards a scheduler of this library, else 0", readers: "all",
		field:   func(c *Config) any { return &c.HeartbeatInterval },
		help:    "Time between heartbeats to the scheduler, and of libzmq to all nodes (at least four in PS_HEARTBEAT_TIMEOUT). 0: none.",
		differs: "On by default between our nodes. Stopping does not wait for it.",
	}, {
		name: "PS_HEARTBEAT_TIMEOUT", topic: reliability, kind: Seconds, min: 0, max: day, none: -1, defNote: "10, or 3 times the interval if that is set; nodes that send none are not missed", readers: "all",
		field:   func(c *Config) any { return &c.HeartbeatTimeout },
		help:    "A node silent for longer is dead and can be replaced, unless its thread still answers probes. 0: never dead. Must exceed the interval.",
		differs: "On by default between our nodes. A dead peer fails the requests that need it.",
	}, {
		name: "STEPAF_START_TIMEOUT", topic: reliability, kind: Seconds, min: 1, max: 7 * day, def: "300", readers: "all",
		field:   func(c *Config) any { return &c.StartTimeout },
		help:    "How long starting waits for the other nodes, its barrier included.",
		differs: "New; the original waits forever.",
	}, {
		name: "STEPAF_STOP_TIMEOUT", topic: reliability, kind: Seconds, min: 1, max: 7 * day, def: "30", readers: "workers",
		field:   func(c *Config) any { return &c.StopTimeout },
		help:    "How long a worker's stopping waits for the other nodes. Servers and the scheduler wait for the workers that live.",
		differs: "New; the original waits forever.",
	}, {
		name: "STEPAF_BARRIER_TIMEOUT", topic: reliability, kind: Seconds, min: 1, max: 7 * day, def: "3600", readers: "all",
		field:   func(c *Config) any { return &c.BarrierTimeout },
		help:    "How long a barrier that a program asks for waits for the other nodes.",
		differs: "New; the original waits forever.",
	}, {
		name: "STEPAF_REPLACE_TIMEOUT", topic: reliability, kind: Seconds, min: 0, max: day, def: "10", readers: "all",
		field:   func(c *Config) any { return &c.ReplaceTimeout },
		help:    "How long a barrier waits for the scheduler, or for replacements if only dead nodes are missing. Nodes that fell silent meanwhile are not waited for.",
		differs: "New; the original waits forever.",
	},

	{
		name: "STEPAF_RECV_BUDGET_PEER", topic: budgets, kind: Size, min: 1 << 20, max: 1 << 40, def: "256M", readers: "workers, servers",
		field:   func(c *Config) any { return &c.RecvBudgetPeer },
		help:    "Bytes of one peer queued for the application. At the limit the peer is not read (over ZeroMQ a server reads on), and its unfinished batches fail.",
		differs: "New; the original keeps everything.",
	}, {
		name: "STEPAF_RECV_BUDGET", topic: budgets, kind: Size, min: 1 << 20, max: 1 << 40, def: "1G", readers: "workers, servers",
		field:   func(c *Config) any { return &c.RecvBudget },
		help:    "The same for all peers together, counted for each transport separately; registered buffers do not count. A batch larger than this and `STEPAF_RECV_BUDGET_PEER` fails.",
		differs: "New; the original keeps everything.",
	}, {
		name: "STEPAF_SEND_BUDGET", topic: budgets, kind: Size, min: 1 << 20, max: 1 << 40, def: "256M", readers: "all",
		field:   func(c *Config) any { return &c.SendBudget },
		help:    "Bytes that may be queued for one peer. Below it, a request of any length is accepted; at the limit sending fails (`ErrQueueFull`).",
		differs: "New; the original keeps everything, or aborts.",
	}, {
		name: "STEPAF_STRANGER_BUDGET", topic: budgets, kind: Size, min: 1 << 16, max: 1 << 30, def: "16M", readers: "all",
		field:   func(c *Config) any { return &c.StrangerBudget },
		help:    "Bytes of messages that this node keeps for unauthenticated connections. Their number is limited, too.",
		differs: "New.",
	}, {
		name: "STEPAF_SHM_BUDGET", topic: budgets, kind: Size, min: 1 << 20, max: 1 << 40, def: "256M", readers: "workers, servers",
		field:   func(c *Config) any { return &c.SHMBudget },
		help:    "Shared memory for data to peers of this host: 256 KiB to 2 MiB each. Beyond it, data uses the other transport.",
		differs: "New.",
	}, {
		name: "STEPAF_RDMA_PEER_BUDGET", topic: budgets, kind: Size, min: 1 << 20, max: 1 << 40, def: "1G", readers: "ibverbs",
		field:   func(c *Config) any { return &c.RDMAPeerBudget },
		help:    "Bytes that this node registers for one peer's writes, without the application's buffers. Unused slots are reclaimed; a larger value fails at its sender.",
		differs: "New; the original registers all requested memory.",
	}, {
		name: "STEPAF_RDMA_BUDGET", topic: budgets, kind: Size, min: 1 << 20, max: 1 << 40, def: "16G", readers: "ibverbs",
		field:   func(c *Config) any { return &c.RDMABudget },
		help:    "The same for all peers. At the limit, a request waits up to 20 s for unused slots; then, or if larger, it is refused.",
		differs: "New.",
	},

	{
		name: "PS_VERBOSE", topic: logging, kind: Int, min: -1, max: 1000, def: "0", readers: "all",
		field:   func(c *Config) any { return &c.Verbose },
		help:    "-1 nothing, 0 warnings and errors, 1 connection set-up too, 2 every message, 3 and more in greater detail.",
		differs: "Read at start, not when the library is loaded. Lines appear also without `DMLC_ROLE` or `STEPMESH_GPU`, and never mix.",
	}, {
		name: "ENABLE_PROFILING", topic: logging, kind: Switch, def: "0", readers: "workers, servers",
		field:   func(c *Config) any { return &c.Profiling },
		help:    "Write a line with key, operation and time for each data message received.",
		differs: "The file name has the right role.",
	}, {
		name: "PROFILE_PATH", topic: logging, kind: Path, readers: "workers, servers",
		defNote: "`pslite_profile_van_<role>_<time>` in the working directory",
		field:   func(c *Config) any { return &c.ProfilePath },
		help:    "Start of the profile's file name; `_van_worker` or `_van_server` follows.",
		differs: "If another node of the host writes that file, `_` and the process's number follow too. The log names the file.",
	},

	{
		name: "STEPMESH_BAKCEND", aliases: []string{"STEPMESH_BACKEND", "STEPAF_BACKEND"}, topic: devices, kind: String, readers: "workers, servers; the scheduler if set", check: checkBackend,
		defNote: "`GPU` if the build and the machine have one, else `CPU`",
		field:   func(c *Config) any { return &c.Backend },
		help:    "Where tensors live: `CPU`, `GPU`, or the name under which a program has registered its own device.",
		differs: "The right spelling works too. Any case. Default depends on the machine.",
	}, {
		name: "STEPMESH_GPU", aliases: []string{"STEPAF_GPU"}, topic: devices, kind: Int, min: 0, max: MaxInstances - 1, def: "0", readers: "workers, servers",
		field:   func(c *Config) any { return &c.GPU },
		help:    "Device of this process, and part of its rank (see `DMLC_NODE_RANK`).",
		differs: "Never required. Bounded by the devices present, not by 7.",
	}, {
		name: "STEPMESH_MEM_SYNC", aliases: []string{"STEPAF_MEM_SYNC"}, topic: devices, kind: Switch, def: "1", readers: "GPU backend",
		field: func(c *Config) any { return &c.MemSync },
		help:  "1: notice the end of GPU work by a word that the stream writes to host memory. 0: by asking the event.",
	}, {
		name: "STEPMESH_BIND_CPU_CORE", topic: devices, kind: Switch, def: "0", readers: "workers, servers",
		field:   func(c *Config) any { return &c.BindCPUCore },
		help:    "Bind the threads on the fast path to one core each, see below.",
		differs: "A core that the process may not use gives a warning.",
	}, {
		name: "STEPMESH_CPU_CORES_PER_SOCKET", topic: devices, kind: Int, min: 1, max: 4096, def: "48", readers: "workers, servers",
		field: func(c *Config) any { return &c.CPUCoresPerSocket },
		help:  "S in the formula below.",
	}, {
		name: "STEPMESH_CPU_CORES_PER_GPU", topic: devices, kind: Int, min: 1, max: 4096, def: "5", readers: "workers, servers",
		field: func(c *Config) any { return &c.CPUCoresPerGPU },
		help:  "C in the formula below.",
	}, {
		name: "STEPMESH_CPU_START_OFFSET", topic: devices, kind: Int, min: 0, max: 65535, def: "10", readers: "workers, servers",
		field: func(c *Config) any { return &c.CPUStartOffset },
		help:  "B in the formula below. Give two processes on one GPU different values.",
	}, {
		name: "STEPAF_BUSY_POLL_ENABLE", topic: devices, kind: Switch, readers: "all",
		defNote: "spin, then sleep: shared memory and GPUs 50 µs, with 8 processors or more 250 µs; zmq (ZeroMQ, TCP) 400 µs; ibverbs 1 ms",
		field:   func(c *Config) any { return &c.BusyPoll },
		help:    "1: waiting threads spin forever. 0: they sleep at once.",
		differs: "Unset: spin, then sleep; no spinning for up to a second while other programs keep the cores busy (not with ibverbs).",
	},

	{
		name: "BYTEPS_ORDERED_HOSTS", topic: ranks, kind: List, readers: "scheduler", check: checkHosts,
		field:   func(c *Config) any { return &c.OrderedHosts },
		help:    "`ip[:port],ip[:port]`: ranks follow the order of hosts here. Every host must be listed, once.",
		differs: "A host that is not listed is an error.",
	},

	{
		name: "BENCHMARK_ITER", topic: programs, kind: Int, min: 0, max: maxInt, def: "10000", readers: "benchmarks",
		field:   func(c *Config) any { return &c.Bench.Iterations },
		help:    "Rounds to run; 0 is endless.",
		differs: "Finite by default.",
	}, {
		name: "BENCHMARK_SIZE", topic: programs, kind: Int, min: 1, max: maxInt, def: "7168", readers: "benchmarks",
		field: func(c *Config) any { return &c.Bench.Size },
		help:  "Tensor length: bf16 elements, bytes in the register test.",
	}, {
		name: "BENCHMARK_WARMUP", topic: programs, kind: Int, min: 0, max: maxInt, def: "10", readers: "benchmarks",
		field:   func(c *Config) any { return &c.Bench.Warmup },
		help:    "Rounds before measuring begins.",
		differs: "Has an effect.",
	}, {
		name: "UTEST_WORKER_BATCH_MAX", topic: programs, kind: Int, min: 2, max: 32768, def: "128", readers: "ut_tensor_worker",
		field: func(c *Config) any { return &c.Bench.BatchMax },
		help:  "Batches of 1 to this minus 1 are tested.",
	}, {
		name: "UTEST_WORKER_TENSOR_NUM", topic: programs, kind: Int, min: 1, max: 65535, def: "1", readers: "ut_tensor_worker",
		field: func(c *Config) any { return &c.Bench.Tensors },
		help:  "Tensors pushed with each batch.",
	},
}
