// Package window lets nodes of one role write into each other's memory and signal each other: one-sided
// communication, in which the receiver makes no call. C++ StepMesh has nothing like it, so all ranks must be
// nodes of this library.
//
// A Window belongs to a communicator of af/collective; all ranks of the communicator open it together.
// Comm.AllGatherBytes gives small values of every rank to all others, such as addresses or keys.
//
//	w, err := window.Open(ctx, comm, window.Options{Size: 1 << 20, Signals: 2})
//	err = w.PutSignal(ctx, 1, 4096, tensor, 0) // on rank 0
//	err = w.WaitSignal(ctx, 0, 0)              // on rank 1: w.Bytes()[4096:] is complete
//
// # Guarantees
//
// The guarantees are the same on all transports; device windows are described below.
//
//   - The library uses the source of a Put or PutSignal until Flush to that rank, or Close, has returned.
//   - Flush to a rank returns when everything that was put there before is in the rank's memory, and all signals
//     are counted.
//   - Puts and signals to one rank in one window take effect in call order. When WaitSignal has returned, the
//     data of the PutSignal, and everything that was put there before the signal, is complete and visible to the
//     waiting goroutine. Different ranks, and different windows, are not ordered.
//   - A Put without a signal becomes visible at any time, in any order of its bytes. A program that reads this
//     memory before a signal has a data race.
//   - Each Signal or PutSignal adds one to that signal of its sender at its receiver; each successful WaitSignal
//     subtracts one. No signal is lost or counted twice; a signal without a waiter is kept. A WaitSignal that
//     fails has consumed none.
//   - A Put waits while 128 messages or more than 32 MiB to that rank are unprocessed.
//
// # Access control
//
// Only the receiver writes to its memory: it copies received data after it has checked the epoch and number of
// the window, and the message's number, offset, length and signal. A put beyond the window's end is an error at
// the sender. The receiver refuses and counts (Window.Refused) invalid puts, and messages of replaced processes,
// of earlier windows, and of nodes that are not ranks. When Close has returned, nothing is written any more. On
// RDMA this costs a copy, and saves a rendezvous for each window and offset.
//
// # Errors
//
// A window fails on all ranks when its communicator fails: when a rank is lost (postoffice.ErrPeerLost, with the rank's
// name), or a call of the communicator fails. After Rebuild, windows must be opened again. Signals that a lost
// rank sent before its loss can still be waited for. All waits have the communicator's limit unless ctx has a
// deadline; a wait that times out fails alone. A rank that closes its window flushes its puts first. Later calls
// of other ranks towards it fail with postoffice.ErrClosed; other calls continue.
//
// # Device windows
//
// With Options.Device, the memory is on the ranks' GPUs, which must be in one host with access to each other.
// Otherwise Open returns an error with the reason on all ranks, and the program should open the window on the
// host. Each call may name a stream.
//
//	w, err := window.Open(ctx, comm, window.Options{Size: 1 << 20, Signals: 1, Device: true})
//	err = w.PutSignal(ctx, 1, 4096, tensor, 0, stream) // on rank 0
//	err = w.WaitSignal(ctx, 0, 0, stream)              // on rank 1: later work of the stream finds the data in w.Tensor()
//
// A Put is a copy by the stream into the receiver's memory. A signal is a flag that the stream writes there
// after the copy, and a second flag in the receiver's host memory, for waits without a stream. There is no
// message and no kernel, and the CPU only queues work. The guarantees are those above, with these differences:
//
//   - Put, PutSignal and Signal return at once, also without a stream, which means the default stream. The
//     source is the caller's for later work of that stream; elsewhere, when Flush to that rank has returned, or
//     after a Flush in another stream. A host memory source must be pinned by the node's backend.
//   - Calls to one rank in several streams keep their order: a stream waits for earlier puts, but not for later
//     work of their streams. A stream must therefore exist until its puts are done.
//   - A WaitSignal in a stream has no time limit. When the window ends, the stream continues: its data is valid
//     if Check returns nil after the stream has done its work. Streams consume signals in call order, before
//     calls that wait on the host.
//   - A call waits while its stream is full. In a stream of the program it continues at the end of the window at
//     the latest. In the default stream (af.DefaultStream) it may not: while a launch is blocked because that
//     stream is full, the driver does not execute the write that would release it. If the default stream is full
//     and a rank is lost, the process hangs. Use another stream.
//   - Streams that are being captured into graphs are refused, since each signal is counted. Package af/streams
//     supports capture.
//   - The library owns the memory, see Window.Tensor. The sender executes a put, so a stale or lost rank may
//     still write to the memory of this window. The memory is therefore not reused; it and its mappings last
//     until the node's backend is closed. If Open fails before any rank has offered its memory, the memory is
//     freed, unless streams of the process may wait, since the driver would wait for them.
//   - A window ends on all ranks when it fails. It also ends when a rank closes it while a stream of another
//     rank waits for a signal of it that has not arrived, or while a stream of its own waits; Close releases
//     that stream first. Waiting streams are released when all ranks have confirmed the end, are lost, or have
//     not answered for 10 seconds.
//
// This package is experimental: its API may change between minor versions.
package window
