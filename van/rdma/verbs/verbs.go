// Package verbs has Go interfaces for the part of RDMA that a transport needs: devices, connection management, memory regions, queue pairs, and
// one completion queue for each device. Load returns the implementation on libibverbs and librdmacm, which are opened at run time. Package
// fakeverbs implements the interfaces in memory, for tests.
//
// Work requests are posted and completions are polled in batches, with one call into C for each batch. The shim owns the receive requests: it
// posts them, copies the data of a SEND into the completion, and posts them again.
package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrUnavailable: RDMA cannot be used here. The text says what is missing, where it was searched, and what to do.
	ErrUnavailable = errors.New("RDMA is not available")
	// ErrClosed: the object is closed.
	ErrClosed = errors.New("closed")
	// ErrQueueFull: a queue pair accepts no more work requests at present.
	ErrQueueFull = errors.New("send queue full")
)

// Handle identifies a queue pair in work requests and completions. A Handle is never reused for another queue pair. 0 is none.
type Handle uint64

// Stack is this process's access to RDMA. Its methods are safe for concurrent use.
type Stack interface {
	// Devices lists the RDMA devices of this host with their ports. An empty list is no error.
	Devices() ([]DeviceInfo, error)
	// NewChannel opens an event channel of the connection manager.
	NewChannel() (Channel, error)
}

// DeviceInfo describes a device.
type DeviceInfo struct {
	Name     string // "mlx5_0"
	Firmware string
	Ports    []PortInfo
	MaxQP    int // limits of the device
	MaxCQE   int
	MaxMR    int
	MaxWR    int    // work requests in one queue
	Path     string // of the device in sysfs, with links resolved; "" if there is none
}

// PortInfo describes the state of a port at the time of the call that returned it.
type PortInfo struct {
	Num       int  // from 1
	Active    bool // in state ACTIVE
	State     string
	LinkLayer string // "Ethernet" or "InfiniBand"
	MTU       int    // active path MTU in bytes
	Rate      float64
	MaxMsg    uint32 // longest message in bytes
	GIDs      []GID
}

// GID is one address of a port.
type GID struct {
	Index int
	Addr  netip.Addr // IPv4 ones are unmapped
	Type  string     // "RoCE v2", "RoCE v1", "IB"
	Iface string     // network interface; "" if not known
}

// EventType is the type of an event of the connection manager.
type EventType int

// Event types, as in the connection manager.
const (
	AddrResolved EventType = iota + 1
	AddrError
	RouteResolved
	RouteError
	ConnectRequest
	Unreachable
	Rejected
	Established
	Disconnected
	DeviceRemoval
	TimewaitExit
	OtherEvent
)

// DeviceRemedy says in errors what to do on a host without a device.
const DeviceRemedy = "load the kernel module of the network card (mlx5_ib for ConnectX), " +
	"or make a software device (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0); " +
	"in a container, sysfs must show the host's devices"

var eventNames = [...]string{AddrResolved: "address resolved", AddrError: "address error", RouteResolved: "route resolved",
	RouteError: "route error", ConnectRequest: "connect request", Unreachable: "unreachable", Rejected: "rejected",
	Established: "established", Disconnected: "disconnected", DeviceRemoval: "device removed", TimewaitExit: "timewait exit",
	OtherEvent: "other event"}

// String returns the type in lower case.
func (t EventType) String() string {
	if t > 0 && int(t) < len(eventNames) {
		return eventNames[t]
	}
	return fmt.Sprintf("event %d", int(t))
}

// Event is one event of the connection manager.
type Event struct {
	Type EventType
	// Status is 0, a negative errno (AddrError, RouteError, Unreachable), or the reason of a rejection: 8 if no process listens there.
	Status int
	// Cookie is that of the event's ID; for a ConnectRequest, of the listening ID.
	Cookie uint64
	// New is the ID of a ConnectRequest. Its Cookie is 0 until SetCookie. The receiver of the event accepts or rejects it, and destroys it.
	New ID
	// Private is the peer's private data, padded with zeros, or nil. Do not trust it.
	Private []byte
	// Peer is the address of the other end, for a ConnectRequest.
	Peer netip.AddrPort
}

// Channel delivers the events of the IDs that it has made.
type Channel interface {
	// Next waits for the next event. After Close it returns ErrClosed. Only one goroutine may call it at a time.
	Next() (Event, error)
	// NewID makes an ID whose events carry cookie.
	NewID(cookie uint64) (ID, error)
	// Close ends Next. All IDs must have been destroyed.
	Close() error
}

// ID is one end of a connection, or a listener. An operation that a method begins ends with an event. Except for Disconnect, the methods must
// not be called concurrently for one ID.
type ID interface {
	// SetCookie sets the cookie of an ID that came with a ConnectRequest.
	SetCookie(uint64)
	// Bind binds the ID to a local address; port 0 means any free port. The error wraps syscall.EADDRINUSE for a used port, and
	// syscall.EADDRNOTAVAIL for an address of another host.
	Bind(netip.AddrPort) error
	// Listen begins to accept connect requests.
	Listen(backlog int) error
	// LocalAddr returns the address that Bind or ResolveAddr has bound.
	LocalAddr() netip.AddrPort
	// ResolveAddr resolves the device and path to dst. src may be invalid (none).
	ResolveAddr(src netip.Addr, dst netip.AddrPort, timeout time.Duration) error
	// ResolveRoute follows AddrResolved.
	ResolveRoute(timeout time.Duration) error
	// SetAckTimeout sets the retransmission time-out to 4.096 us * 2^exp. Call it after AddrResolved. Some providers do not support it.
	SetAckTimeout(exp int) error
	// SetTOS sets the type of service, 0 to 255, of the connection's packets: the DSCP in the upper six bits. Call it after AddrResolved
	// and before ResolveRoute.
	SetTOS(tos int) error
	// Device returns the device of the ID. There is one Device, with one protection domain and completion queue, for all IDs of a
	// Channel on an RDMA device.
	Device() (Device, error)
	// CreateQP makes the ID's queue pair, and posts its receive requests.
	CreateQP(QPOptions) (QP, error)
	Connect(ConnParam) error
	Accept(ConnParam) error
	Reject(private []byte) error
	// Disconnect moves the queue pair to the error state, which flushes all posted requests, and notifies the other end.
	Disconnect() error
	// Destroy ends the ID and its queue pair. Later calls return no event or completion of it.
	Destroy() error
}

// Largest private data in bytes that the connection manager carries. It arrives padded to that length.
const (
	MaxConnectData = 56
	MaxAcceptData  = 196
	MaxRejectData  = 148
)

// ConnParam holds the parameters of a connection.
type ConnParam struct {
	Private       []byte // up to MaxConnectData bytes for Connect, MaxAcceptData for Accept
	RetryCount    int    // retries of an unacknowledged message, up to 7
	RNRRetryCount int    // retries while the other end has no receive request; 7 is forever
}

// QPOptions holds the parameters of a queue pair.
type QPOptions struct {
	Cookie    uint64 // in the completions of received messages
	SendDepth int    // most posted work requests without completion
	RecvDepth int    // receive requests, RecvSize bytes each
	Inline    int    // requested bytes of inline data; the device may grant more or less
	// Port pins the queue pair to one port of a bonded device, from 1; 0 does not pin it. If the device or the library does not support
	// that, the queue pair is not pinned.
	Port int
}

// RecvSize is the longest SEND that can be received.
const RecvSize = 64

// QP is a queue pair.
type QP interface {
	Handle() Handle
	Num() uint32
	MaxInline() int // bytes, as granted
	Pinned() bool   // Port was applied; valid once the connection is established
}

// Device is an open device with its protection domain and completion queue.
type Device interface {
	Name() string
	Info() (DeviceInfo, error)

	// Register registers n bytes at p. The memory must be mapped and must not move until Deregister. n must be positive.
	Register(p unsafe.Pointer, n int, a Access) (MR, error)
	// RegisterDMABuf registers length bytes at offset of a dma-buf. Peers address them from iova on.
	RegisterDMABuf(fd int, offset, length, iova uint64, a Access) (MR, error)

	// Post posts work requests in order, with one call into C. Adjacent requests of one queue pair are posted as one chain. On an
	// error, n requests were posted; the error may be ErrQueueFull or ErrClosed.
	Post(wrs []SendWR) (n int, err error)

	// Poll returns up to len(out) completions. It polls for the time spin (0: once; negative: until Wake). Then, if block is positive, it
	// sleeps until the first completion, at most for block. It returns 0 if there is none, or if Wake was called. Only one goroutine
	// may call it at a time. The call runs in C.
	Poll(out []Completion, spin, block time.Duration) (n int, err error)
	// Wake ends a waiting Poll, or else the next one that would wait.
	Wake()
	// Reserve makes the completion queue large enough for n completions.
	Reserve(n int) error
}

// Access is the permitted use of a region.
type Access int

// LocalWrite lets the device write there, RemoteWrite also peers. 0 permits sending only.
const (
	LocalWrite Access = 1 << iota
	RemoteWrite
)

// MR is a memory region.
type MR interface {
	LKey() uint32
	RKey() uint32
	Deregister() error
}

// Opcode is the kind of a work request.
type Opcode uint32

// Opcodes.
const (
	OpSendImm Opcode = iota + 1
	OpWrite
	OpWriteImm
)

// String returns the name of the opcode.
func (o Opcode) String() string {
	if o >= OpSendImm && o <= OpWriteImm {
		return [...]string{OpSendImm: "SEND_WITH_IMM", OpWrite: "RDMA_WRITE", OpWriteImm: "RDMA_WRITE_WITH_IMM"}[o]
	}
	return fmt.Sprintf("opcode %d", uint32(o))
}

// Flags of a work request.
const (
	Signaled uint32 = 1 << iota // produces a completion; a failure always does
	Inline                      // the bytes are copied when posted; no LKey is needed
)

// SendWR is a work request. C reads it directly.
type SendWR struct {
	QP         Handle
	ID         uint64 // returned in the completion; below 1<<63
	Op         Opcode
	Flags      uint32
	Imm        uint32 // the completion shows it without byte swapping
	RKey       uint32
	RemoteAddr uint64
	LocalAddr  uint64 // pinned memory, or memory outside of the Go heap
	Len        uint32
	LKey       uint32
}

// Status is the status of a completion.
type Status uint32

// StatusOK is success. When a queue pair breaks, all its other posted requests get StatusFlushed. Two other common ones: RetryExceeded if the
// peer or the link is down, RemoteAccess if the peer does not permit the write.
const (
	StatusOK            Status = 0
	StatusLocalLength   Status = 1
	StatusLocalProt     Status = 4
	StatusFlushed       Status = 5
	StatusRemoteInvalid Status = 9
	StatusRemoteAccess  Status = 10
	StatusRemoteOp      Status = 11
	StatusRetryExceeded Status = 12
	StatusRNRExceeded   Status = 13
)

var statusNames = map[Status]string{StatusOK: "success", StatusLocalLength: "local length error", 2: "local QP operation error",
	StatusLocalProt: "local protection error", StatusFlushed: "flushed", 6: "memory window bind error", 7: "bad response",
	8: "local access error", StatusRemoteInvalid: "remote invalid request", StatusRemoteAccess: "remote access error",
	StatusRemoteOp: "remote operation error", StatusRetryExceeded: "transport retries exceeded",
	StatusRNRExceeded: "receiver-not-ready retries exceeded", 15: "remote aborted", 19: "fatal error", 20: "response timeout",
	21: "general error"}

// String returns the name in the verbs, with its number.
func (s Status) String() string {
	if n, ok := statusNames[s]; ok {
		return fmt.Sprintf("%s (%d)", n, uint32(s))
	}
	return fmt.Sprintf("status %d", uint32(s))
}

// CompletionType is the type of a completion.
type CompletionType uint32

// Completion types.
const (
	SendDone   CompletionType = iota + 1 // a posted work request
	RecvSend                             // a SEND with immediate was received
	RecvWrite                            // a write with immediate was received
	RecvFailed                           // a receive request ended with Status
)

// Completion is a completion. C writes it directly.
type Completion struct {
	Type   CompletionType
	Status Status
	ID     uint64 // SendDone: of the work request
	Cookie uint64 // RecvX: of the queue pair
	QP     Handle // RecvX: the queue pair
	Imm    uint32
	Len    uint32 // bytes received or written
	Vendor uint32 // the provider's own status
	_      uint32
	Data   [RecvSize]byte // RecvSend: the first Len bytes
}

// CallCounter is implemented by a Device that counts its calls of Post and Poll into C.
type CallCounter interface {
	Calls() (posts, polls uint64)
}
