package van

// Offsets in the fixed part of a packed meta. All numbers are little endian; bytes
// without an offset are padding.
const (
	offHead           = 0
	offBodySize       = 4
	offCmd            = 8
	offNodeSize       = 12
	offBarrierGroup   = 16
	offMsgSig         = 24
	offRequest        = 32
	offAppID          = 36
	offTimestamp      = 40
	offDataTypeSize   = 44
	offSrcDevType     = 48
	offSrcDevID       = 52
	offDstDevType     = 56
	offDstDevID       = 60
	offCustomerID     = 64
	offPush           = 68
	offSimpleApp      = 69
	offDataSize       = 72
	offKey            = 80
	offAddr           = 88
	offValLen         = 96
	offOption         = 100
	offSid            = 104
	offIsTensor       = 108
	offDtype          = 112
	offDim            = 116
	offShape          = 120
	offRequestTrace   = 184
	offResponseTrace  = 224
	offSlaveQPCounter = 264
	offSlaveQPNum     = 280

	metaSize = 288
)

// Offsets in a trace.
const (
	traceOffPreStart = 0
	traceOffStart    = 8
	traceOffPostSend = 16
	traceOffPostRecv = 24
	traceOffProcess  = 32
)

// Offsets in a node record.
const (
	nodeOffRole        = 0
	nodeOffID          = 4
	nodeOffHostname    = 8
	nodeOffNumPorts    = 72
	nodeOffPorts       = 76
	nodeOffPort        = 204
	nodeOffDevTypes    = 208
	nodeOffDevIDs      = 336
	nodeOffIsRecovery  = 464
	nodeOffCustomerID  = 468
	nodeOffEndpoint    = 472
	nodeOffEndpointLen = 536
	nodeOffAuxID       = 544

	nodeSize     = 552
	hostnameSize = MaxHostnameLen + 1
	dataTypeSize = 4
)
