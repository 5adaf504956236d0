package van

// The node record extension: data of nodes of this library that travels in the endpoint field
// of a node record, since C++ StepMesh has no fields for it.

// NodeExtension extends the node record of a node of this library. It travels in the record's endpoint
// field, which C++ StepMesh nodes pass on without reading it. A record without an extension belongs to a
// C++ StepMesh node.
type NodeExtension struct {
	// Incarnation distinguishes the processes that have had the same node id: a random
	// number other than 0, chosen when the node starts.
	Incarnation uint32
	// Cluster is the cluster's id; 0 is none. Only the scheduler's record must have it.
	Cluster uint32
	// Settings are compared by the scheduler.
	Settings Settings
	// DataPort is the TCP port where the node accepts data of nodes of this library; 0 is none.
	DataPort uint16
	// Local is the endpoint of the transport between processes of one host; nil is none. After
	// ParseExtension it shares the endpoint's memory.
	Local []byte
}

// Settings are the settings that must agree on all nodes. A cluster in which they differ works at
// first and fails later.
type Settings struct {
	Known  bool // false: the node has not sent its settings, and the other fields are meaningless
	Resend bool // PS_RESEND
	TLS    bool // STEPAF_TLS
	// Workers and Servers are DMLC_NUM_WORKER and DMLC_NUM_SERVER, each times DMLC_GROUP_SIZE.
	// 0: the node has not sent the number, or it is greater than MaxCount.
	Workers, Servers int
}

// MaxCount is the largest number of workers or servers that Settings carries.
const MaxCount = 1<<14 - 1

// Layout of an endpoint field.
//
//	0  char[4]  "SAFN"      8  u32  incarnation   16  u32   1 settings known, 2 resend, 8 TLS; 14 bits of workers from bit 4, of servers from bit 18
//	4  u32      version    12  u32  cluster       20  u16   data port
//	                                              22  u8[2] 0
//	                                              24  u8[]  local
const (
	extensionMagic = "SAFN"
	extensionLen   = 24

	settingsKnown  = 1
	settingsResend = 2
	settingsTLS    = 8
	workersAt      = 4
	serversAt      = 18
)

// MaxLocalLen is the maximum length of NodeExtension.Local in bytes.
const MaxLocalLen = MaxEndpointName - extensionLen

// Encode returns the encoded extension. A Local longer than MaxLocalLen is omitted.
func (x *NodeExtension) Encode() []byte {
	local := x.Local
	if len(local) > MaxLocalLen {
		local = nil
	}
	b := make([]byte, 0, extensionLen+len(local))
	b = append(b, extensionMagic...)
	b = le.AppendUint32(b, ExtensionVersion)
	b = le.AppendUint32(b, x.Incarnation)
	b = le.AppendUint32(b, x.Cluster)
	b = le.AppendUint32(b, x.Settings.flags())
	b = le.AppendUint32(b, uint32(x.DataPort))
	return append(b, local...)
}

func (s *Settings) flags() (f uint32) {
	if s.Known {
		f |= settingsKnown
	}
	if s.Known && s.Resend {
		f |= settingsResend
	}
	if s.Known && s.TLS {
		f |= settingsTLS
	}
	if s.Known && max(s.Workers, s.Servers) <= MaxCount {
		f |= uint32(s.Workers)<<workersAt | uint32(s.Servers)<<serversAt
	}
	return f
}

// ExtensionVersion is the version of this library's protocol between nodes.
const ExtensionVersion = 6

// ExtensionVersionOf returns the version of the extension in the endpoint field of a node record,
// also if ParseExtension cannot read that version. It returns false for a C++ StepMesh node.
func ExtensionVersionOf(endpoint []byte) (version uint32, ok bool) {
	if len(endpoint) < 8 || string(endpoint[:4]) != extensionMagic {
		return 0, false
	}
	return le.Uint32(endpoint[4:]), true
}

// ParseExtension decodes the endpoint field of a node record. It returns false if the field has no
// extension of this version.
func ParseExtension(endpoint []byte) (x NodeExtension, ok bool) {
	if len(endpoint) < extensionLen || len(endpoint) > MaxEndpointName || string(endpoint[:4]) != extensionMagic ||
		le.Uint32(endpoint[4:]) != ExtensionVersion || le.Uint32(endpoint[8:]) == 0 {
		return x, false
	}
	x.Incarnation, x.Cluster = le.Uint32(endpoint[8:]), le.Uint32(endpoint[12:])
	f := le.Uint32(endpoint[16:])
	if f&settingsKnown != 0 {
		x.Settings = Settings{Known: true, Resend: f&settingsResend != 0, TLS: f&settingsTLS != 0,
			Workers: int(f >> workersAt & MaxCount), Servers: int(f >> serversAt & MaxCount)}
	}
	x.DataPort = le.Uint16(endpoint[20:])
	if len(endpoint) > extensionLen {
		x.Local = endpoint[extensionLen:]
	}
	return x, true
}

// Extension returns the extension in n's endpoint field; false says that n is a C++
// StepMesh node.
func (n *Node) Extension() (NodeExtension, bool) { return ParseExtension(n.Endpoint) }

// SetIncarnations sets the incarnations of the sending and of the receiving process.
// 0 is unknown; both are 0 towards C++ StepMesh nodes. They travel in every message, in
// the request trace's PreStart, which C++ StepMesh does not use.
func (m *Meta) SetIncarnations(from, to uint32) {
	m.RequestTrace.PreStart = uint64(to)<<32 | uint64(from)
}

// Incarnations returns the incarnations that SetIncarnations has set. They are valid only if the
// sender is known to be a node of this library, or if to is the receiving process: C++ StepMesh
// nodes never set the field to that value.
func (m *Meta) Incarnations() (from, to uint32) {
	return uint32(m.RequestTrace.PreStart), uint32(m.RequestTrace.PreStart >> 32)
}
