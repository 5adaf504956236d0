// Package links keeps the peers of a transport that wraps another one, and its links to and from them.
//
// van/local and van/tcp wrap another van. A link carries the data of one process to another one: a segment of shared memory, or a TCP
// connection. Package links knows which process is which node, decides when a link is made, used and read, and notifies the node when a
// peer is lost or back. The transports make the links, and move bytes over them.
//
// # States
//
// A peer has one State. Unused, Connecting and Linked follow each other. If the link cannot be made, data of the peer goes over the van
// inside: in the state Fallback the link is tried again, in the state Unlinked it is not. docs/pictures/link-states.svg has all states.
// A link from a peer is held until this node has admitted its process; a replaced process is fenced.
//
// # From Fallback to Linked
//
// Data on the link must not overtake earlier data on the van inside. The change to the link is therefore made as follows:
//
//  1. The sender makes a link. The handshake announces that marks are sent over the van inside. The receiver reads no message of that
//     link yet.
//  2. The sender blocks Sends to the peer over the van inside (the lock Sends). It sends two marks there, one in the order of
//     requests and one in the order of answers. Then it installs the link.
//  3. The receiver delivers the messages before the marks, receives the marks, and begins to read the link.
//
// If the van inside loses the peer meanwhile, the marks may be lost. The link then ends as a broken link does, and so does a link
// whose marks do not arrive within MarkTime. Over shared memory it waits longer while a handler of an earlier message runs.
package links
