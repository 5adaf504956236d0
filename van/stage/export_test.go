package stage

// Counts returns the numbers of values copied, of values sent without pinned memory, and
// of received values left in host memory because they could not be copied to the device.
func (v *Van) Counts() (staged, unpinned, refused uint64) {
	return v.staged.Load(), v.unpinned.Load(), v.refused.Load()
}
