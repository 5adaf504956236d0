// Package local carries data messages between nodes of one host through shared
// memory. It is a van wrapped around the main one (zmq, ibverbs), which keeps all
// control messages, and the data of peers that are on another host or not native.
//
// # Who uses it
//
// A node adds a token to its identity (van.NodeExtension), which travels in its node record: host, namespaces, user, and the
// name of an abstract Unix socket. The node dials that socket if the token is of
// this host, these namespaces and this user, before the first data message to the
// peer is sent.
//
// # Links
//
// A link has one direction, as a connection of the main van has. The sender makes
// its segment, a sealed memfd: a page of indices and a ring of records, mapped
// twice in a row so that no record is ever split. It travels over the socket, whose
// other use is to break when its peer dies. Nothing has a name in the file system:
// whatever dies, nothing is left behind.
//
// At first only 56 KiB of a ring are allocated. If a record does not fit after the last one, it begins at the start of the ring,
// provided that the receiver has consumed the records there. Otherwise the ring grows, up to 2 MiB. The sender allocates memory before
// it writes to it (fallocate), so a lack of memory is an error of a call, not a SIGBUS. A ring that gets no more memory works as a shorter
// one. A node has STEPAF_SHM_BUDGET bytes for its rings. Each ring is granted 256 KiB, in which any record fits.
// If the budget has less left, the peer gets its data over the main van.
//
// A record is a message's meta and its data frames. Small parts are in the record.
// Large ones stream behind it in chunks: the receiver copies one out, straight to
// where the value is wanted, while the sender copies the next one in. The ring stays
// in the processors' caches, so that main memory sees each byte read once and
// written once. Where the value is wanted is the memory that the pull request has
// named in Message.Into, the buffer registered for the push, or else a buffer of
// this package that is used again, which is handed up as it is. Such buffers go back
// to the system when the traffic does not need as many any more.
//
// When the receiver does not keep up, the sender does not wait for it: what is left
// stays pinned, and the receiver reads it from the sender's memory (process_vm_readv),
// which is one copy, but goes through the kernel page by page and takes, on the
// machines seen, longer than two through the ring. The sender's memory is pinned
// until the receiver has acknowledged the record. Where the kernel does not allow reading
// another process, what is left waits for room in the ring.
//
// Only the receiver ever writes to its memory, so a late answer, or a peer gone mad,
// can overwrite nothing, and Invalidate needs no answer of a peer.
//
// # Waiting
//
// A node has one doorbell, a page with futex words that its peers map, too. The
// waiter polls all its links for a while, yielding its core, then raises a flag
// and sleeps; peers make the system call that wakes it only when the flag is up.
// How long to poll is adapted to how long the last waits were. A caller of
// Poll sleeps there itself, in place of the receiving goroutine, which saves a
// second wake-up.
//
// # When a peer's messages are taken
//
// The scheduler tells both ends of each other, one before the other. What a peer
// sends before this node has been told of it waits, for holdTime at most; so none of its
// messages is taken for one of the lost node whose place it takes.
//
// When Connect names another process for a node, nothing more is taken from the one before,
// also not if it was only stopped and wakes up: its links end, what has not been handed up
// is dropped, and its next hello is refused. It is told why, does not turn to
// the main van, and its Sends fail.
//
// # Bounds
//
// A peer whose messages wait for a slow handler is read until they take
// STEPAF_RECV_BUDGET_PEER bytes of this node's memory. Then its ring fills, and what it
// sends beyond that stays pinned, streamed or queued at its end. From STEPAF_SEND_BUDGET bytes
// on Send fails, unless the peer is just taking some: then Send waits. What continues a
// request is taken all the same, and so is a message of any length before.
//
// # Making links
//
// Connect and Disconnect do not wait for the peer. When a node sends its first data message, to whichever peer, it
// makes its links to all peers at once: a node that sends no data shares no memory. A data message to a peer waits, for linkTime at
// most, until it is settled whether there is a link.
//
// A peer whose link cannot be made gets its data over the main van, and the link is tried again later: see retry.go.
//
// A peer whose link broke is lost until it has made another one, three times at most, or,
// since it sends over the main van then, until its process has outlived the link by
// returnTime.
//
// # Trust
//
// Peers are processes of the same user (the kernel says so at both ends). Still
// nothing they write is believed: indices are checked against the ring at each
// use, a record is copied before it is read, and what makes no sense ends the link
// and nothing else. A segment cannot shrink while it is mapped (seals).
//
// If the cluster has a secret, both ends prove that they know it before a descriptor is handed over: see prove.go. A peer
// that does not is refused (STEPAF_AUTH=require), and its data goes over the main van, which asks for a proof of its own; or it is
// admitted, counted and logged (warn).
//
// # Devices
//
// A value on the sender's device stays where it is: its record names the allocation
// (a CUDA IPC handle), and the place in it. The receiver maps the allocation, once, and
// queues on a stream of its own the copy to where the value is wanted, and an event behind
// it, which that stream writes into the receiver's own host memory: between the end of the
// copy and its notice there is no CPU. Messages behind it wait in order meanwhile, their
// copies are queued, too. The memory is pinned as above: until the receiver acknowledges.
//
// A value that lies in several allocations, which the driver has mapped next to each other,
// has a list in its record. Such allocations have no handle but a descriptor, which travels
// once, over the link's socket; the sender says when it is not used any more. See
// export.go and imports.go.
//
// That the receiver copies, and not the sender, costs a microsecond each way: the sender's
// record must be noticed before the copy begins. It buys that, here too, only the receiver
// ever writes to its memory. A sender that writes into memory mapped from its peer cannot
// be stopped when the peer gives up a request and uses the memory for something else, and
// needs slots, credits and a rendezvous before each new size, as RDMA does.
//
// When the link is made, the receiver maps and reads a few bytes of the sender's device:
// where that does not work, for want of peer access, say, both log why, and van/stage
// takes values through host memory. It also does so with single values that the driver
// does not share.
//
// A mapping keeps the sender's memory, also after the sender has freed it, so it ends when
// it was not used for a while, when its address is another allocation's, and with the
// link. While a stream may wait for a message it does not end before the van: see
// backend.StreamBlocker. When a peer dies the copies under way are waited for, and their results dropped.
//
// # Files
//
// From the bottom: token, segment, bell, record, export and remote know the layouts and the
// system calls; destinations, blocks, pins, offers and requests each own one table; inring
// and outring are the two ends of a ring, inlink and send what a link does with it; device,
// imports and peerdevice copy between devices; peers and fence own which links there are;
// dial and accept make them; receive is the engine's source; van puts all together.
package local
