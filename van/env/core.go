package env

// Which core each thread is bound to.

// Threads that STEPMESH_BIND_CPU_CORE binds, as offsets for Core.
const (
	CoreResponder = 1 // server: sends responses
	CoreReceiver  = 2 // workers and servers: receives messages
	CorePoller    = 3 // workers and servers: polls RDMA completions
	CoreSender    = 4 // worker: sends push and pull requests
)

// Core returns the core for the thread with that offset, by C++ StepMesh's formula, which
// assumes two GPUs on each half of two sockets. Offsets beyond the cores of a GPU get the
// last of them. It is -1, no binding, when GPU is negative. The core need not exist.
func (c *Config) Core(offset int) int {
	if c.GPU < 0 {
		return -1
	}
	perGPU, socket := c.CPUCoresPerGPU, c.CPUCoresPerSocket
	base := c.GPU*perGPU + c.CPUStartOffset + min(offset, perGPU-1)
	switch c.GPU / 2 {
	case 0:
		return base
	case 1:
		return base + socket/2 - 2*perGPU
	case 2:
		return base + socket - 4*perGPU
	default:
		return base + socket/2*3 - 6*perGPU
	}
}
