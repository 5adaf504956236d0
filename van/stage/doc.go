// Package stage lets tensors on a device travel over a transport that knows host
// memory only, such as zmq: it is a van around that van.
//
// A value on its way out is copied into a pinned host buffer, and that is lent to the
// transport, which sends while the next value is copied. A pushed value whose sender
// says that it belongs on a GPU is copied into device memory when it comes in, before
// it is handed up: into the registered buffer, or into one of the library's. A value
// that answers a pull stays in host memory, since who pulled knows its place and copies
// it there itself. What is on the wire is the same as from a C++ node.
//
// A value is one frame on the wire, so a transport cannot begin to send before the
// whole of it has been copied.
package stage
