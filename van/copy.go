package van

// Deep copies of a Meta that reuse the destination's memory.

// CopyFrom makes m a deep copy of src. It reuses the capacity of m's slices, so
// that copying into the same Meta repeatedly does not allocate.
func (m *Meta) CopyFrom(src *Meta) {
	body, types, nodes := m.Body[:0], m.DataTypes[:0], m.Control.Nodes[:0]
	*m = *src
	m.Body = append(body, src.Body...)
	m.DataTypes = append(types, src.DataTypes...)
	for i := range src.Control.Nodes {
		if len(nodes) < cap(nodes) {
			nodes = nodes[:len(nodes)+1]
		} else {
			nodes = append(nodes, Node{})
		}
		nodes[i].copyFrom(&src.Control.Nodes[i])
	}
	m.Control.Nodes = nodes
}

func (n *Node) copyFrom(src *Node) {
	ports, types, ids, endpoint := n.Ports[:0], n.DevTypes[:0], n.DevIDs[:0], n.Endpoint[:0]
	*n = *src
	n.Ports = append(ports, src.Ports...)
	n.DevTypes = append(types, src.DevTypes...)
	n.DevIDs = append(ids, src.DevIDs...)
	n.Endpoint = append(endpoint, src.Endpoint...)
}
