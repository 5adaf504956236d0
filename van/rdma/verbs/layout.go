//go:build linux && cgo && !nordma

package verbs

/*
#include "shim.h"
*/
import "C"

import "unsafe"

// C reads and writes SendWR and Completion directly. These lines do not compile if the layouts differ. load.c checks the same numbers against
// the C structures.
var (
	_ [C.sizeof_sv_wr]byte = [unsafe.Sizeof(SendWR{})]byte{}
	_ [0]byte              = [unsafe.Offsetof(SendWR{}.QP)]byte{}
	_ [8]byte              = [unsafe.Offsetof(SendWR{}.ID)]byte{}
	_ [16]byte             = [unsafe.Offsetof(SendWR{}.Op)]byte{}
	_ [20]byte             = [unsafe.Offsetof(SendWR{}.Flags)]byte{}
	_ [24]byte             = [unsafe.Offsetof(SendWR{}.Imm)]byte{}
	_ [28]byte             = [unsafe.Offsetof(SendWR{}.RKey)]byte{}
	_ [32]byte             = [unsafe.Offsetof(SendWR{}.RemoteAddr)]byte{}
	_ [40]byte             = [unsafe.Offsetof(SendWR{}.LocalAddr)]byte{}
	_ [48]byte             = [unsafe.Offsetof(SendWR{}.Len)]byte{}
	_ [52]byte             = [unsafe.Offsetof(SendWR{}.LKey)]byte{}

	_ [C.sizeof_sv_wc]byte = [unsafe.Sizeof(Completion{})]byte{}
	_ [0]byte              = [unsafe.Offsetof(Completion{}.Type)]byte{}
	_ [4]byte              = [unsafe.Offsetof(Completion{}.Status)]byte{}
	_ [8]byte              = [unsafe.Offsetof(Completion{}.ID)]byte{}
	_ [16]byte             = [unsafe.Offsetof(Completion{}.Cookie)]byte{}
	_ [24]byte             = [unsafe.Offsetof(Completion{}.QP)]byte{}
	_ [32]byte             = [unsafe.Offsetof(Completion{}.Imm)]byte{}
	_ [36]byte             = [unsafe.Offsetof(Completion{}.Len)]byte{}
	_ [40]byte             = [unsafe.Offsetof(Completion{}.Vendor)]byte{}
	_ [48]byte             = [unsafe.Offsetof(Completion{}.Data)]byte{}
)

// Constants that both languages use.
var (
	_ [C.SV_RECV_SIZE]byte       = [RecvSize]byte{}
	_ [C.SV_OP_SEND_IMM]byte     = [OpSendImm]byte{}
	_ [C.SV_OP_WRITE]byte        = [OpWrite]byte{}
	_ [C.SV_OP_WRITE_IMM]byte    = [OpWriteImm]byte{}
	_ [C.SV_SIGNALED]byte        = [Signaled]byte{}
	_ [C.SV_INLINE]byte          = [Inline]byte{}
	_ [C.SV_SEND_DONE]byte       = [SendDone]byte{}
	_ [C.SV_RECV_SEND]byte       = [RecvSend]byte{}
	_ [C.SV_RECV_WRITE]byte      = [RecvWrite]byte{}
	_ [C.SV_RECV_FAILED]byte     = [RecvFailed]byte{}
	_ [C.SV_LOCAL_WRITE]byte     = [LocalWrite]byte{}
	_ [C.SV_REMOTE_WRITE]byte    = [RemoteWrite]byte{}
	_ [C.SV_ADDR_RESOLVED]byte   = [AddrResolved]byte{}
	_ [C.SV_ADDR_ERROR]byte      = [AddrError]byte{}
	_ [C.SV_ROUTE_RESOLVED]byte  = [RouteResolved]byte{}
	_ [C.SV_ROUTE_ERROR]byte     = [RouteError]byte{}
	_ [C.SV_CONNECT_REQUEST]byte = [ConnectRequest]byte{}
	_ [C.SV_UNREACHABLE]byte     = [Unreachable]byte{}
	_ [C.SV_REJECTED]byte        = [Rejected]byte{}
	_ [C.SV_ESTABLISHED]byte     = [Established]byte{}
	_ [C.SV_DISCONNECTED]byte    = [Disconnected]byte{}
	_ [C.SV_DEVICE_REMOVAL]byte  = [DeviceRemoval]byte{}
	_ [C.SV_TIMEWAIT_EXIT]byte   = [TimewaitExit]byte{}
	_ [C.SV_OTHER_EVENT]byte     = [OtherEvent]byte{}
)
