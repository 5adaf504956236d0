// Package stage wraps a van for host memory, such as zmq, so that tensors on a device can
// be sent over it.
//
// A value to be sent is copied into a pinned host buffer, which is lent to the
// transport; it sends while the next value is copied. A received push whose sender names
// a GPU as its destination is copied into device memory before it is delivered: into the
// registered buffer, or into one of the library's. A value that answers a pull stays in
// host memory; the puller knows its destination and copies it there. The bytes on the
// wire are the same as from a C++ node.
//
// A value is one frame on the wire, so sending begins only when all of it has been
// copied.
package stage
