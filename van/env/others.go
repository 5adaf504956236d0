package env

// Variables that are known and have no effect.

// other is a known name without a field in Config.
type other struct {
	name string
	kind Kind
	why  string
	note bool // setting it is normal, so mention it only among the notes
}

const (
	whyUCX  = "UCX is not supported"
	whyTP   = "TensorPipe is not supported"
	whyIPC  = "BytePS's shared memory is not supported"
	enabler = "DMLC_ENABLE_UCX"
)

// others are variables of C++ StepMesh that this library does not support or that have
// no effect there either. DMLC_ENABLE_UCX is here too, but chooseVan reads it.
var others = []other{
	{name: enabler, kind: Switch, why: "on is an error: " + whyUCX},
	{name: "DMLC_RANK", why: "it is not a rank; nodes keep their identity without it", note: true},
	{name: "DEBUG_MODE", why: "the original's tests read it and do nothing with it", note: true},
	{name: "DMLC_NUM_CPU_DEV", why: whyUCX},
	{name: "DMLC_NUM_GPU_DEV", why: whyUCX},
	{name: "BYTEPS_UCX_ERRH_ENABLE", why: whyUCX},
	{name: "BYTEPS_UCX_RECONNECT_TMO", why: whyUCX},
	{name: "BYTEPS_UCX_SHORT_THRESH", why: whyUCX},
	{name: "BYTEPS_UCX_FORCE_REQ_ORDER", why: whyUCX},
	{name: "BYTEPS_UCX_QUEUE_SENDS", why: whyUCX},
	{name: "PSLITE_UCX_USE_MT_MUTEX", why: whyUCX},
	{name: "PSLITE_UCX_RNDV_THRESH", why: whyUCX},
	// MPI and others use these three for their own UCX.
	{name: "UCX_USE_MT_MUTEX", why: whyUCX, note: true},
	{name: "UCX_RNDV_THRESH", why: whyUCX, note: true},
	{name: "UCX_IB_TRAFFIC_CLASS", why: whyUCX, note: true},
	{name: "DMLC_USE_RECVCTX", why: whyTP},
	{name: "DMLC_PS_UV_NTHREADS", why: whyTP},
	{name: "BYTEPS_IPC_COPY_NUM_THREADS", why: whyIPC},
	{name: "BYTEPS_IPC_ENABLE_ASYNC_COPY", why: whyIPC},
	{name: "BYTEPS_PARTITION_BYTES", why: whyIPC},
	{name: "BYTEPS_LOCAL_SIZE", why: whyIPC},
	{name: "BYTEPS_PCIE_SWITCH_SIZE", why: whyIPC},
	{name: "BYTEPS_ENCODING_SCHEME_VERSION", why: whyIPC},
	{name: "BYTEPS_JOB_ID", why: whyIPC},
	{name: "BYTEPS_ENABLE_MIXED_MODE", kind: Switch, why: "mixed mode is not supported: ranks follow the preferred ranks, or the hosts"},
}

// otherPrograms are names with one of the prefixes that belong to launch scripts, trackers and
// programs that use the library. They are not reported as misspelt.
var otherPrograms = []string{
	"STEPMESH_DROP_RATE", "STEPMESH_CONNECTOR_DEBUG", "STEPMESH_SCHEDULER_STARTED",
	"DMLC_NUM_ATTEMPT", "DMLC_TRACKER_URI", "DMLC_TRACKER_PORT",
	"DMLC_JOB_CLUSTER", "DMLC_JOB_ID", "DMLC_TASK_ID", "DMLC_WORKER_ID", "DMLC_SERVER_ID",
	"BYTEPS_LOCAL_RANK", "BYTEPS_LOG_LEVEL", "MLC_INTERFACE",
}
