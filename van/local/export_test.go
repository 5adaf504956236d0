package local

// StreamOnly makes v work as where reading other processes is forbidden.
func StreamOnly(v *Van) { v.streamOnly = true }
