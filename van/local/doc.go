// Package local carries data messages between nodes of one host through shared
// memory. It is a van wrapped around the main one (zmq, ibverbs), which keeps all
// control messages, and the data of peers that are on another host or not native.
//
// # Reachable peers
//
// A node adds a token to its identity (van.NodeExtension), which is part of its node record. The token names the host,
// the namespaces, the user, and an abstract Unix socket. If the token of a peer has this node's host,
// namespaces and user, this node dials that socket before it sends its first data message to the
// peer.
//
// # Links
//
// A link has one direction, like a connection of the main van. The sender creates
// its segment, a sealed memfd: a page of indices and a ring of records, mapped
// twice in a row so that no record is ever split. The sender passes the memfd over the socket. The
// socket also shows the death of the peer: its connection breaks. Nothing has a name in the file
// system, so a process that dies leaves no files.
//
// At first only 56 KiB of a ring are allocated. If a record does not fit after the last one, it begins at the start of the ring,
// provided that the receiver has consumed the records there. Otherwise the ring grows, up to 2 MiB. The sender allocates memory before
// it writes to it (fallocate), so a lack of memory is an error of a call, not a SIGBUS. A ring that gets no more memory stays
// shorter. A node has STEPAF_SHM_BUDGET bytes for its rings. Each ring is granted 256 KiB, in which any record fits.
// If the budget has less left, the peer gets its data over the main van.
//
// A record has a message's meta and its data frames. Small parts are in the record.
// Large parts follow as a stream of chunks: the receiver copies one chunk straight to the
// destination of the value while the sender copies the next chunk into the ring. The ring stays
// in the processors' caches, so main memory sees each byte read once and
// written once. The destination is the memory that the pull request has
// named in Message.Into, the buffer registered for the push, or a reusable buffer of
// this package, which is handed up without a copy. Buffers that the traffic does not need any more
// are returned to the system.
//
// If the receiver does not keep up, the sender does not wait for it. The rest of the stream
// stays pinned, and the receiver reads it from the sender's memory (process_vm_readv). That
// is one copy, but it goes through the kernel page by page and takes, on the
// machines measured, longer than two copies through the ring. The sender's memory is pinned
// until the receiver has acknowledged the record. If the kernel does not allow reading
// another process, the rest waits for free space in the ring.
//
// Only the receiver writes to its memory, unless the memory is mapped (see below). A late answer or a faulty peer can
// therefore overwrite nothing, and Invalidate needs no answer of a peer.
//
// # Mapped tensors
//
// With STEPAF_SHM_MAP a server maps the allocations of van/hostmem in which tensors of a worker lie. It reads pushed values
// there, and writes answers there. It can write to all of such an allocation. Invalidate gives the allocation of a pull tensor
// another file, so a late answer changes nothing. It does not protect pushed tensors from a faulty server.
//
// # Waiting
//
// A node has one doorbell, a page with futex words that its peers also map. The
// waiter polls all its links for a while and yields its core meanwhile. Then it sets a flag
// and sleeps. Peers make the system call that wakes it only if the flag is set.
// The time of polling is adapted to the length of the last waits. A caller of
// Poll sleeps on the doorbell itself, in place of the receiving goroutine, which saves a
// second wake-up.
//
// # Replaced processes
//
// The scheduler informs the two ends of a link one after the other. Messages that a peer
// sends before this node knows it wait, for holdTime at most. They are therefore never mistaken for messages of
// the lost node that the peer replaces.
//
// When Connect names another process for a node, this node accepts no more messages of the former
// process, even if that was only stopped and continues: its links end, its undelivered messages are
// dropped, and its next hello is refused with the reason. The former process does not fall back to
// the main van, and its Sends fail.
//
// # Limits
//
// If the messages of a peer wait for a slow handler, they are received until they use
// STEPAF_RECV_BUDGET_PEER bytes of this node's memory. Then the peer's ring fills, and further messages
// stay pinned, streamed or queued in the sender. If these have STEPAF_SEND_BUDGET bytes or more,
// Send waits while the receiver is consuming data, and then fails. Below the budget it accepts a
// message of any length. A batch counts as one message.
//
// # Making links
//
// Connect and Disconnect do not wait for the peer. When a node sends its first data message to any peer, it
// makes its links to all peers at once: a node that sends no data shares no memory. A data message waits, for linkTime at
// most, until the link to its peer is made or has failed.
//
// If a link cannot be made, data to that peer goes over the main van, and the link is retried later: see van/links.
//
// A peer whose link broke counts as lost until it has made another link, three times at most. A peer that
// makes no other link sends over the main van; it counts as lost until its process has outlived the
// link by returnTime.
//
// # Trust
//
// Peers are processes of the same user; both ends check that with the kernel. Still,
// a node does not trust the data that they write: indices are checked against the ring at each
// use, and a record is copied before it is read. Invalid data ends the link
// and has no other effect. A segment cannot shrink while it is mapped (seals).
//
// If the cluster has a secret, both ends prove that they know it before a descriptor is handed over: see prove.go. A peer
// that does not is refused (STEPAF_AUTH=require), and its data goes over the main van, which asks for a proof of its own; or it is
// admitted, counted and logged (warn).
//
// # Devices
//
// A value on the sender's device is not copied by the sender: its record names the allocation
// (a CUDA IPC handle) and the offset in it. The receiver maps the allocation once. On its own
// stream it queues the copy to the destination of the value, and then an event, which
// the stream writes into the receiver's host memory. No CPU is involved between the end of the
// copy and that event. Later messages wait in order meanwhile, and their
// copies are queued, too. The memory stays pinned until the receiver acknowledges the record, as above.
//
// If a value lies in several allocations, which the driver has mapped next to each other,
// its record has a list of them. Such an allocation has a descriptor instead of a handle. The descriptor is
// passed once, over the link's socket; the sender reports when the allocation is not used any more. See
// export.go and imports.go.
//
// The copy by the receiver costs a microsecond in each direction, because the receiver must notice the
// record before the copy starts. In return, only the receiver writes to its memory, also on
// devices. A sender that writes into memory mapped from its peer cannot
// be stopped when the peer cancels a request and reuses the memory. It also
// needs slots, credits and a rendezvous before each new size, as RDMA does.
//
// When the link is made, the receiver maps the sender's device memory and reads a few bytes of it. If
// that fails, for example without peer access, both ends log the cause, and van/stage
// copies values through host memory. It does the same with single values that the driver
// cannot share.
//
// A mapping keeps the sender's memory allocated, even after the sender has freed it. It therefore ends when
// it was not used for a while, when another allocation has its address, and with the
// link. While a stream may wait for a message, it ends only with the van: see
// backend.StreamBlocker. When a peer dies, the link waits for running copies and drops their results.
//
// # Files
//
// From the bottom up:
//
//   - token, segment, bell, record, export and remote: layouts and system calls
//   - blocks, pins, offers and requests: one table each
//   - inring and outring: the two ends of a ring
//   - inlink, outlink and send: the use of a ring by a link
//   - exported and imported: mapped tensors
//   - device, imports and peerdevice: copies between devices
//   - peers and inlinks: the set of links; van/links decides which are made and read
//   - dial and accept: making links
//   - receive: the engine's source
//   - van: the whole transport
package local
