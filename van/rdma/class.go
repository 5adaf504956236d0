package rdma

// This file owns the traffic classes of peers. The class of a queue pair's packets is fixed when it connects, so a change takes effect
// with the next connection to the peer.

// unset is the class of a connection for which the provider accepts none.
const unset = -1

// SetTrafficClasses implements van.TrafficClassSetter, for connections that are made from now on.
func (v *node) SetTrafficClasses(classes map[int]int) { v.tables.classes.Store(&classes) }

// classOf returns the class of connections to a peer, 0 if none is set.
func (v *node) classOf(id int) int {
	if m := v.tables.classes.Load(); m != nil {
		return (*m)[id]
	}
	return 0
}

// TrafficClassApplied implements van.TrafficClassSetter. A node sends on the connection that it has made itself.
func (v *node) TrafficClassApplied(id int) (now, ever bool) {
	l := (*v.tables.peers.Load())[id].currentLink()
	if l == nil {
		return false, true
	}
	return l.class == v.classOf(id), l.class != unset
}
