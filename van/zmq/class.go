package zmq

// Traffic classes: the DSCP of the packets to a peer. This file sets it on the sockets that libzmq has opened.
// libzmq itself would apply a class only to later connections, and one class to all connections of the ROUTER.

// SetTrafficClasses implements van.TrafficClassSetter.
func (v *zvan) SetTrafficClasses(classes map[int]int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.classes.Swap(&classes)
	for id, c := range *v.peers.Load() {
		class, now := classes[id]
		before := now
		if old != nil && !now {
			_, before = (*old)[id]
		}
		if !before {
			continue
		}
		if s := c.link.Load(); s != nil {
			s.setClass(class) // 0: the system's
		}
		for _, s := range v.guard.of(c) { // the ROUTER's, for the answers of a server
			s.setClass(class)
		}
	}
}

// TrafficClassApplied implements van.TrafficClassSetter. Unix sockets have no classes. Without the guard, the van does not
// know which peer a connection of the ROUTER belongs to. A connection that is not made yet will have its class.
func (v *zvan) TrafficClassApplied(id int) (now, ever bool) {
	c := (*v.peers.Load())[id]
	if c == nil {
		return false, true
	}
	answers := c.answersOverRouter()
	if v.cfg.Local || answers && v.guard == nil {
		return false, false
	}
	class, _ := v.classOf(c)
	s := c.link.Load()
	if c.sock != nil && (s == nil || !s.hasClass(class)) {
		return false, true
	}
	accepted := v.guard.of(c)
	for _, s := range accepted {
		if !s.hasClass(class) {
			return false, true
		}
	}
	return len(accepted) > 0 || !answers, true
}
