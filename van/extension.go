package van

// The endpoint field of a node record, in which nodes of this library tell each other
// what C++ StepMesh has no field for.

// NodeExtension is what a node of this library says of itself in the endpoint field of its
// record. C++ StepMesh nodes pass the field on without reading it. A record without an
// identity is that of a C++ StepMesh node.
type NodeExtension struct {
	// Incarnation tells apart the processes that have had the same node id: a random
	// number other than 0, chosen when the node starts.
	Incarnation uint32
	// Cluster names the cluster. Only the scheduler's record must have it; 0 is none.
	Cluster uint32
	// Settings are those that the scheduler compares; without Known nothing is said of
	// them.
	Settings Settings
	// Bundles says that the node takes several messages of a node of this library in one
	// of libzmq's, if it uses that.
	Bundles bool
	// Local belongs to the transport between processes of one host; nil is none. After
	// ParseExtension it shares the endpoint's memory.
	Local []byte
}

// Settings of a node that must fit those of the others, since a cluster in which they do
// not works at first and fails later.
type Settings struct {
	Known  bool // false: the node said nothing of its settings, the rest means nothing
	Resend bool // PS_RESEND
	// Workers and Servers are DMLC_NUM_WORKER and DMLC_NUM_SERVER, each times
	// DMLC_GROUP_SIZE: that is what nodes must agree on. 0: the node does not say, or it is
	// more than travels (MaxCount).
	Workers, Servers int
}

// MaxCount is the largest number of workers or servers that Settings carries.
const MaxCount = 1<<14 - 1

// Layout of an endpoint field.
//
//	0  char[4]  "SAFN"      8  u32  incarnation   16  u32   1 settings known, 2 resend, 4 bundles; 14 bits of workers from bit 4, of servers from bit 18
//	4  u32      version    12  u32  cluster       20  u8[]  local
const (
	identityMagic = "SAFN"
	identityLen   = 20

	settingsKnown  = 1
	settingsResend = 2
	takesBundles   = 4 // unknown to versions that take none
	workersAt      = 4
	serversAt      = 18
)

// MaxLocalLen is how long NodeExtension.Local may be, in bytes.
const MaxLocalLen = MaxEndpointName - identityLen

// Encode returns the identity as it travels. A Local that is longer than MaxLocalLen is
// left out.
func (id *NodeExtension) Encode() []byte {
	local := id.Local
	if len(local) > MaxLocalLen {
		local = nil
	}
	b := make([]byte, 0, identityLen+len(local))
	b = append(b, identityMagic...)
	b = le.AppendUint32(b, ExtensionVersion)
	b = le.AppendUint32(b, id.Incarnation)
	b = le.AppendUint32(b, id.Cluster)
	f := id.Settings.flags()
	if id.Bundles {
		f |= takesBundles
	}
	b = le.AppendUint32(b, f)
	return append(b, local...)
}

func (s *Settings) flags() (f uint32) {
	if s.Known {
		f |= settingsKnown
	}
	if s.Known && s.Resend {
		f |= settingsResend
	}
	if s.Known && max(s.Workers, s.Servers) <= MaxCount {
		f |= uint32(s.Workers)<<workersAt | uint32(s.Servers)<<serversAt
	}
	return f
}

// ExtensionVersion is the version of what nodes of this library tell each other.
const ExtensionVersion = 2

// ExtensionVersionOf returns the version of the identity in the endpoint field of a node record,
// also of one that ParseExtension does not read. It reports false for a C++ StepMesh node.
func ExtensionVersionOf(endpoint []byte) (version uint32, ok bool) {
	if len(endpoint) < 8 || string(endpoint[:4]) != identityMagic {
		return 0, false
	}
	return le.Uint32(endpoint[4:]), true
}

// ParseExtension reads the endpoint field of a node record. It reports false when there is
// no identity in it: the node is a C++ StepMesh node.
func ParseExtension(endpoint []byte) (id NodeExtension, ok bool) {
	if len(endpoint) < identityLen || len(endpoint) > MaxEndpointName || string(endpoint[:4]) != identityMagic ||
		le.Uint32(endpoint[4:]) != ExtensionVersion || le.Uint32(endpoint[8:]) == 0 {
		return id, false
	}
	id.Incarnation, id.Cluster = le.Uint32(endpoint[8:]), le.Uint32(endpoint[12:])
	f := le.Uint32(endpoint[16:])
	if f&settingsKnown != 0 {
		id.Settings = Settings{Known: true, Resend: f&settingsResend != 0, Workers: int(f >> workersAt & MaxCount), Servers: int(f >> serversAt & MaxCount)}
	}
	id.Bundles = f&takesBundles != 0
	if len(endpoint) > identityLen {
		id.Local = endpoint[identityLen:]
	}
	return id, true
}

// Extension returns the identity in n's endpoint field; false says that n is a C++
// StepMesh node.
func (n *Node) Extension() (NodeExtension, bool) { return ParseExtension(n.Endpoint) }

// SetIncarnations marks m with the incarnations of the process that sends it and of the
// one that it is meant for; 0 is unknown, and both are 0 towards C++ StepMesh nodes.
// They travel in every message, in the request trace's PreStart, which is unused there.
func (m *Meta) SetIncarnations(from, to uint32) {
	m.RequestTrace.PreStart = uint64(to)<<32 | uint64(from)
}

// Incarnations returns what SetIncarnations has set. It means something only when the
// sender is known to be a node of this library, or to names the process that receives it: C++
// StepMesh nodes do not set the field to that.
func (m *Meta) Incarnations() (from, to uint32) {
	return uint32(m.RequestTrace.PreStart), uint32(m.RequestTrace.PreStart >> 32)
}
