package van

// The packed form of a Meta: encoding, and decoding of frames from the network.

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/van/backend"
)

// MaxDataTypes is the maximum number of data types in a meta. A message has at most three
// data frames; the limit is greater, so that other senders are not refused.
const MaxDataTypes = 16

var le = binary.LittleEndian

// EncodedLen returns the number of bytes that EncodeTo writes.
func (m *Meta) EncodedLen() int {
	return metaSize + len(m.Body) + dataTypeSize*len(m.DataTypes) + nodeSize*len(m.Control.Nodes)
}

// AppendTo appends the packed form of m to dst and returns the longer slice. If
// Validate fails, AppendTo returns its error and dst unchanged.
func (m *Meta) AppendTo(dst []byte) ([]byte, error) {
	if err := m.Validate(); err != nil {
		return dst, err
	}
	n, start := m.EncodedLen(), len(dst)
	dst = slices.Grow(dst, n)[:start+n]
	m.put(dst[start:])
	return dst, nil
}

// EncodeTo writes the packed form of m to dst, which must have exactly
// EncodedLen bytes. It writes every byte, with zero for padding and for the
// control fields that do not belong to the command, and does not allocate. If
// Validate fails, EncodeTo returns its error and leaves dst unchanged.
func (m *Meta) EncodeTo(dst []byte) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if n := m.EncodedLen(); len(dst) != n {
		return &Error{Op: "encode message", Detail: fmt.Sprintf("buffer of %d bytes, want %d", len(dst), n), Err: ErrInvalid}
	}
	m.put(dst)
	return nil
}

// put writes m to b. m has passed check, and b has EncodedLen bytes.
func (m *Meta) put(b []byte) {
	fixed := b[:metaSize]
	clear(fixed)
	put32(fixed, offHead, m.Head)
	put32(fixed, offBodySize, int32(len(m.Body)))
	put32(fixed, offCmd, int32(m.Control.Cmd))
	put32(fixed, offNodeSize, int32(len(m.Control.Nodes)))
	switch m.Control.Cmd {
	case Barrier, InstanceBarrier:
		put32(fixed, offBarrierGroup, int32(m.Control.BarrierGroup))
	case Ack:
		le.PutUint64(fixed[offMsgSig:], m.Control.MsgSig)
	}
	putBool(fixed, offRequest, m.Request)
	put32(fixed, offAppID, m.AppID)
	put32(fixed, offTimestamp, m.Timestamp)
	put32(fixed, offDataTypeSize, int32(len(m.DataTypes)))
	put32(fixed, offSrcDevType, int32(m.Src.Type))
	put32(fixed, offSrcDevID, m.Src.ID)
	put32(fixed, offDstDevType, int32(m.Dst.Type))
	put32(fixed, offDstDevID, m.Dst.ID)
	put32(fixed, offCustomerID, m.CustomerID)
	putBool(fixed, offPush, m.Push)
	putBool(fixed, offSimpleApp, m.SimpleApp)
	put32(fixed, offDataSize, m.DataSize)
	le.PutUint64(fixed[offKey:], m.Key)
	le.PutUint64(fixed[offAddr:], m.Addr)
	put32(fixed, offValLen, m.ValLen)
	put32(fixed, offOption, m.Option)
	put32(fixed, offSid, m.Sid)
	putBool(fixed, offIsTensor, m.IsTensor)
	put32(fixed, offDtype, m.Dtype)
	put32(fixed, offDim, m.Dim)
	for i, d := range m.Shape[:m.Dim] {
		le.PutUint64(fixed[offShape+8*i:], uint64(d))
	}
	m.RequestTrace.put(fixed[offRequestTrace:])
	m.ResponseTrace.put(fixed[offResponseTrace:])
	for i, c := range m.SlaveQPCounter {
		le.PutUint64(fixed[offSlaveQPCounter+8*i:], c)
	}
	put32(fixed, offSlaveQPNum, m.SlaveQPNum)

	rest := b[metaSize:]
	rest = rest[copy(rest, m.Body):]
	for _, t := range m.DataTypes {
		le.PutUint32(rest, uint32(t))
		rest = rest[dataTypeSize:]
	}
	for i := range m.Control.Nodes {
		m.Control.Nodes[i].put(rest[:nodeSize])
		rest = rest[nodeSize:]
	}
}

func (t *Trace) put(b []byte) {
	le.PutUint64(b[traceOffPreStart:], t.PreStart)
	le.PutUint64(b[traceOffStart:], t.Start)
	le.PutUint64(b[traceOffPostSend:], t.PostSend)
	le.PutUint64(b[traceOffPostRecv:], t.PostRecv)
	le.PutUint64(b[traceOffProcess:], t.Process)
}

func (n *Node) put(b []byte) {
	clear(b)
	put32(b, nodeOffRole, int32(n.Role))
	put32(b, nodeOffID, int32(n.ID))
	copy(b[nodeOffHostname:], n.Hostname)
	put32(b, nodeOffNumPorts, int32(len(n.Ports)))
	put32s(b[nodeOffPorts:], n.Ports)
	put32(b, nodeOffPort, int32(n.Port))
	put32s(b[nodeOffDevTypes:], n.DevTypes)
	put32s(b[nodeOffDevIDs:], n.DevIDs)
	putBool(b, nodeOffIsRecovery, n.IsRecovery)
	put32(b, nodeOffCustomerID, int32(n.CustomerID))
	copy(b[nodeOffEndpoint:], n.Endpoint)
	le.PutUint64(b[nodeOffEndpointLen:], uint64(len(n.Endpoint)))
	put32(b, nodeOffAuxID, int32(n.AuxID))
}

// DecodeMeta decodes the packed meta b into m. It keeps no reference to b. It
// reuses the capacity of m's slices, those of its nodes included, so that a
// data message decodes without allocation once they are large enough.
//
// b is untrusted: for any b, DecodeMeta neither panics nor allocates more than
// b's own length justifies. If b is invalid, it returns a *FieldError and resets m.
// It ignores bytes that ps-lite leaves uninitialised.
func DecodeMeta(b []byte, m *Meta) error {
	body, err := m.get(b)
	if err == nil {
		if err = m.check(); err == nil {
			m.Body = append(m.Body, body...)
			return nil
		}
	}
	m.Reset()
	return err
}

// get reads b and checks its structure; check then checks the values. The body,
// which may be long, is returned and not copied.
func (m *Meta) get(b []byte) ([]byte, *FieldError) {
	m.Reset()
	if len(b) < metaSize {
		return nil, &FieldError{"meta length", len(b), fmt.Sprintf("at least %d bytes", metaSize)}
	}
	fixed := b[:metaSize]
	body, nodes, err := m.getTail(fixed, b[metaSize:])
	if err != nil {
		return nil, err
	}

	m.Head = get32(fixed, offHead)
	m.Control.Cmd = Command(get32(fixed, offCmd))
	switch m.Control.Cmd {
	case Barrier, InstanceBarrier:
		m.Control.BarrierGroup = int(get32(fixed, offBarrierGroup))
	case Ack:
		m.Control.MsgSig = le.Uint64(fixed[offMsgSig:])
	}
	m.AppID = get32(fixed, offAppID)
	m.Timestamp = get32(fixed, offTimestamp)
	m.Src.Type, m.Src.ID = devType(fixed, offSrcDevType), get32(fixed, offSrcDevID)
	m.Dst.Type, m.Dst.ID = devType(fixed, offDstDevType), get32(fixed, offDstDevID)
	m.CustomerID = get32(fixed, offCustomerID)
	m.DataSize = get32(fixed, offDataSize)
	m.Key = le.Uint64(fixed[offKey:])
	m.Addr = le.Uint64(fixed[offAddr:])
	m.ValLen = get32(fixed, offValLen)
	m.Option = get32(fixed, offOption)
	m.Sid = get32(fixed, offSid)
	m.Dtype = get32(fixed, offDtype)
	m.RequestTrace.get(fixed[offRequestTrace:])
	m.ResponseTrace.get(fixed[offResponseTrace:])
	for i := range m.SlaveQPCounter {
		m.SlaveQPCounter[i] = le.Uint64(fixed[offSlaveQPCounter+8*i:])
	}
	m.SlaveQPNum = get32(fixed, offSlaveQPNum)

	if m.Request, err = getBool(fixed, offRequest, "request"); err != nil {
		return nil, err
	}
	if m.Push, err = getBool(fixed, offPush, "push"); err != nil {
		return nil, err
	}
	if m.SimpleApp, err = getBool(fixed, offSimpleApp, "simple_app"); err != nil {
		return nil, err
	}
	isTensor := get32(fixed, offIsTensor)
	if isTensor != 0 && isTensor != 1 {
		return nil, &FieldError{"is_tensor", isTensor, "0 or 1"}
	}
	m.IsTensor = isTensor == 1
	dim := get32(fixed, offDim)
	if dim < 0 || dim > MaxDims {
		return nil, &FieldError{"dim", dim, fmt.Sprintf("0 to %d", MaxDims)}
	}
	m.Dim = dim
	for i := range m.Shape[:dim] {
		m.Shape[i] = int64(le.Uint64(fixed[offShape+8*i:]))
	}
	if err := m.Control.checkHead(len(nodes) / nodeSize); err != nil {
		return nil, err
	}
	if err := m.getNodes(nodes); err != nil {
		return nil, err
	}
	return body, nil
}

// getTail checks the sizes in the fixed part against the tail, reads
// the data types, and returns the body and the node records.
func (m *Meta) getTail(fixed, tail []byte) (body, records []byte, err *FieldError) {
	room := int64(len(tail))
	bodySize := int64(get32(fixed, offBodySize))
	if bodySize < 0 || bodySize > room {
		return nil, nil, &FieldError{"body_size", bodySize, fmt.Sprintf("0 to %d, what the frame has", room)}
	}
	room -= bodySize
	types := int64(get32(fixed, offDataTypeSize))
	if limit := min(MaxDataTypes, room/dataTypeSize); types < 0 || types > limit {
		return nil, nil, &FieldError{"data_type_size", types, fmt.Sprintf("0 to %d", limit)}
	}
	room -= types * dataTypeSize
	nodes := int64(get32(fixed, offNodeSize))
	if nodes < 0 || nodes > room/nodeSize {
		return nil, nil, &FieldError{"control.node_size", nodes, fmt.Sprintf("0 to %d, what the frame has", room/nodeSize)}
	}
	if room -= nodes * nodeSize; room != 0 {
		return nil, nil, &FieldError{"meta length", metaSize + len(tail), fmt.Sprintf("%d bytes", metaSize+int64(len(tail))-room)}
	}

	body, tail = tail[:bodySize], tail[bodySize:]
	for range types {
		m.DataTypes = append(m.DataTypes, DataType(get32(tail, 0)))
		tail = tail[dataTypeSize:]
	}
	return body, tail, nil
}

func (m *Meta) getNodes(b []byte) *FieldError {
	count := len(b) / nodeSize
	if count == 0 {
		return nil
	}
	// The full capacity of the old slice, to reuse the slices of its nodes.
	nodes := m.Control.Nodes[:cap(m.Control.Nodes)]
	if grow := count - len(nodes); grow > 0 {
		nodes = append(nodes, make([]Node, grow)...)
	}
	m.Control.Nodes = nodes[:count]
	for i := range m.Control.Nodes {
		if err := m.Control.Nodes[i].get(b[i*nodeSize:][:nodeSize]); err != nil {
			err.Field = nodeField(i, err.Field)
			return err
		}
	}
	return nil
}

func (n *Node) get(b []byte) *FieldError {
	name := b[nodeOffHostname:][:hostnameSize]
	end := slices.Index(name, 0)
	if end < 0 {
		return &FieldError{"hostname", fmt.Sprintf("%q", name), fmt.Sprintf("at most %d bytes and a zero", MaxHostnameLen)}
	}
	numPorts := get32(b, nodeOffNumPorts)
	if numPorts < 0 || numPorts > MaxPorts {
		return &FieldError{"num_ports", numPorts, fmt.Sprintf("0 to %d", MaxPorts)}
	}
	endpoint := le.Uint64(b[nodeOffEndpointLen:])
	if endpoint > MaxEndpointName {
		return &FieldError{"endpoint_name_len", endpoint, fmt.Sprintf("0 to %d", MaxEndpointName)}
	}
	var err *FieldError
	if n.IsRecovery, err = getBool(b, nodeOffIsRecovery, "is_recovery"); err != nil {
		return err
	}
	if n.Hostname != string(name[:end]) { // an equal string is not allocated again
		n.Hostname = string(name[:end])
	}
	n.Role = Role(get32(b, nodeOffRole))
	n.ID = int(get32(b, nodeOffID))
	n.Ports = get32s(n.Ports, b[nodeOffPorts:], int(numPorts))
	n.Port = int(get32(b, nodeOffPort))
	n.DevTypes = get32s(n.DevTypes, b[nodeOffDevTypes:], int(numPorts))
	n.DevIDs = get32s(n.DevIDs, b[nodeOffDevIDs:], int(numPorts))
	n.CustomerID = int(get32(b, nodeOffCustomerID))
	n.Endpoint = append(n.Endpoint[:0], b[nodeOffEndpoint:][:endpoint]...)
	n.AuxID = int(get32(b, nodeOffAuxID))
	return nil
}

func (t *Trace) get(b []byte) {
	t.PreStart = le.Uint64(b[traceOffPreStart:])
	t.Start = le.Uint64(b[traceOffStart:])
	t.PostSend = le.Uint64(b[traceOffPostSend:])
	t.PostRecv = le.Uint64(b[traceOffPostRecv:])
	t.Process = le.Uint64(b[traceOffProcess:])
}

func put32(b []byte, off int, v int32) { le.PutUint32(b[off:], uint32(v)) }

func get32(b []byte, off int) int32 { return int32(le.Uint32(b[off:])) }

func put32s(b []byte, vs []int32) {
	for i, v := range vs {
		put32(b, 4*i, v)
	}
}

func get32s(dst []int32, b []byte, n int) []int32 {
	dst = dst[:0]
	for i := range n {
		dst = append(dst, get32(b, 4*i))
	}
	return dst
}

func putBool(b []byte, off int, v bool) {
	if v {
		b[off] = 1
	}
}

func getBool(b []byte, off int, field string) (bool, *FieldError) {
	if v := b[off]; v > 1 {
		return false, &FieldError{field, v, "0 or 1"}
	}
	return b[off] == 1, nil
}

func devType(b []byte, off int) backend.DeviceType { return backend.DeviceType(get32(b, off)) }
