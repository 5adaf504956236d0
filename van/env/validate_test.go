package env

import (
	"errors"
	"strings"
	"testing"
	"time"
)

const node = "DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=8123 "

func TestValidate(t *testing.T) {
	tests := []struct{ name, environ, want string }{
		{"complete", node, ""},
		{"scheduler", node + "DMLC_ROLE=scheduler STEPMESH_GPU=7 DMLC_INSTANCE_ID=5", ""},
		{"joint", node + "DMLC_ROLE=joint DMLC_NUM_WORKER=2", ""},
		{"nothing", "", `DMLC_ROLE is not set: want one of worker, server, scheduler, joint
DMLC_NUM_WORKER is not set: want an integer from 1 to 16379
DMLC_NUM_SERVER is not set: want an integer from 1 to 16379
DMLC_PS_ROOT_URI is not set: want a host name or address
DMLC_PS_ROOT_PORT is not set: want an integer from 1 to 65535`},
		{"what Load refused", node + "DMLC_NUM_SERVER=two PS_RESEND=on", `DMLC_NUM_SERVER="two": want an integer from 1 to 16379
PS_RESEND="on": want 0 (off) or 1 (on); write 1`},
		{"ucx", node + "DMLC_ENABLE_UCX=1", `DMLC_ENABLE_UCX="1": want 0 or nothing (UCX is not supported); choose zmq or ibverbs with DMLC_ENABLE_RDMA`},
		{"two backends", node + "STEPMESH_BAKCEND=CPU STEPAF_BACKEND=GPU",
			`STEPAF_BACKEND="GPU" (STEPMESH_BAKCEND="CPU"): want the same value, or only one of the two`},
		{"rank too high", node + "STEPMESH_GPU=1",
			`rank="1" (DMLC_GROUP_SIZE 1 * DMLC_NODE_RANK 0 + STEPMESH_GPU 1 + DMLC_RANK_OFFSET 0): want 0 to 0 for one of 1 worker instances (DMLC_NUM_WORKER 1 * DMLC_GROUP_SIZE 1)`},
		{"offset mends it", node + "STEPMESH_GPU=1 DMLC_RANK_OFFSET=-1", ""},
		{"rank too low", node + "DMLC_RANK_OFFSET=-1",
			`rank="-1" (DMLC_GROUP_SIZE 1 * DMLC_NODE_RANK 0 + STEPMESH_GPU 0 + DMLC_RANK_OFFSET -1): want 0 to 0 for one of 1 worker instances (DMLC_NUM_WORKER 1 * DMLC_GROUP_SIZE 1)`},
		{"last rank", node + "DMLC_ROLE=server DMLC_GROUP_SIZE=8 DMLC_NUM_SERVER=2 DMLC_NODE_RANK=1 STEPMESH_GPU=7 DMLC_INSTANCE_ID=7", ""},
		{"node rank too high", node + "DMLC_ROLE=server DMLC_GROUP_SIZE=8 DMLC_NUM_SERVER=2 DMLC_NODE_RANK=2",
			`rank="16" (DMLC_GROUP_SIZE 8 * DMLC_NODE_RANK 2 + STEPMESH_GPU 0 + DMLC_RANK_OFFSET 0): want 0 to 15 for one of 16 server instances (DMLC_NUM_SERVER 2 * DMLC_GROUP_SIZE 8)`},
		{"joint, too few servers", node + "DMLC_ROLE=joint DMLC_NUM_WORKER=2 DMLC_NODE_RANK=1",
			`rank="1" (DMLC_GROUP_SIZE 1 * DMLC_NODE_RANK 1 + STEPMESH_GPU 0 + DMLC_RANK_OFFSET 0): want 0 to 0 for one of 1 server instances (DMLC_NUM_SERVER 1 * DMLC_GROUP_SIZE 1)`},
		{"instance", node + "DMLC_GROUP_SIZE=8 DMLC_NUM_WORKER=2 DMLC_NODE_RANK=1 STEPMESH_GPU=3 DMLC_INSTANCE_ID=4",
			`DMLC_INSTANCE_ID="4" (rank 11 = DMLC_GROUP_SIZE 8 * DMLC_NODE_RANK 1 + STEPMESH_GPU 3 + DMLC_RANK_OFFSET 0): want 3 = rank 11 mod DMLC_GROUP_SIZE 8, or leave it unset`},
		{"too many", node + "DMLC_NUM_WORKER=16379 DMLC_GROUP_SIZE=2",
			`DMLC_NUM_WORKER="16379" (DMLC_GROUP_SIZE=2): want at most 16379 instances, not 32758`},
		{"own address of no host", node + "DMLC_NODE_HOST=0.0.0.0",
			`DMLC_NODE_HOST="0.0.0.0" (it names no host that others can connect to): want the name or an address of this host, or unset it`},
		{"own address of no host, IPv6", node + "DMLC_ROLE=server DMLC_NODE_HOST=::",
			`DMLC_NODE_HOST="::" (it names no host that others can connect to): want the name or an address of this host, or unset it`},
		{"own multicast address", node + "DMLC_NODE_HOST=239.1.2.3",
			`DMLC_NODE_HOST="239.1.2.3" (it names no host that others can connect to): want the name or an address of this host, or unset it`},
		{"a scheduler of this host that listens on every address", node + "DMLC_PS_ROOT_URI=0.0.0.0", ""},
		{"scheduler's address for all", node + "DMLC_PS_ROOT_URI=255.255.255.255",
			`DMLC_PS_ROOT_URI="255.255.255.255" (it names no host that others can connect to): want the name or an address of the scheduler's host`},
		{"multicast address of the scheduler itself", node + "DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=ff02::1",
			`DMLC_PS_ROOT_URI="ff02::1" (it names no host that others can connect to): want the name or an address of the scheduler's host`},
		{"scheduler that listens on every address", node + "DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=0.0.0.0", ""},
		{"order of no hosts", node + "DMLC_ROLE=scheduler BYTEPS_ORDERED_HOSTS=10.0.0.1,0.0.0.0:12",
			`BYTEPS_ORDERED_HOSTS="10.0.0.1,0.0.0.0:12": want host[:port],host[:port],..., but 0.0.0.0 names no host`},
		{"ports", node + "DMLC_NUM_PORTS=2", `DMLC_NUM_PORTS="2" (transport zmq): want 1`},
		{"ports of another transport", node + "DMLC_NUM_PORTS=2 DMLC_PS_VAN_TYPE=mine", ""},
		{"heartbeat", node + "PS_HEARTBEAT_INTERVAL=5 PS_HEARTBEAT_TIMEOUT=5", `PS_HEARTBEAT_TIMEOUT="5": want more than PS_HEARTBEAT_INTERVAL (5s), or 0`},
		{"heartbeat without timeout", node + "PS_HEARTBEAT_INTERVAL=5", ""},
		{"heartbeat, right", node + "PS_HEARTBEAT_INTERVAL=5 PS_HEARTBEAT_TIMEOUT=6", ""},
		{"work requests", node + "DMLC_ENABLE_RDMA=ibverbs BYTEPS_RDMA_RX_DEPTH=2049",
			`BYTEPS_RDMA_MAX_CONCURR_WR="4224": want at least 4226 = BYTEPS_RDMA_START_DEPTH 128 + 2 * BYTEPS_RDMA_RX_DEPTH 2049`},
		{"work requests, exactly", node + "DMLC_ENABLE_RDMA=ibverbs BYTEPS_RDMA_RX_DEPTH=2048", ""},
		{"work requests with zmq", node + "BYTEPS_RDMA_RX_DEPTH=2049", ""},
		{"receives for each queue pair", node + "DMLC_ENABLE_RDMA=ibverbs BYTEPS_RDMA_RX_DEPTH=1", `BYTEPS_RDMA_RX_DEPTH="1": want at least STEPAF_QP_NUM (2)`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := LoadFrom(FromList(strings.Fields(tt.environ)))
			if got := errText(c.Validate()); got != tt.want {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

func filled() *Config {
	c := Default()
	c.Role, c.NumWorkers, c.NumServers, c.RootURI, c.RootPort = "server", 1, 1, "localhost", 1234
	return c
}

func TestValidateByHand(t *testing.T) {
	if err := filled().Validate(); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		set  func(*Config)
		want string // the variable, "" for no error
	}{
		{"role", func(c *Config) { c.Role = "Server" }, "DMLC_ROLE"},
		{"negative number", func(c *Config) { c.NumWorkers = -1 }, "DMLC_NUM_WORKER"},
		{"no group", func(c *Config) { c.GroupSize = 0 }, "DMLC_GROUP_SIZE"},
		{"host with port", func(c *Config) { c.RootURI = "a:1" }, "DMLC_PS_ROOT_URI"},
		{"own transport", func(c *Config) { c.VanType = "inproc" }, ""},
		{"upper case", func(c *Config) { c.VanType = "ZMQ" }, "DMLC_ENABLE_RDMA"},
		{"old transport", func(c *Config) { c.VanType = "ucx" }, "DMLC_ENABLE_RDMA"},
		{"number for a transport", func(c *Config) { c.VanType = "0" }, "DMLC_ENABLE_RDMA"},
		{"no transport", func(c *Config) { c.VanType = "" }, "DMLC_ENABLE_RDMA"},
		{"backend", func(c *Config) { c.Backend = "cpu" }, ""},
		{"short time", func(c *Config) { c.StartTimeout = 200 * time.Millisecond }, ""},
		{"no time", func(c *Config) { c.StartTimeout = 0 }, "STEPAF_START_TIMEOUT"},
		{"negative time", func(c *Config) { c.ResendTimeout = -time.Second }, "PS_RESEND_TIMEOUT"},
		{"ipc", func(c *Config) { c.EnableIPC = 2 }, "BYTEPS_ENABLE_IPC"},
		{"same host twice", func(c *Config) { c.OrderedHosts = []string{"a", "a:1"} }, "BYTEPS_ORDERED_HOSTS"},
		{"drop", func(c *Config) { c.DropMsg = 101 }, "PS_DROP_MSG"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := filled()
			tt.set(c)
			err := c.Validate()
			var e *Error
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want != "" && (!errors.As(err, &e) || e.Name != tt.want):
				t.Errorf("got %v, want an error about %s", err, tt.want)
			}
		})
	}
}

// A program may correct a setting that Load refused.
func TestValidateMended(t *testing.T) {
	c, err := LoadFrom(FromList(strings.Fields(node + "DMLC_NUM_SERVER=two DMLC_ENABLE_RDMA=ucx")))
	if err == nil {
		t.Fatal("Load accepts both")
	}
	c.NumServers, c.VanType = 2, "ibverbs"
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

func TestRank(t *testing.T) {
	tests := []struct{ group, node, gpu, offset, rank int }{
		{1, -1, 0, 0, 0},
		{8, -1, 3, 0, 3},
		{8, 2, 3, 0, 19},
		{1, 2, 3, -3, 2},
		{8, 0, 0, -1, -1},
		{0, 0, 1, 0, 1},
	}
	for _, tt := range tests {
		c := Default()
		c.GroupSize, c.NodeRank, c.GPU, c.RankOffset = tt.group, tt.node, tt.gpu, tt.offset
		if c.Rank() != tt.rank {
			t.Errorf("%+v: rank %d", tt, c.Rank())
		}
	}
}

func TestRDMADepths(t *testing.T) {
	tests := []struct {
		environ   string
		start, rx int
	}{
		{"DMLC_ROLE=worker", 128, 256},
		{"DMLC_ROLE=scheduler", 256, 16},
		{"DMLC_ROLE=scheduler BYTEPS_RDMA_START_DEPTH=10 BYTEPS_RDMA_RX_DEPTH=20", 10, 20},
	}
	for _, tt := range tests {
		if s, r := load(t, strings.Fields(tt.environ)...).RDMADepths(); s != tt.start || r != tt.rx {
			t.Errorf("%s: %d, %d", tt.environ, s, r)
		}
	}
}
