// Package verbs is the part of RDMA that a transport needs, as a few Go
// interfaces: devices, connection management, memory regions, queue pairs, and
// one completion queue for each device. Load gives the real ones, on libibverbs and
// librdmacm, which are opened at run time; package fakeverbs has others in memory,
// for tests.
//
// Work requests are posted and completions are polled in batches, one call into C
// for each batch. Receive requests are the shim's own: it posts them, copies what a
// SEND has brought into the completion, and posts them again.
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
	// ErrUnavailable: RDMA cannot be used here. The text says what is missing, where
	// it was looked for, and what to do.
	ErrUnavailable = errors.New("RDMA is not available")
	// ErrClosed: the object was closed before or meanwhile.
	ErrClosed = errors.New("closed")
	// ErrQueueFull: a queue pair takes no more work requests at present.
	ErrQueueFull = errors.New("send queue full")
)

// Handle names a queue pair in work requests and completions. A Handle is not used
// again for another queue pair. 0 is none.
type Handle uint64

// Stack is RDMA as this process sees it. Its methods are safe for concurrent use.
type Stack interface {
	// Devices lists the RDMA devices of this host with their ports. None is no error.
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
	MaxWR    int // work requests in one queue
	MaxSize  uint64
	Path     string // of the device in sysfs, its link resolved; "" when there is none
}

// PortInfo describes a port of a device, as of the call that returned it.
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
	Iface string     // network interface; "" when unknown
}

// EventType is what has happened to an ID.
type EventType int

// Event types, as the connection manager has them.
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

// DeviceRemedy is what errors say to do on a host without a device.
const DeviceRemedy = "load the kernel module of the network card (mlx5_ib for ConnectX), " +
	"or make a software device (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0); " +
	"in a container, sysfs must show the host's devices"

var eventNames = [...]string{AddrResolved: "address resolved", AddrError: "address error", RouteResolved: "route resolved",
	RouteError: "route error", ConnectRequest: "connect request", Unreachable: "unreachable", Rejected: "rejected",
	Established: "established", Disconnected: "disconnected", DeviceRemoval: "device removed", TimewaitExit: "timewait exit",
	OtherEvent: "other event"}

// String names the event in lower case.
func (t EventType) String() string {
	if t > 0 && int(t) < len(eventNames) {
		return eventNames[t]
	}
	return fmt.Sprintf("event %d", int(t))
}

// Event is one event of the connection manager.
type Event struct {
	Type EventType
	// Status is 0, a negative errno (AddrError, RouteError, Unreachable), or the
	// reason of a rejection: 8 when nobody listens.
	Status int
	// Cookie is that of the ID it happened to; of the listening one for a
	// ConnectRequest.
	Cookie uint64
	// New is the ID that a ConnectRequest has made. It has Cookie 0 until SetCookie,
	// and is the receiver's to accept or reject, and to destroy.
	New ID
	// Private is the other side's private data, padded with zeros, nil when there is
	// none. Any peer can send anything.
	Private []byte
	// Peer is the other end's address (ConnectRequest).
	Peer netip.AddrPort
}

// Channel delivers the events of the IDs that it has made.
type Channel interface {
	// Next waits for the next event. After Close it returns ErrClosed. One caller at
	// a time.
	Next() (Event, error)
	// NewID makes an ID whose events carry cookie.
	NewID(cookie uint64) (ID, error)
	// Close ends Next. All IDs must have been destroyed.
	Close() error
}

// ID is one end of a connection, or a listener. The methods that begin something
// end with an event. They must not be called at the same time for one ID, except
// Disconnect.
type ID interface {
	// SetCookie names an ID that a ConnectRequest has brought.
	SetCookie(uint64)
	// Bind binds the ID to a local address; port 0 is any free one. A busy port wraps
	// syscall.EADDRINUSE, a foreign address syscall.EADDRNOTAVAIL.
	Bind(netip.AddrPort) error
	// Listen begins to take connect requests.
	Listen(backlog int) error
	// LocalAddr is what Bind or ResolveAddr has bound.
	LocalAddr() netip.AddrPort
	// ResolveAddr finds the device and path to dst. src may be invalid (none).
	ResolveAddr(src netip.Addr, dst netip.AddrPort, timeout time.Duration) error
	// ResolveRoute follows AddrResolved.
	ResolveRoute(timeout time.Duration) error
	// SetAckTimeout sets the time after which a message without acknowledgement is
	// sent again, 4.096 us * 2^exp. Call it after AddrResolved. Not every provider can.
	SetAckTimeout(exp int) error
	// SetTOS sets the type of service, 0 to 255, of the packets of the ID's connection: the
	// traffic class in four times the DSCP. Call it after AddrResolved and before ResolveRoute.
	SetTOS(tos int) error
	// Device is the device that the ID has come to lie on, with one protection domain
	// and completion queue for all its IDs in this Stack's user. The same Device is
	// returned for all IDs of a Channel on one device.
	Device() (Device, error)
	// CreateQP makes the ID's queue pair, with its receive requests posted.
	CreateQP(QPOptions) (QP, error)
	Connect(ConnParam) error
	Accept(ConnParam) error
	Reject(private []byte) error
	// Disconnect moves the queue pair to the error state, so that everything posted
	// is flushed, and tells the other side.
	Disconnect() error
	// Destroy ends the ID and its queue pair. No event or completion of it comes
	// afterwards.
	Destroy() error
}

// The most private data, in bytes, that the connection manager takes. It arrives padded to that length.
const (
	MaxConnectData = 56
	MaxAcceptData  = 196
	MaxRejectData  = 148
)

// ConnParam is what a connection is made with.
type ConnParam struct {
	Private       []byte // up to MaxConnectData bytes for Connect, MaxAcceptData for Accept
	RetryCount    int    // tries of a message that is not acknowledged, up to 7
	RNRRetryCount int    // the same while the other side has no receive request; 7 is for ever
}

// QPOptions is what a queue pair is made with.
type QPOptions struct {
	Cookie    uint64 // in the completions of what it receives
	SendDepth int    // work requests posted and not completed
	RecvDepth int    // receive requests, RecvSize bytes each
	Inline    int    // bytes of inline data wanted; the device may grant more or less
	// Port pins the queue pair to one port of a bonded device, from 1; 0 does not.
	// Where the device or the library cannot, it is not pinned.
	Port int
}

// RecvSize is the longest SEND that can be received.
const RecvSize = 64

// QP is a queue pair.
type QP interface {
	Handle() Handle
	Num() uint32
	MaxInline() int // bytes, as granted
	Pinned() bool   // Port was obeyed; known once the connection stands
}

// Device is an open device with its protection domain and completion queue.
type Device interface {
	Name() string
	Info() (DeviceInfo, error)

	// Register makes n bytes at p known to the device. The memory must stay where it
	// is and be mapped until Deregister. n must be positive.
	Register(p unsafe.Pointer, n int, a Access) (MR, error)
	// RegisterDMABuf does so with length bytes at offset of a dma-buf, which remote
	// peers will find at address iova.
	RegisterDMABuf(fd int, offset, length, iova uint64, a Access) (MR, error)

	// Post posts work requests in order, one call into C for all of them. Requests of
	// one queue pair that follow each other are posted as one chain. On an error n is
	// the number that were posted; ErrQueueFull and ErrClosed are told apart.
	Post(wrs []SendWR) (n int, err error)

	// Poll takes up to len(out) completions. It looks for spin time (0: once; negative:
	// until Wake), and then, with a positive block, sleeps up to that long for the
	// first. It returns 0 when there is none or Wake was called. One caller at a time;
	// the call runs in C.
	Poll(out []Completion, spin, block time.Duration) (n int, err error)
	// Wake ends a Poll that waits, or else the next one that would.
	Wake()
	// Reserve makes sure that the completion queue holds n completions.
	Reserve(n int) error
}

// Access is what a region may be used for.
type Access int

// LocalWrite lets the device write there, RemoteWrite peers, too. 0 is for sending.
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
	Signaled uint32 = 1 << iota // gives a completion; failures always do
	Inline                      // the bytes are taken at once, no LKey is needed
)

// SendWR is one work request. C reads it as it is.
type SendWR struct {
	QP         Handle
	ID         uint64 // comes back in the completion; below 1<<63
	Op         Opcode
	Flags      uint32
	Imm        uint32 // as the completion shows it, without byte swapping
	RKey       uint32
	RemoteAddr uint64
	LocalAddr  uint64 // pinned, or not Go's
	Len        uint32
	LKey       uint32
}

// Status is the status of a completion.
type Status uint32

// StatusOK is success. StatusFlushed is what everything else that was posted gets
// when a queue pair has broken. The others that matter are RetryExceeded, when the
// peer or the link is gone, and RemoteAccess, when it does not allow the write.
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

// String names the status as the verbs do, with its number.
func (s Status) String() string {
	if n, ok := statusNames[s]; ok {
		return fmt.Sprintf("%s (%d)", n, uint32(s))
	}
	return fmt.Sprintf("status %d", uint32(s))
}

// CompletionType says what has completed.
type CompletionType uint32

// Completion types.
const (
	SendDone   CompletionType = iota + 1 // a posted work request
	RecvSend                             // a SEND with immediate has come
	RecvWrite                            // a write with immediate has come
	RecvFailed                           // a receive request ended with Status
)

// Completion is one completion. C writes it as it is.
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

// CallCounter is implemented by a Device that counts the calls that it has made into
// C: of Post and of Poll.
type CallCounter interface {
	Calls() (posts, polls uint64)
}
