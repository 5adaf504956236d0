// Package window lets nodes of one role write into each other's memory and signal that they have:
// one-sided communication, where who is written to makes no call for it. C++ StepMesh has nothing
// like it, so all ranks must be nodes of this library.
//
// A Window belongs to a communicator of af/collective, which all its ranks have made; they open it together.
// Exchange tells every rank a small value of each other one, as an address or a key.
//
//	w, err := window.Open(ctx, comm, window.Options{Size: 1 << 20, Signals: 2})
//	err = w.PutSignal(ctx, 1, 4096, tensor, 0) // on rank 0
//	err = w.WaitSignal(ctx, 0, 0)              // on rank 1: w.Bytes()[4096:] is there
//
// # Guarantees
//
// They are the same on all transports; for windows on devices see below.
//
//   - The source of a Put or PutSignal is the library's until Flush to that rank, or Close, has returned.
//   - Flush to a rank returns when all that was put there before is in its memory, and all signals are counted.
//   - Puts and signals to one rank in one window take effect in the order of their calls. So when WaitSignal
//     has returned, the data of the PutSignal, and all that was put there before the signal, is whole
//     and visible to the goroutine that has waited. Ranks, and windows, have no order among each other.
//   - A Put without a signal becomes visible at some time, in any order of its bytes: who reads that memory
//     before a signal reads while it is written, which is a data race.
//   - Each Signal or PutSignal adds one to that signal, which is one of its sender's at its receiver; each WaitSignal
//     that succeeds takes one. None is lost, none counts twice, and one that came before its waiter
//     is kept. A WaitSignal that fails has taken none.
//   - A Put waits while 128 messages or more than 32 MiB to that rank have not been taken.
//
// # What others may write
//
// Only the receiver writes to its memory: it copies what has come, after it has checked epoch and number of the
// window, the message's number, offset, length and signal. A put beyond the window's end is an error
// where it is put, and one that comes all the same is refused and counted (Window.Refused), as are messages
// of processes that have been replaced, of earlier windows, and of who is no rank.
// When Close has returned nothing is written any more. On RDMA this costs a copy, and saves a rendezvous for each
// window and place.
//
// # Errors
//
// A window fails on all ranks when its communicator does: when a rank is lost (van.ErrPeerLost, with its name), or a
// call of the communicator fails. After Rebuild windows are opened anew. What a rank had signalled
// before it was lost can still be waited for. All waits have the communicator's limit unless ctx has a
// deadline; a wait that is too late fails alone. A rank that closes its window, after what it has put has
// arrived, makes later calls of others towards it fail with van.ErrClosed, and those only.
//
// # On devices
//
// With Options.Device the memory lies on the ranks' GPUs, which must be of one host and reach each other: if they
// do not, Open is an error on all ranks that says why, and the window is to be opened on the host. Each call may name a stream.
//
//	w, err := window.Open(ctx, comm, window.Options{Size: 1 << 20, Signals: 1, Device: true})
//	err = w.PutSignal(ctx, 1, 4096, tensor, 0, stream) // on rank 0
//	err = w.WaitSignal(ctx, 0, 0, stream)              // on rank 1: what is put into the stream from here on finds it in w.Tensor()
//
// A Put is a copy that the stream makes into the receiver's memory, a signal a word that it writes there behind it, and another one in a page of the
// receiver's host, for waits that name no stream: no message, no kernel, and the CPU only queues. The guarantees are those of above, with these differences:
//
//   - Put, PutSignal and Signal return at once, also without a stream, which is the default one then. In their stream the source is the caller's again
//     behind them; elsewhere when Flush to that rank has returned, or behind a Flush in another stream. Host memory is a source
//     only if it is pinned by the node's backend.
//   - Calls to one rank in several streams keep their order: a stream waits for the puts before, and for nothing that was put into their streams
//     since. So a stream must exist until what was put in it is done.
//   - A WaitSignal in a stream has no limit of time. When the window is over the stream goes on: what it has waited for is whole
//     and right if Check returns nil when the stream has done its work. Streams take signals in the order of the calls, before
//     calls that wait themselves.
//   - A call waits when its stream has no room for more. In a stream of one's own it goes on with the window's end at the latest. In the default
//     stream (af.DefaultStream) nothing does: behind a launch that waits for room there the driver lets nobody write the word that would
//     make it go on. Where more is put into it than it has room for, and a rank is lost, the process hangs. Use a stream of your own.
//   - Streams that are being captured into graphs are refused: each signal is counted. Package af/streams can be captured.
//   - Memory is the library's, see Window.Tensor. A put is made by its sender, so what a stale or lost rank may still write
//     is the memory of this window, which is never given to anybody else, nor used for another window; it and the
//     mappings of it last until the node's backend is closed. Where Open fails before any rank has offered its memory, it is freed,
//     unless streams of the process may wait, since the driver would wait for them.
//   - A window is over on all ranks when it fails, also when a rank closes it while a stream of another one waits for a signal that has not come, or while one
//     of its own waits: Close lets that go first. Streams that wait go on when all ranks know, or are lost, or have said nothing for 10 seconds.
//
// This package is experimental: its API may change between minor versions.
package window
