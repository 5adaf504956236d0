package van

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/vansession"
	"github.com/stepaf/stepaf-go/van/backend"
)

// vector is a meta and its packed form by the C++ reference.
type vector struct {
	Name      string
	Meta      vectorMeta
	PackedHex string   `json:"packed_hex"`
	Unwritten [][2]int `json:"unwritten_ranges"`

	packed []byte
}

type vectorMeta struct {
	Head       int32
	BodyHex    string `json:"body_hex"`
	AppID      int32  `json:"app_id"`
	CustomerID int32  `json:"customer_id"`
	Timestamp  int32
	Request    bool
	Push       bool
	SimpleApp  bool       `json:"simple_app"`
	DataType   []DataType `json:"data_type"`
	SrcDevType int32      `json:"src_dev_type"`
	SrcDevID   int32      `json:"src_dev_id"`
	DstDevType int32      `json:"dst_dev_type"`
	DstDevID   int32      `json:"dst_dev_id"`
	DataSize   int32      `json:"data_size"`
	Key        uint64     `json:",string"`
	Addr       uint64     `json:",string"`
	ValLen     int32      `json:"val_len"`
	Option     int32
	Sid        int32
	IsTensor   int32 `json:"is_tensor"`
	Dtype      int32
	Shape      []int64
	Control    struct {
		Cmd          Command
		BarrierGroup int    `json:"barrier_group"`
		MsgSig       uint64 `json:"msg_sig,string"`
		Nodes        []struct {
			Role        Role
			ID          int
			Hostname    string
			NumPorts    int `json:"num_ports"`
			Port        int
			IsRecovery  bool    `json:"is_recovery"`
			CustomerID  int     `json:"customer_id"`
			AuxID       int     `json:"aux_id"`
			EndpointLen int     `json:"endpoint_name_len"`
			EndpointHex string  `json:"endpoint_name_hex"`
			Ports       []int32 `json:"ports"`
			DevTypes    []int32 `json:"dev_types"`
			DevIDs      []int32 `json:"dev_ids"`
		}
	}
}

// refused names the field for which a vector is not a meta that a peer may send.
//
// field_order_probe has negative values to tell signed fields from unsigned.
// add_node_multi_port_endpoint has a host name of 64 bytes, though its note says
// 63: it has no terminating zero, so the reference's reader would read on into
// num_ports.
var refused = map[string]string{
	"field_order_probe":            "val_len",
	"add_node_multi_port_endpoint": "control.node[0].hostname",
}

// shortened is add_node_multi_port_endpoint with a host name of 63 bytes.
const shortened = "add_node_multi_port_endpoint, host name of 63 bytes"

// loadVectors returns the recorded vectors and the shortened one.
func loadVectors(tb testing.TB) []vector {
	tb.Helper()
	text, err := os.ReadFile("testdata/meta_vectors.json")
	if err != nil {
		tb.Fatal(err)
	}
	var file struct{ Vectors []vector }
	if err := json.Unmarshal(text, &file); err != nil {
		tb.Fatal(err)
	}
	if len(file.Vectors) == 0 {
		tb.Fatal("no vectors")
	}
	for i := range file.Vectors {
		v := &file.Vectors[i]
		v.packed = unhex(tb, v.PackedHex)
		if v.Name == "add_node_multi_port_endpoint" {
			s := *v
			s.Name, s.packed = shortened, bytes.Clone(v.packed)
			s.packed[metaSize+nodeOffHostname+MaxHostnameLen] = 0
			s.Meta.Control.Nodes = slices.Clone(v.Meta.Control.Nodes)
			name := &s.Meta.Control.Nodes[0].Hostname
			*name = (*name)[:MaxHostnameLen]
			file.Vectors = append(file.Vectors, s)
		}
	}
	return file.Vectors
}

// loadVector returns the packed bytes of one vector.
func loadVector(tb testing.TB, name string) []byte {
	tb.Helper()
	for _, v := range loadVectors(tb) {
		if v.Name == name {
			return v.packed
		}
	}
	tb.Fatalf("no vector %q", name)
	return nil
}

// loadSessions returns all recorded sessions.
func loadSessions(tb testing.TB) []*vansession.Session {
	tb.Helper()
	files, err := filepath.Glob("testdata/sessions/*.jsonl")
	if err != nil || len(files) == 0 {
		tb.Fatalf("no sessions: %v", err)
	}
	sessions := make([]*vansession.Session, len(files))
	for i, path := range files {
		if sessions[i], err = vansession.Load(path); err != nil {
			tb.Fatal(err)
		}
	}
	return sessions
}

func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.TrimSpace(s))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// meta is the vector as a Go value. It starts from Reset, so that fields that a
// vector does not name are those of a new message.
func (v *vector) meta(tb testing.TB) *Meta {
	tb.Helper()
	j := &v.Meta
	m := &Meta{}
	m.Reset()
	m.Head, m.AppID, m.CustomerID, m.Timestamp = j.Head, j.AppID, j.CustomerID, j.Timestamp
	m.Request, m.Push, m.SimpleApp = j.Request, j.Push, j.SimpleApp
	m.Body, m.DataTypes, m.DataSize = unhex(tb, j.BodyHex), j.DataType, j.DataSize
	m.Src = backend.Device{Type: backend.DeviceType(j.SrcDevType), ID: j.SrcDevID}
	m.Dst = backend.Device{Type: backend.DeviceType(j.DstDevType), ID: j.DstDevID}
	m.Key, m.Addr, m.ValLen, m.Option, m.Sid = j.Key, j.Addr, j.ValLen, j.Option, j.Sid
	m.IsTensor, m.Dtype, m.Dim = j.IsTensor == 1, j.Dtype, int32(len(j.Shape))
	copy(m.Shape[:], j.Shape)
	m.Control.Cmd, m.Control.BarrierGroup, m.Control.MsgSig = j.Control.Cmd, j.Control.BarrierGroup, j.Control.MsgSig
	for _, n := range j.Control.Nodes {
		m.Control.Nodes = append(m.Control.Nodes, Node{
			Role: n.Role, ID: n.ID, Hostname: n.Hostname, Port: n.Port, IsRecovery: n.IsRecovery, CustomerID: n.CustomerID,
			Ports: n.Ports[:n.NumPorts], DevTypes: n.DevTypes[:n.NumPorts], DevIDs: n.DevIDs[:n.NumPorts],
			Endpoint: unhex(tb, n.EndpointHex)[:n.EndpointLen], AuxID: n.AuxID,
		})
	}
	return m
}
