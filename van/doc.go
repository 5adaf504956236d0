// Package van defines what all transports share: the messages that nodes
// exchange, their wire format, the Van interface, and the registry by which a
// configuration chooses a transport.
//
// # Layers
//
//	postoffice, kv, af     see only the Van interface
//	van/stage              wraps a transport: values on devices
//	van/local              wraps a transport: peers of the same host
//	van/tcp                wraps a transport: data between nodes of this library
//	van/zmq, van/rdma      the transports, one package each
//	van                    this package
//	van/backend            the memory that data frames point to
//
// A van knows addresses and bytes. The members of the cluster are known to postoffice,
// and the meaning of a message to kv and af. van/stack imports every transport of a
// build, for its registration.
//
// # Ownership of messages
//
// A Message is a Meta, up to three data frames or the parts of a batch, its sender and its
// receiver. Sender and receiver are not in the meta: transports know them from the connection.
//
// Sending: the caller fills a Message and calls Van.Send. When Send returns, the
// Message belongs to the caller again. The bytes of its frames and parts are lent to
// the transport until Done is called.
//
// Receiving: the Message belongs to the transport and is valid until the Receiver
// returns. Retain keeps the message and its frames valid until Release. The transport
// then reuses the Message and its slices: strings may be kept, but Body, DataTypes and
// nodes must be copied (Node.Clone).
//
// # Packed meta
//
// EncodeTo and DecodeMeta speak the format of the C++ StepMesh library, raw
// structs of the x86-64 ABI, byte for byte. All numbers are little endian and
// signed unless they begin with u. Parts follow each other without padding:
//
//	288 bytes                   fixed part
//	body_size                   body
//	data_type_size * 4 bytes    DataType of each data frame
//	node_size * 552 bytes       node records
//
// Fixed part; bytes between the fields are padding and zero:
//
//	 0  i32  head                     72  i32     data_size
//	 4  i32  body_size                80  u64     key
//	 8  i32  control.cmd              88  u64     addr
//	12  i32  control.node_size        96  i32     val_len
//	16  i32  control.barrier_group   100  i32     option
//	24  u64  control.msg_sig         104  i32     sid
//	32  u8   request                 108  i32     is_tensor
//	36  i32  app_id                  112  i32     dtype
//	40  i32  timestamp               116  i32     dim
//	44  i32  data_type_size          120  i64[8]  shape
//	48  i32  src_dev_type            184  u64[5]  request_trace
//	52  i32  src_dev_id              224  u64[5]  response_trace
//	56  i32  dst_dev_type            264  u64[2]  slave_qp_counter
//	60  i32  dst_dev_id              280  i32     slave_qp_num
//	64  i32  customer_id
//	68  u8   push
//	69  u8   simple_app
//
// A trace is pre_start, start, postsend, postrecv, process. barrier_group is
// sent with BARRIER and INSTANCE_BARRIER only, msg_sig with ACK only, nodes with
// control messages only. In all other messages these fields are zero and are not read.
// slave_qp_counter and slave_qp_num are for RDMA and zero elsewhere.
//
// Node record:
//
//	  0  i32       role               336  i32[32]   dev_ids
//	  4  i32       id                 464  u8        is_recovery
//	  8  char[64]  hostname           468  i32       customer_id
//	 72  i32       num_ports          472  char[64]  endpoint_name
//	 76  i32[32]   ports              536  u64       endpoint_name_len
//	204  i32       port               544  i32       aux_id
//	208  i32[32]   dev_types
//
// A C++ node does not initialise everything it sends: the padding of a node
// record, ports beyond num_ports, dev_types, dev_ids, the endpoint_name beyond
// its length, and the customer_id of the scheduler's record hold leftovers of
// its memory. DecodeMeta does not check or does not read them; EncodeTo writes
// zeros.
//
// # Validation of frames
//
// DecodeMeta checks the complete frame, since it is untrusted input:
//   - The frame's length equals the sum of its parts, to the byte.
//   - Booleans are 0 or 1; commands and roles are known.
//   - Sizes and dimensions are not negative; counts fit the layout.
//   - Names are terminated.
//
// A *FieldError names the first invalid field. The receiver of the message must check
// the data frames against the meta, and every address and key.
package van
