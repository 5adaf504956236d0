package env

// MaxInstances is how many instances of a role a cluster may have: 2*rank+9 must fit 15
// bits on the wire.
const MaxInstances = 16379

const (
	maxInt = 1<<31 - 1
	day    = 24 * 60 * 60
)

// A section has the variables of one topic, in the order of the documentation.
type section struct {
	topic     string
	variables []variable
}

// sections has one row for each variable that has a place in Config.
var sections = []section{
	{"Cluster shape and identity", []variable{
		{name: "DMLC_ROLE", kind: Enum, words: roles, needed: true, field: func(c *Config) any { return &c.Role },
			help: "What this process is. `joint` is one worker and one server instance in one process; only Go programs can start it."},
		{name: "DMLC_NUM_WORKER", kind: Int, min: 1, max: MaxInstances, needed: true, field: func(c *Config) any { return &c.NumWorkers },
			help: "Number of worker groups. The cluster has this many times `DMLC_GROUP_SIZE` worker instances. Must be the same in every process."},
		{name: "DMLC_NUM_SERVER", kind: Int, min: 1, max: MaxInstances, needed: true, field: func(c *Config) any { return &c.NumServers },
			help: "Number of server groups, counted like `DMLC_NUM_WORKER`. Must be the same in every process."},
		{name: "DMLC_GROUP_SIZE", kind: Int, min: 1, max: MaxInstances, def: "1", field: func(c *Config) any { return &c.GroupSize },
			help: "Instances of each group, one process each. Instance i of a worker group talks to instance i of each server group."},
		{name: "DMLC_NODE_RANK", kind: Int, min: 0, max: MaxInstances - 1, none: -1, field: func(c *Config) any { return &c.NodeRank },
			help: "Rank of this group within its role. The instance's rank is `DMLC_GROUP_SIZE * DMLC_NODE_RANK + STEPMESH_GPU + DMLC_RANK_OFFSET`."},
		{name: "DMLC_RANK_OFFSET", kind: Int, min: -MaxInstances, max: MaxInstances, def: "0", field: func(c *Config) any { return &c.RankOffset },
			help: "Added to the rank. Its use: a group of one on GPU k needs -k."},
		{name: "DMLC_INSTANCE_ID", kind: Int, min: 0, max: MaxInstances - 1, none: -1, field: func(c *Config) any { return &c.InstanceID },
			help: "Index of this instance in its group. Only one value is right, so leave it unset."},
		{name: "STEPAF_CLUSTER_ID", kind: String, field: func(c *Config) any { return &c.ClusterID },
			help: "Name of the cluster, equal on all nodes. Nodes with another name are refused, and C++ nodes unless `STEPAF_FOREIGN=1`. Identifies nodes after a scheduler restart."},
		{name: "STEPAF_FOREIGN", kind: Switch, def: "0", field: func(c *Config) any { return &c.Foreign },
			help: "1: C++ nodes may join a cluster with a `STEPAF_CLUSTER_ID`, and a C++ scheduler may use other addresses. Any process can pretend to be one."},
	}},
	{"Trust", []variable{
		{name: secretFile, kind: Path, field: func(c *Config) any { return &c.SecretFile },
			help: "File with the cluster's secret, the same on all nodes (`stepaf secret` makes one). Mode 0600 or 0400, owned by the process's user."},
		{name: secret, kind: Hidden, field: func(c *Config) any { return &c.Secret },
			help: "The secret itself, 16 to 4096 bytes, if there is no file. Other processes of the same user can read a process's environment."},
		{name: authMode, kind: Enum, words: []string{AuthOff, AuthWarn, AuthRequire}, field: func(c *Config) any { return &c.Auth },
			help: "`require`: only peers with a proof. `warn`: peers without proof are admitted, counted and logged. `off`: no proofs. C++ nodes need `warn` or `off` (plaintext)."},
		{name: tlsSwitch, kind: Switch, def: "0", field: func(c *Config) any { return &c.TLS },
			help: "1: TLS 1.3 for data over TCP, with keys of the secret. Needs `STEPAF_AUTH=require`. The same on all nodes. Not with ibverbs."},
	}},
	{"Addresses and ports", []variable{
		{name: "DMLC_PS_ROOT_URI", kind: String, needed: true, check: checkHost, field: func(c *Config) any { return &c.RootURI },
			help: "Host name or address of the scheduler, without port."},
		{name: "DMLC_PS_ROOT_PORT", kind: Int, min: 1, max: 65535, needed: true, field: func(c *Config) any { return &c.RootPort },
			help: "Port of the scheduler. Outside of `net.ipv4.ip_local_port_range` no other program gets it by chance."},
		{name: "DMLC_NODE_HOST", kind: String, check: checkHost, field: func(c *Config) any { return &c.NodeHost },
			help: "Host name or address under which the others reach this node. Must be one of this machine's."},
		{name: "DMLC_INTERFACE", kind: String, check: checkInterface, field: func(c *Config) any { return &c.Interface },
			help: "Interface whose address is advertised if `DMLC_NODE_HOST` is unset. `auto` with ibverbs: the one nearest to the GPU, before `DMLC_NODE_HOST`; with zmq: unset."},
		{name: "DMLC_PORT", kind: Int, min: 0, max: 65535, field: func(c *Config) any { return &c.Port },
			help: "Port to listen on. If it is taken, or is the scheduler's on this host, a free one is used, with a warning."},
		{name: "DMLC_NUM_PORTS", kind: Int, min: 1, max: 32, def: "1", field: func(c *Config) any { return &c.NumPorts },
			help: "Ports of a node. zmq and ibverbs need 1."},
		{name: "DMLC_LOCAL", kind: Switch, def: "0", field: func(c *Config) any { return &c.Local },
			help: "Use Unix sockets `/tmp/<port>` instead of TCP. All nodes must be on one machine and agree."},
		{name: "DMLC_USE_KUBERNETES", kind: Switch, def: "0", field: func(c *Config) any { return &c.Kubernetes },
			help: "The scheduler listens on every address, because `DMLC_PS_ROOT_URI` is not its own. On for values above 0."},
	}},
	{"Transport", []variable{
		{name: "DMLC_ENABLE_RDMA", kind: Enum, words: vanWords, def: "zmq", check: checkVan, field: func(c *Config) any { return &c.VanType },
			help: "Transport of the whole cluster, scheduler included. `0` is zmq, `1` is ibverbs (deprecated)."},
		{name: "DMLC_PS_VAN_TYPE", kind: Enum, words: vanWords, def: "zmq", check: checkVan, field: func(c *Config) any { return &c.VanType },
			help: "The same, read only when `DMLC_ENABLE_RDMA` is unset."},
		{name: "BYTEPS_ZMQ_MAX_SOCKET", kind: Int, min: 1, max: 65535, def: "1024", field: func(c *Config) any { return &c.ZMQMaxSockets },
			help: "Most sockets that libzmq may open."},
		{name: "BYTEPS_ZMQ_NTHREADS", kind: Int, min: 1, max: 64, def: "4", field: func(c *Config) any { return &c.ZMQIOThreads },
			help: "Threads that libzmq uses for input and output."},
		{name: "BYTEPS_ENABLE_IPC", kind: Switch, none: -1, field: func(c *Config) any { return &c.EnableIPC },
			help: "Shared memory for data between nodes of one machine, of one user, that all run this library. Unset or 1: where it works. 0: never."},
		{name: "STEPAF_SHM_MAP", kind: Switch, def: "0", field: func(c *Config) any { return &c.SHMMap },
			help: "Workers' tensors of `AllocShared` are mapped, not copied: a received one is the worker's memory until the answer."},
		{name: "STEPAF_DATA", kind: Enum, words: dataWords, def: DataTCP, field: func(c *Config) any { return &c.Data },
			help: "Path of data between native nodes that shared memory does not reach. `tcp`: fast, on a data port. `zmq`: as to C++ nodes."},
	}},
	{"RDMA transport", []variable{
		{name: "STEPAF_QP_NUM", kind: Int, min: 1, max: 2, def: "2", field: func(c *Config) any { return &c.QPNum },
			help: "Queue pairs of each connection. Must be the same on all nodes."},
		{name: "STEPMESH_SPLIT_QP_LAG", kind: Int, min: 0, max: 1, def: "0", field: func(c *Config) any { return &c.SplitQPLag },
			help: "Spread every value over the queue pairs and these over the ports of a bonded NIC. The sender decides."},
		{name: "BYTEPS_RDMA_START_DEPTH", kind: Int, min: 1, max: 1 << 16, field: func(c *Config) any { return &c.RDMAStartDepth },
			help: "With RX_DEPTH the depth of the send queues of each connection, in work requests."},
		{name: "BYTEPS_RDMA_RX_DEPTH", kind: Int, min: 1, max: 1 << 16, field: func(c *Config) any { return &c.RDMARxDepth },
			help: "Receive requests of each connection, shared among its queue pairs. Lower it when memory cannot be registered."},
		{name: "BYTEPS_RDMA_MAX_CONCURR_WR", kind: Int, min: 1, max: 1 << 20, def: "4224", field: func(c *Config) any { return &c.RDMAMaxConcurrWR },
			help: "Messages that may wait for one peer, and the rest of a batch. At least START_DEPTH + 2 * RX_DEPTH."},
		{name: "BYTEPS_ADDRESS_POOL_SIZE", kind: Int, min: 1, max: 32768, def: "10240", field: func(c *Config) any { return &c.AddressPoolSize },
			help: "Receive slots: memory that this node gives to its peers to write to."},
		{name: "BYTEPS_PRINT_RDMA_LOG", kind: Switch, def: "0", field: func(c *Config) any { return &c.PrintRDMALog },
			help: "A log line at level 1 for each event of a connection and each failed attempt to connect."},
		{name: "STEPAF_RDMA_ACK_TIMEOUT", kind: Int, min: 10, max: 22, def: "15", field: func(c *Config) any { return &c.RDMAAckTimeout },
			help: "n: a write without acknowledgement for 4.096 us * 2^n is repeated, 6 times; then the peer is lost. 15: 1 s; 17: 4 s."},
	}},
	{"Reliability and timeouts", []variable{
		{name: "PS_RESEND", kind: Switch, def: "0", field: func(c *Config) any { return &c.Resend },
			help: "Acknowledge every message, and send unacknowledged messages again. Must be the same on all nodes."},
		{name: "PS_RESEND_TIMEOUT", kind: Milliseconds, min: 1, max: day * 1000, def: "1000", field: func(c *Config) any { return &c.ResendTimeout },
			help: "The k-th try follows k times this after the first."},
		{name: "PS_DROP_MSG", kind: Percent, min: 0, max: 100, def: "0", field: func(c *Config) any { return &c.DropMsg },
			help: "For tests: share of received messages that is thrown away. Needs `PS_RESEND=1`."},
		{name: "PS_HEARTBEAT_INTERVAL", kind: Seconds, min: 0, max: day, none: -1, field: func(c *Config) any { return &c.HeartbeatInterval },
			help: "Time between heartbeats to the scheduler, and of libzmq to all nodes (at least four in PS_HEARTBEAT_TIMEOUT). 0: none."},
		{name: "PS_HEARTBEAT_TIMEOUT", kind: Seconds, min: 0, max: day, none: -1, field: func(c *Config) any { return &c.HeartbeatTimeout },
			help: "A node silent for longer is dead and can be replaced, unless its thread still answers probes. 0: never dead. Must exceed the interval."},
		{name: "STEPAF_START_TIMEOUT", kind: Seconds, min: 1, max: 7 * day, def: "300", field: func(c *Config) any { return &c.StartTimeout },
			help: "How long starting waits for the other nodes, its barrier included."},
		{name: "STEPAF_STOP_TIMEOUT", kind: Seconds, min: 1, max: 7 * day, def: "30", field: func(c *Config) any { return &c.StopTimeout },
			help: "How long a worker's stopping waits for the other nodes. Servers and the scheduler wait for the workers that live."},
		{name: "STEPAF_BARRIER_TIMEOUT", kind: Seconds, min: 1, max: 7 * day, def: "3600", field: func(c *Config) any { return &c.BarrierTimeout },
			help: "How long a barrier that a program asks for waits for the other nodes."},
		{name: "STEPAF_REPLACE_TIMEOUT", kind: Seconds, min: 0, max: day, def: "10", field: func(c *Config) any { return &c.ReplaceTimeout },
			help: "How long a barrier waits for the scheduler, or for replacements if only dead nodes are missing. Nodes that fell silent meanwhile are not waited for."},
	}},
	{"Budgets", []variable{
		{name: "STEPAF_RECV_BUDGET_PEER", kind: Size, min: 1 << 20, max: 1 << 40, def: "256M", field: func(c *Config) any { return &c.RecvBudgetPeer },
			help: "Bytes of one peer queued for the application. At the limit the peer is not read (over ZeroMQ a server reads on), and its unfinished batches fail."},
		{name: "STEPAF_RECV_BUDGET", kind: Size, min: 1 << 20, max: 1 << 40, def: "1G", field: func(c *Config) any { return &c.RecvBudget },
			help: "The same for all peers together, counted for each transport separately; registered buffers do not count. A batch larger than this and `STEPAF_RECV_BUDGET_PEER` fails."},
		{name: "STEPAF_SEND_BUDGET", kind: Size, min: 1 << 20, max: 1 << 40, def: "256M", field: func(c *Config) any { return &c.SendBudget },
			help: "Bytes that may be queued for one peer. Below it, a request of any length is accepted; at the limit sending fails (`ErrQueueFull`)."},
		{name: "STEPAF_STRANGER_BUDGET", kind: Size, min: 1 << 16, max: 1 << 30, def: "16M", field: func(c *Config) any { return &c.StrangerBudget },
			help: "Bytes of messages that this node keeps for unauthenticated connections. Their number is limited, too."},
		{name: "STEPAF_SHM_BUDGET", kind: Size, min: 1 << 20, max: 1 << 40, def: "256M", field: func(c *Config) any { return &c.SHMBudget },
			help: "Shared memory for data to peers of this host: 256 KiB to 2 MiB each. Beyond it, data uses the other transport."},
		{name: "STEPAF_RDMA_PEER_BUDGET", kind: Size, min: 1 << 20, max: 1 << 40, def: "1G", field: func(c *Config) any { return &c.RDMAPeerBudget },
			help: "Bytes that this node registers for one peer's writes, without the application's buffers. Unused slots are reclaimed; a larger value fails at its sender."},
		{name: "STEPAF_RDMA_BUDGET", kind: Size, min: 1 << 20, max: 1 << 40, def: "16G", field: func(c *Config) any { return &c.RDMABudget },
			help: "The same for all peers. At the limit, a request waits up to 20 s for unused slots; then, or if larger, it is refused."},
	}},
	{"Logs and profiles", []variable{
		{name: "PS_VERBOSE", kind: Int, min: -1, max: 1000, def: "0", field: func(c *Config) any { return &c.Verbose },
			help: "-1 nothing, 0 warnings and errors, 1 connection set-up too, 2 every message, 3 and more in greater detail."},
		{name: "ENABLE_PROFILING", kind: Switch, def: "0", field: func(c *Config) any { return &c.Profiling },
			help: "Write a line with key, operation and time for each data message received."},
		{name: "PROFILE_PATH", kind: Path, field: func(c *Config) any { return &c.ProfilePath },
			help: "Start of the profile's file name; `_van_worker` or `_van_server` follows."},
	}},
	{"Devices, threads and queues", []variable{
		{name: "STEPMESH_BAKCEND", aliases: []string{"STEPMESH_BACKEND", "STEPAF_BACKEND"}, kind: String, check: checkBackend, field: func(c *Config) any { return &c.Backend },
			help: "Where tensors live: `CPU`, `GPU`, or the name under which a program has registered its own device."},
		{name: "STEPMESH_GPU", aliases: []string{"STEPAF_GPU"}, kind: Int, min: 0, max: MaxInstances - 1, def: "0", field: func(c *Config) any { return &c.GPU },
			help: "Device of this process, and part of its rank (see `DMLC_NODE_RANK`)."},
		{name: "STEPMESH_MEM_SYNC", aliases: []string{"STEPAF_MEM_SYNC"}, kind: Switch, def: "1", field: func(c *Config) any { return &c.MemSync },
			help: "1: notice the end of GPU work by a word that the stream writes to host memory. 0: by asking the event."},
		{name: "STEPMESH_BIND_CPU_CORE", kind: Switch, def: "0", field: func(c *Config) any { return &c.BindCPUCore },
			help: "Bind the threads on the fast path to one core each, see below."},
		{name: "STEPMESH_CPU_CORES_PER_SOCKET", kind: Int, min: 1, max: 4096, def: "48", field: func(c *Config) any { return &c.CPUCoresPerSocket },
			help: "S in the formula below."},
		{name: "STEPMESH_CPU_CORES_PER_GPU", kind: Int, min: 1, max: 4096, def: "5", field: func(c *Config) any { return &c.CPUCoresPerGPU },
			help: "C in the formula below."},
		{name: "STEPMESH_CPU_START_OFFSET", kind: Int, min: 0, max: 65535, def: "10", field: func(c *Config) any { return &c.CPUStartOffset },
			help: "B in the formula below. Give two processes on one GPU different values."},
		{name: "STEPAF_BUSY_POLL_ENABLE", kind: Switch, field: func(c *Config) any { return &c.BusyPoll },
			help: "1: waiting threads spin forever. 0: they sleep at once."},
	}},
	{"Ranks given by the scheduler", []variable{
		{name: "BYTEPS_ORDERED_HOSTS", kind: List, check: checkHosts, field: func(c *Config) any { return &c.OrderedHosts },
			help: "`ip[:port],ip[:port]`: ranks follow the order of hosts here. Every host must be listed, once."},
	}},
	{"Test programs and benchmarks", []variable{
		{name: "BENCHMARK_ITER", kind: Int, min: 0, max: maxInt, def: "10000", field: func(c *Config) any { return &c.Bench.Iterations },
			help: "Rounds to run; 0 is endless."},
		{name: "BENCHMARK_SIZE", kind: Int, min: 1, max: maxInt, def: "7168", field: func(c *Config) any { return &c.Bench.Size },
			help: "Tensor length: bf16 elements, bytes in the register test."},
		{name: "BENCHMARK_WARMUP", kind: Int, min: 0, max: maxInt, def: "10", field: func(c *Config) any { return &c.Bench.Warmup },
			help: "Rounds before measuring begins."},
		{name: "UTEST_WORKER_BATCH_MAX", kind: Int, min: 2, max: 32768, def: "128", field: func(c *Config) any { return &c.Bench.BatchMax },
			help: "Batches of 1 to this minus 1 are tested."},
		{name: "UTEST_WORKER_TENSOR_NUM", kind: Int, min: 1, max: 65535, def: "1", field: func(c *Config) any { return &c.Bench.Tensors },
			help: "Tensors pushed with each batch."},
	}},
}

// table has the rows of all sections. It is never written to.
var table = rows()

func rows() (all []variable) {
	for _, s := range sections {
		for _, v := range s.variables {
			v.topic = s.topic
			all = append(all, v)
		}
	}
	return all
}
