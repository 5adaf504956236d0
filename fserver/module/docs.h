/* Texts that help() shows. The part of a function's text before "--" is its
 * signature, which CPython cuts off and gives to inspect.signature. */
#ifndef STEPAF_FSERVER_DOCS_H
#define STEPAF_FSERVER_DOCS_H

#define DOC_MODULE \
	"Tensors between attention processes (workers) and FFN processes (servers).\n" \
	"\n" \
	"A process is one node of a cluster. DMLC_ROLE says which: the scheduler, a worker or a\n" \
	"server. All processes call init(). Then a worker calls push_pull() and wait(), a server\n" \
	"get_batch() and respond(). stop() waits for all nodes and leaves the cluster.\n" \
	"\n" \
	"    import fserver_lib as f\n" \
	"    f.init()\n" \
	"    h = f.push_pull([x], [1], [y], [2])           # worker: send x, receive into y\n" \
	"    f.wait(h)                                     # y is filled, x may be changed\n" \
	"    for handler, tensors, keys in f.get_batch():  # server: one batch of each worker\n" \
	"        f.respond([g(tensors[0])], handler)\n" \
	"\n" \
	"Tensors are torch.Tensor, or any object with __dlpack__ (NumPy, JAX, CuPy). They\n" \
	"must be C-contiguous, have at most 8 dimensions and less than 2 GiB. Python does not\n" \
	"copy them. Read-only arrays can be pushed, but not pulled into.\n" \
	"\n" \
	"Keys are ints in 0..2**64-1; the program chooses them. A handler is the int that\n" \
	"names a request (push_pull) or a batch (get_batch). Lists may be any sequence.\n" \
	"Times are ints in milliseconds (timeout_ms) or nanoseconds (traces).\n" \
	"\n" \
	"Any thread may make every call. A call that waits lets other threads run, and Ctrl-C\n" \
	"ends it. init() reads the environment, the import does not. The child of a fork\n" \
	"cannot use the module: start processes with the method \"spawn\".\n" \
	"\n" \
	"All errors are fserver_lib.Error, a RuntimeError. The classes TimeoutError,\n" \
	"ConnectionError, ValueError and TypeError are subclasses of the built-in ones too, so\n" \
	"\"except TimeoutError\" works. MemoryError and KeyboardInterrupt are raised unchanged."

#define DOC_INIT \
	"init($module, path='', /, *, timeout_ms=None)\n--\n\n" \
	"Join the cluster that the environment describes. Returns when all nodes have joined.\n" \
	"\n" \
	"Reads DMLC_ROLE (worker, server, scheduler), DMLC_NUM_WORKER, DMLC_NUM_SERVER,\n" \
	"DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, and if set DMLC_NODE_RANK,\n" \
	"DMLC_GROUP_SIZE, STEPMESH_GPU and the others of docs/env.md. Call it once per\n" \
	"process. On the scheduler it returns too; that process must then keep running, in\n" \
	"stop() or asleep. While init() waits, it logs the missing nodes every few seconds.\n" \
	"\n" \
	"path: must be empty. Some builds of StepMesh load a backend from this file; here\n" \
	"    STEPMESH_BAKCEND selects the backend.\n" \
	"timeout_ms: limit in milliseconds; None means STEPAF_START_TIMEOUT (300 s).\n" \
	"\n" \
	"Raises TimeoutError (names the missing nodes), ValueError (a path; a variable with a\n" \
	"wrong value: names it, its value and what is allowed), Error (second call, forked\n" \
	"process, the scheduler refused this node)."

#define DOC_STOP(name) \
	name "($module, /, *, timeout_ms=None)\n--\n\n" \
	"Wait until every node, including the scheduler, has called stop(), then leave the cluster.\n" \
	"\n" \
	"finalize() is another name of stop(). A second call does nothing. A node that has not\n" \
	"called stop() leaves at the end of the interpreter, without waiting for the others.\n" \
	"Tensors that get_batch() returned stay valid.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds. None means STEPAF_STOP_TIMEOUT (30 s) on a worker, and\n" \
	"    no limit on servers and the scheduler, which wait for the workers.\n" \
	"\n" \
	"Raises TimeoutError (names the missing nodes), ConnectionError (a node was lost); the\n" \
	"node has left the cluster in both cases. Raises Error before init()."

#define DOC_PUSH_PULL \
	"push_pull($module, /, push_tensors, push_keys, pull_tensors, pull_keys, need_event=True, *, servers=None)\n--\n\n" \
	"Worker: send tensors to all servers, and receive tensors from them. Returns at once.\n" \
	"\n" \
	"push_tensors: sequence of tensors. Each goes to every server, with its dtype and\n" \
	"    shape. A tensor without elements is allowed.\n" \
	"push_keys: one int in 0..2**64-1 for each push tensor, all different.\n" \
	"pull_tensors: sequence of writable tensors to be filled. With S servers, their\n" \
	"    number is a multiple of S, and server i fills number [i*B, (i+1)*B) with\n" \
	"    B = len(pull_tensors) // S. The answer must have as many bytes as the tensor;\n" \
	"    dtype and shape are not compared.\n" \
	"pull_keys: one key for each pull tensor. The keys for one server are all different.\n" \
	"need_event: with GPU tensors, True sends after the work queued so far on the\n" \
	"    current CUDA stream; False sends at once. No effect on CPU tensors.\n" \
	"servers: None for all servers, or the ranks of some, in any order. Then only these get\n" \
	"    the request, S is their number, and pull_tensors is in that order. The servers\n" \
	"    call get_batch(any=True). Not possible if a server runs C++ StepMesh.\n" \
	"\n" \
	"One of the lists may be empty, but not both. Until wait() has returned, do not\n" \
	"write to the push tensors and do not use the pull tensors. The library holds\n" \
	"references to them, so they may go out of scope. Pull tensors must not share memory\n" \
	"with each other, and with push tensors only if S is 1.\n" \
	"\n" \
	"Returns the handler (int) for wait(). Handlers count up from a random number: the call\n" \
	"uses one for each push tensor, then one for each of the B pulls, and returns the first.\n" \
	"\n" \
	"Raises ValueError (lengths that do not fit; a key out of range or used twice; a tensor\n" \
	"that is not contiguous, too large, read-only, on a wrong device, or that shares memory;\n" \
	"a server named twice or that does not exist; names the argument), TypeError (not a\n" \
	"tensor, a masked array, not an int), ConnectionError (a server is lost), Error\n" \
	"(not a worker, before init() or after stop()). After an exception nothing was sent."

#define DOC_PREPARE \
	"prepare($module, /, push_tensors, push_keys, pull_tensors, pull_keys, need_event=True, *, servers=None)\n--\n\n" \
	"Worker: a push_pull() that is checked once and started many times.\n" \
	"\n" \
	"The arguments are those of push_pull(). A round costs less than a push_pull(): its\n" \
	"tensors, keys and servers are fixed. It sends the contents at the time of start().\n" \
	"\n" \
	"    x = f.prepare([hidden], [1], [out], [2])\n" \
	"    x.start()        # or x.start(rows=n): the first n rows of each tensor\n" \
	"    x.wait()         # out is filled; both tensors may be used until the next start()\n" \
	"\n" \
	"Returns an Exchange, which keeps the memory of the tensors. Do not resize them. The\n" \
	"server does nothing special, and may run C++ StepMesh; over RDMA the first round must\n" \
	"then be the largest, and no round may be empty. On a GPU, start() is ordered after\n" \
	"PyTorch's current stream, not after the streams of other libraries.\n" \
	"\n" \
	"Raises what push_pull() raises, except for lost servers: wait() reports those. prepare()\n" \
	"sends nothing."

#define DOC_EXCHANGE \
	"The result of prepare(): tensors that are exchanged many times, one round at a time.\n" \
	"Several exchanges may be under way. When it is dropped, the library releases the\n" \
	"tensors after the round under way. Programs cannot create one."
#define DOC_EXCHANGE_PATH \
	"How data goes to the servers at present, and why not faster, as stats() has it:\n" \
	"'messages: server 0: shared memory'. The first round chooses paths that are 'none'."
#define DOC_EXCHANGE_START \
	"start($self, /, rows=None)\n--\n\n" \
	"Begin a round: send the push tensors, and receive the pull tensors. Returns at once.\n" \
	"\n" \
	"rows: None for all rows, or n for the first n of the first dimension of each\n" \
	"    tensor. 0 is allowed. The server receives tensors of n rows.\n" \
	"\n" \
	"Returns a handler (int), for fetch_trace() and get_all_handlers(). With need_event=True\n" \
	"it sends after the work queued so far on the current CUDA stream. If a server was\n" \
	"replaced since the last round, the round goes to the replacement process.\n" \
	"\n" \
	"While the current CUDA stream is being captured into a graph, start() sends nothing and\n" \
	"returns -1: each replay sends when the stream reaches this point. The tensors must be on\n" \
	"the GPU. Capture wait() too, before the next start(). See docs/gpu.md.\n" \
	"\n" \
	"Raises the error of a round of a replayed graph, once, as wait(), check() and close()\n" \
	"do; Error (started already: call wait() first; closed; stopped); ValueError (more rows\n" \
	"than a tensor has: names it)."
#define DOC_EXCHANGE_WAIT \
	"wait($self, /, timeout_ms=15000)\n--\n\n" \
	"Wait until all servers have answered the round. Then start() may be called again, also\n" \
	"after an error.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds, counted from start(). While a graph is captured, it\n" \
	"    sets the limit of all later rounds of graphs; after the limit the stream continues.\n" \
	"\n" \
	"Raises TimeoutError (the round is canceled, late answers are dropped), ConnectionError,\n" \
	"KeyboardInterrupt (call it again) as wait() of the module does, Error (not started,\n" \
	"stopped), ValueError (another thread waits; the round\n" \
	"ended more than 4096 requests ago without a wait)."
#define DOC_EXCHANGE_POLL \
	"poll($self, /)\n--\n\n" \
	"True if all servers have answered the round, else False. Does not wait and has no limit.\n" \
	"After True or an error, start() may be called again, as after wait().\n" \
	"\n" \
	"Raises what wait() raises, except TimeoutError. fileno() tells when to call it."
#define DOC_EXCHANGE_CHECK \
	"check($self, /)\n--\n\n" \
	"Raise, once, the first error of rounds of replayed graphs, with the number of the round\n" \
	"and the servers concerned. Does not wait: synchronize with the stream before. It works\n" \
	"after close() and stop() too, where a replayed graph finds no server."
#define DOC_EXCHANGE_CLOSE \
	"close($self, /)\n--\n\n" \
	"Release the tensors, after the round under way if there is one. start() then raises\n" \
	"Error, and replayed graphs neither start nor wait for a round. Dropping the exchange\n" \
	"does the same. Raises what check() raises; the exchange is closed in that case, too."

#define DOC_PREPARE_STREAMS \
	"prepare_streams($module, /, push_tensors, push_keys, pull_tensors, pull_keys, *, peers=None, timeout_ms=15000, round_timeout_ms=15000, host=False)\n--\n\n" \
	"Worker and server: prepare an exchange that the CUDA streams of both ends make by\n" \
	"themselves, on one host. No CPU takes part; a kernel copies. Both ends prepare it, and\n" \
	"then queue it, or capture it into graphs, as often as they want.\n" \
	"\n" \
	"    x = f.prepare_streams([hidden], [1], [out], [2])    # worker\n" \
	"    x.send(); x.receive()                               # each token, or captured\n" \
	"    x = f.prepare_streams([hidden], [1], [out], [2])    # server, of one worker\n" \
	"    x.receive(); compute(hidden, out); x.send()\n" \
	"\n" \
	"On a worker the arguments are those of push_pull(). On a server, push_tensors receive\n" \
	"the workers' tensors, and pull_tensors are sent to them: first all tensors of the first\n" \
	"worker, then all of the next, the same number for each. The two ends find each other by\n" \
	"their keys, in order.\n" \
	"\n" \
	"peers: ranks of servers or workers, ascending; None for all\n" \
	"timeout_ms: how long to wait for the other ends; None for no limit\n" \
	"round_timeout_ms: how long a worker's round may take; None for no limit\n" \
	"host: True, on both ends: CPU threads make send() and receive() and poll flags in shared\n" \
	"    memory; the streams do not. A round takes less time, but graphs are not possible.\n" \
	"\n" \
	"Returns a StreamExchange, which keeps the memory of the tensors.\n" \
	"\n" \
	"Raises TimeoutError (names the ends that are missing), ValueError (tensors that are not\n" \
	"on this GPU, sizes that differ), TypeError, ConnectionError, Error (no GPU, GPUs without\n" \
	"peer access, before init(), after stop())."
#define DOC_STREAMS \
	"The result of prepare_streams(): one end of a prepared GPU exchange. A worker sends\n" \
	"first, a server receives first; then both alternate. The whole exchange ends when a peer\n" \
	"is lost or closes its end, or when a round takes too long: the streams continue, check()\n" \
	"raises the reason, and the program prepares a new exchange. Dropping it closes it.\n" \
	"Programs cannot create one."
#define DOC_STREAMS_PATH "How data goes to the peers: 'streams: gpu:0 with server 0', or with host=True 'hosts: ...'."
#define DOC_STREAMS_SEND \
	"send($self, /, need_event=True)\n--\n\n" \
	"Queue to the current CUDA stream: tell the peers that the tensors for them are ready.\n" \
	"The tensors may be changed after the next receive(). With host=True: tell the peers when\n" \
	"the current stream reaches this point. need_event=False says that the tensors are\n" \
	"complete: it tells them now, without asking the stream. Does not wait.\n" \
	"\n" \
	"Raises what check() raises, and Error (it is not send()'s turn)."
#define DOC_STREAMS_RECEIVE \
	"receive($self, /, timeout_ms=None)\n--\n\n" \
	"Queue to the current CUDA stream: wait until all peers have sent, and copy their tensors\n" \
	"into the tensors of this end. In a graph this overlaps the work since the last send().\n" \
	"That work must not use these tensors. With host=True: wait and copy, then return. After\n" \
	"timeout_ms it raises TimeoutError, which names the peers that have not sent; another\n" \
	"receive() continues. The tensors may change until it, or close(), has returned.\n" \
	"\n" \
	"Raises what check() raises, and Error (it is not receive()'s turn)."
#define DOC_STREAMS_CHECK \
	"check($self, /)\n--\n\n" \
	"Raise the reason why the exchange has ended, as all later calls do: ConnectionError,\n" \
	"TimeoutError, Error. If it raises nothing, all tensors received so far are correct. Does\n" \
	"not wait: synchronize with the stream before."
#define DOC_STREAMS_CLOSE \
	"close($self, /)\n--\n\n" \
	"End the exchange on all its nodes, as dropping it does. Rounds that are not complete are\n" \
	"canceled, and the contents of their tensors undefined: first synchronize the stream, and\n" \
	"wait until the peers have received the last data, for example with a barrier. Raises what\n" \
	"check() raises; the exchange is closed in that case, too. Captured graphs keep the tensors."

#define DOC_WAIT \
	"wait($module, /, handler, timeout_ms=15000)\n--\n\n" \
	"Worker: wait until all servers have answered the request.\n" \
	"\n" \
	"handler: the result of push_pull(), or an Operation: then timeout_ms is that of its\n" \
	"    wait(). A later handler of the same request (see get_all_handlers) waits for that\n" \
	"    tensor only.\n" \
	"timeout_ms: limit in milliseconds, counted from push_pull(), not from this call.\n" \
	"\n" \
	"Then the pull tensors are filled, and the program may use all tensors of the request\n" \
	"again. Waiting for the same handler again returns, or raises the same error, at once.\n" \
	"\n" \
	"Raises TimeoutError (names the servers that have not answered; the request is\n" \
	"canceled, late answers are dropped), ConnectionError (a server that has not answered\n" \
	"is lost), ValueError (unknown handler, or more bytes than a server accepts),\n" \
	"KeyboardInterrupt (the request continues, wait again), Error (not a worker, before\n" \
	"init(), stopped)."

#define DOC_POLL \
	"poll($module, handler, /)\n--\n\n" \
	"Worker: True if all servers have answered the request, else False. Does not wait.\n" \
	"\n" \
	"handler: as for wait(), but not an Operation. For a round of prepare(), call the poll()\n" \
	"    of the Exchange.\n" \
	"\n" \
	"After True the pull tensors are filled, as after wait(); both return at once from then on.\n" \
	"poll() has no limit: wait(handler, timeout_ms=0) cancels a request that takes too long.\n" \
	"It is False while another thread waits for the handler.\n" \
	"\n" \
	"Raises the error of a failed request, as wait() does, every time: ConnectionError,\n" \
	"ValueError (also an unknown handler), Error (also: not a worker, before init(), stopped)."

#define DOC_FILENO \
	"fileno($module, /, *, any=False)\n--\n\n" \
	"A descriptor for an event loop: loop.add_reader(f.fileno(), callback), select, epoll.\n" \
	"\n" \
	"On a server it is readable while get_batch(timeout_ms=0) would return batches or raise an\n" \
	"error other than TimeoutError. On a worker it is readable while a request has ended,\n" \
	"answered or failed, that neither wait() nor poll() has reported. When the node has left\n" \
	"the cluster, after stop() or an error, it is readable until the process ends: the next\n" \
	"call raises the reason.\n" \
	"\n" \
	"any: on a server, True is for get_batch(any=True), with a descriptor of its own.\n" \
	"\n" \
	"The calls make it unreadable when there is nothing more to return: do not read it, and do\n" \
	"not close it. Handle TimeoutError of get_batch(timeout_ms=0) and False of poll(): another\n" \
	"thread may have been faster, or a worker may have canceled its request. A program that\n" \
	"does not call wait() or poll() for each request finds it always readable. Collectives and\n" \
	"windows do not affect it. All calls return the same number; a forked child has it closed.\n" \
	"\n" \
	"Raises Error (the scheduler, before init(), after stop(), no descriptor left), ValueError\n" \
	"(any=True on a worker)."

#define DOC_GET_ALL_HANDLERS \
	"get_all_handlers($module, handler, /)\n--\n\n" \
	"Worker: the handlers of all tensors of a request, as a list of ints.\n" \
	"\n" \
	"handler: the result of push_pull().\n" \
	"\n" \
	"[h, h+1, ...]: one for each push tensor in order, then one for each pull of a server.\n" \
	"Call it before wait(). For a handler that is unknown or was waited for, it is [handler]."

#define DOC_FETCH_TRACE \
	"fetch_trace($module, handler, /)\n--\n\n" \
	"Worker: the times at which one tensor passed eight points, ints in nanoseconds.\n" \
	"\n" \
	"handler: one of get_all_handlers(). Call it after wait(): the times are zeros until the\n" \
	"    answer has arrived. With several servers they are those of the last answer.\n" \
	"\n" \
	"  0 request.start      worker: the message enters the transport\n" \
	"  1 request.postsend   worker: just before it is passed to the network\n" \
	"  2 request.postrecv   server: it has arrived\n" \
	"  3 request.process    server: passed to the application\n" \
	"  4 response.start     server: the answer enters the transport\n" \
	"  5 response.postsend  server: just before it is passed to the network\n" \
	"  6 response.postrecv  worker: it has arrived\n" \
	"  7 response.process   worker: the request is complete\n" \
	"\n" \
	"0, 1, 6, 7 are times of the worker's clock, get_nanosecond(); 2 to 5 of the server's.\n" \
	"Subtract times of one host only, or use (t6-t1) - (t5-t2), the time on the network.\n" \
	"Times that a StepMesh peer does not send are 0.\n" \
	"\n" \
	"Raises ValueError (a handler that is unknown or too old), Error (not a worker, before\n" \
	"init())."

#define DOC_STATS \
	"stats($module, /)\n--\n\n" \
	"A snapshot of this node, for logs and monitoring: a dict of ints, floats and texts.\n" \
	"\n" \
	"  id, node  the id and the name of this node\n" \
	"  peers     for each other node: id; node, its name; path, how data goes there: \"shared\n" \
	"            memory\", \"tcp\", \"zmq\", \"ibverbs\", or \"\" for none yet; why, why there is none\n" \
	"            or why it is not a faster one, or \"\"; lost, the reason why the node is lost, or\n" \
	"            None; silent_s, the seconds since its last message, 0 on nodes without its heartbeats\n" \
	"  apps      for each application: app_id, customer_id; in_flight, its requests without an\n" \
	"            answer; accepted, requests of others that it has not answered; handlers\n" \
	"  counters  messages, bytes and refusals since init(); those of all transports together\n" \
	"            are in transport\n" \
	"\n" \
	"It opens no connection. Once a second is often enough. Raises Error before init() and after\n" \
	"stop()."

#define DOC_GET_NANOSECOND \
	"get_nanosecond($module, /)\n--\n\n" \
	"The clock of the traces: an int in nanoseconds since this host's boot, monotonic.\n" \
	"\n" \
	"Comparable between processes of one host. Works in every role and before init()."

#define DOC_GET_BATCH \
	"get_batch($module, /, *, timeout_ms=None, any=False, max_batches=None)\n--\n\n" \
	"Server: wait until every worker has sent a batch; return the oldest of each.\n" \
	"It does not wait for a worker that is in stop(): that worker sends no other batch.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds; None waits without limit, 0 does not wait. After a\n" \
	"    timeout no batch is lost: call again.\n" \
	"any: True waits for one batch, of any worker, and returns all queued batches, the\n" \
	"    oldest first; one worker may have several. The keys, or the first key, can tell the\n" \
	"    program which worker has sent a batch.\n" \
	"max_batches: with any=True, return at most so many; None for no limit. If there are more,\n" \
	"    the workers take turns: one with many batches does not delay the others.\n" \
	"\n" \
	"Returns a list of tuples. Without any=True there is one for each of the\n" \
	"DMLC_NUM_WORKER workers, in the order of their ranks:\n" \
	"\n" \
	"    (handler, tensors, keys)\n" \
	"\n" \
	"handler: int, for respond(). tensors, keys: what that worker has pushed, in its order,\n" \
	"with its dtypes and shapes; both are empty for a request that only pulls. The\n" \
	"tensors are torch.Tensor if torch was imported and has the dtype, else\n" \
	"fserver_lib.Tensor. They are views of receive memory, which is not reused while\n" \
	"Python refers to them (but see register_recv_buffer). respond() accepts them.\n" \
	"\n" \
	"Raises Finished (all workers are in stop(); uncaught it ends the program, with status\n" \
	"0), TimeoutError (names the workers that have sent nothing), ConnectionError (a\n" \
	"worker is lost; with any=True, all are), ValueError (max_batches below 1, or without\n" \
	"any=True), KeyboardInterrupt, MemoryError, Error (not a server, before init(),\n" \
	"stopped). If an exception prevents the creation of tensors, the next call returns the batches."

#define DOC_RESPOND \
	"respond($module, /, tensors, handler, need_event=False)\n--\n\n" \
	"Server: answer a batch. Returns at once; answers are sent in the order of the calls.\n" \
	"\n" \
	"tensors: sequence of as many tensors as the batch has pulls, in their order. Each\n" \
	"    has exactly as many bytes as the worker's pull tensor. Empty for a batch\n" \
	"    without pulls: a single push without a pull waits for this answer; two and more\n" \
	"    are acknowledged when they arrive.\n" \
	"handler: the int from get_batch().\n" \
	"need_event: with GPU tensors, True sends after the work queued so far on the\n" \
	"    current CUDA stream; False sends at once. No effect on CPU tensors.\n" \
	"\n" \
	"The library holds references to the tensors until they are sent. Returns an Answer,\n" \
	"which may be ignored. Its done() and wait() tell when the tensors are sent and may\n" \
	"be changed. For a copy, or a tensor of get_batch(), the program need not wait.\n" \
	"\n" \
	"Raises ValueError (unknown handler, another number of tensors or bytes, not\n" \
	"contiguous, wrong device), TypeError (not a tensor), Error (answered already, not a\n" \
	"server, before init(), stopped). If the worker is lost, the answer is dropped."

#define DOC_REFUSE \
	"refuse($module, /, handler, reason)\n--\n\n" \
	"Server: end a batch without an answer. The worker's wait() raises Error at once,\n" \
	"with the reason in its text. One refusal ends a push_pull to several servers.\n" \
	"\n" \
	"handler: the int from get_batch().\n" \
	"reason: a str. The worker receives about the first 900 bytes.\n" \
	"\n" \
	"A worker that runs C++ StepMesh cannot receive the refusal: it waits until its limit.\n" \
	"This server logs that.\n" \
	"\n" \
	"Raises ValueError (unknown handler), TypeError (not a str), Error (answered or refused\n" \
	"already; pushes without a pull, which are acknowledged when they arrive; not a server,\n" \
	"before init(), stopped). If the worker is lost, refuse() does nothing."

#define DOC_RESPOND_VEC \
	"respond_vec($module, ret_buffer, tensors_vec, handler_vec, /)\n--\n\n" \
	"Server: answer several batches of one pull each from the same buffer.\n" \
	"\n" \
	"ret_buffer: tensor with one or more dimensions.\n" \
	"tensors_vec: sequence of tensors; only their row counts, shape[0], matter.\n" \
	"handler_vec: the handler of each batch, of the same length.\n" \
	"\n" \
	"Batch i is answered with ret_buffer[0:tensors_vec[i].shape[0]]. Every answer begins\n" \
	"at row 0, so all workers get the same leading rows: this does not split a result\n" \
	"between workers. With GPU tensors it waits for the current CUDA stream once.\n" \
	"\n" \
	"If one batch cannot be answered because its pull tensor has another size, the other\n" \
	"batches are answered all the same, and the first such error is raised.\n" \
	"\n" \
	"Raises ValueError (lengths differ, more rows than the buffer has, and as respond()),\n" \
	"TypeError, Error."

#define DOC_EMPTY_SHARED \
	"empty_shared($module, size, /)\n--\n\n" \
	"Allocate a uint8 tensor of size bytes, all 0, that servers on this host can map:\n" \
	"x.view(dtype).reshape(shape) gives it another form. With STEPAF_SHM_MAP=1 on the\n" \
	"server, a push_pull() with pull tensors does not copy, from 32 KiB on:\n" \
	"\n" \
	"- pushed tensors and views of them: the server reads this memory until it answers;\n" \
	"- answers that the server has written into answer_tensor(). The pull tensor must have\n" \
	"  all bytes of the allocation, and must not be a push tensor of the same call.\n" \
	"\n" \
	"After a call that failed, a pull tensor keeps its address and contents, and a late\n" \
	"answer changes nothing. Each allocation uses a file descriptor and whole pages. It is\n" \
	"freed with the last tensor. Needs no init().\n" \
	"\n" \
	"A child made by fork shares the memory: what it writes changes the tensor of its parent.\n" \
	"The memory is then freed after the child, too, has ended or called exec.\n" \
	"\n" \
	"Raises ValueError (negative, or above 2 GiB - 1), MemoryError, Error (the system\n" \
	"refuses the memory)."

#define DOC_ANSWER_TENSOR \
	"answer_tensor($module, /, handler, i=0)\n--\n\n" \
	"Server: the worker's own tensor for pull i of a batch, or None if this server does not\n" \
	"map it (STEPAF_SHM_MAP, empty_shared()). An answer in that tensor is not copied:\n" \
	"\n" \
	"    y = torch.mm(x, w, out=f.answer_tensor(handler))\n" \
	"    f.respond([y], handler)\n" \
	"\n" \
	"handler: the int from get_batch(). i: index of the pull. Write to the tensor before\n" \
	"respond() only: afterwards it is the worker's again. None also if the batch needs no\n" \
	"answer, the worker is lost, or has canceled the batch.\n" \
	"\n" \
	"Raises ValueError (unknown handler, no such pull), TypeError, Error (not a server; the\n" \
	"batch was answered)."

#define DOC_REGISTER_RECV_BUFFER \
	"register_recv_buffer($module, tensor, worker_ranks, push_keys, /)\n--\n\n" \
	"Server: receive pushed tensors directly into a tensor of the program.\n" \
	"\n" \
	"tensor: writable tensor. It is divided into len(push_keys) equal chunks of elements.\n" \
	"worker_ranks, push_keys: sequences of the same length, not empty. A tensor that worker\n" \
	"    worker_ranks[i] (DMLC_NODE_RANK) pushes with push_keys[i] is received in chunk i.\n" \
	"\n" \
	"get_batch() then returns views of the chunk, with the pushed dtype and shape; a\n" \
	"pushed tensor may be smaller than the chunk. The next push of that key by that\n" \
	"worker overwrites the chunk, even if Python still refers to a view. The library keeps\n" \
	"the tensor's memory. Call it right after init(), then barrier(True, True) on both sides, so\n" \
	"that it precedes the first push.\n" \
	"\n" \
	"Raises ValueError (lengths differ, elements do not divide evenly, no such worker,\n" \
	"a key that is registered already, read-only, not contiguous), TypeError, Error\n" \
	"(not a server, before init())."

#define DOC_BARRIER \
	"barrier($module, /, include_server, include_client, instance_barrier=True, *, timeout_ms=None)\n--\n\n" \
	"Wait until all servers, all workers, or both have called it.\n" \
	"\n" \
	"include_server, include_client: bools; clients are the workers. The caller must be\n" \
	"    included; the scheduler cannot take part.\n" \
	"instance_barrier: True waits for every process; False for as many calls as there\n" \
	"    are groups (DMLC_NUM_WORKER, DMLC_NUM_SERVER): one process of each group calls it.\n" \
	"timeout_ms: limit in milliseconds; None means STEPAF_BARRIER_TIMEOUT (an hour).\n" \
	"\n" \
	"Raises ValueError (the caller is not included), TimeoutError, ConnectionError (a\n" \
	"node or the scheduler is lost), KeyboardInterrupt, Error (before init(), stopped)."

#define DOC_TENSOR \
	"A view of receive memory. get_batch() returns it if torch was not imported or does not\n" \
	"have the dtype.\n" \
	"\n" \
	"numpy.asarray, numpy.from_dlpack, jax.dlpack.from_dlpack and torch.from_dlpack make arrays of\n" \
	"it without a copy. An array of numpy.asarray is writable; one of numpy.from_dlpack is from\n" \
	"NumPy 2.1 on. The memory stays as long as this object or an array of it exists. respond()\n" \
	"accepts it. Programs cannot create one."

#define DOC_ANSWER \
	"The result of respond(): an answer that is being sent. It may be dropped at any time; the\n" \
	"tensors are sent all the same. Programs cannot create one."
#define DOC_ANSWER_DONE \
	"done($self, /)\n--\n\n" \
	"Whether all tensors of the answer are sent, or will not be sent because the worker is\n" \
	"lost or has canceled the request. The program may then change them. Does not wait."
#define DOC_ANSWER_WAIT \
	"wait($self, /, timeout_ms=None)\n--\n\n" \
	"Wait until done().\n" \
	"\n" \
	"timeout_ms: limit in milliseconds; None waits without limit.\n" \
	"\n" \
	"Raises TimeoutError (wait again), KeyboardInterrupt, Error (stopped)."

#define DOC_TENSOR_SHAPE \
	"The sizes, a tuple of ints; () for a scalar."
#define DOC_TENSOR_DTYPE \
	"The name of the element type that the sender used, a str such as \"float32\" or \"bfloat16\"."
#define DOC_TENSOR_NBYTES \
	"The size in bytes, an int."
#define DOC_TENSOR_ARRAY_INTERFACE \
	"The memory in NumPy's array interface, for numpy.asarray. It is writable. Tensors of a\n" \
	"dtype that NumPy itself does not have, or on a GPU, have no such attribute."
#define DOC_TENSOR_ARRAY \
	"__array__($self, /, dtype=None, copy=None)\n--\n\n" \
	"numpy.asarray(self), or for a dtype that NumPy itself does not have, numpy.from_dlpack(self).\n" \
	"It copies only for another dtype, or with copy=True.\n" \
	"\n" \
	"Raises the error of from_dlpack for a dtype that NumPy does not have, or memory of a GPU."
#define DOC_TENSOR_DLPACK \
	"__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n" \
	"A DLPack capsule of the memory, for from_dlpack of any library; no copy.\n" \
	"\n" \
	"stream: no effect, since received memory is complete. max_version: from (1, 0) on the\n" \
	"capsule has a version, and says that the memory is writable.\n" \
	"dl_device: None, or the result of __dlpack_device__(). copy: None or False.\n" \
	"\n" \
	"Raises ValueError (a dtype that DLPack has no code for, such as bits8 or int4),\n" \
	"BufferError (a copy, or another device)."
#define DOC_TENSOR_DLPACK_DEVICE \
	"__dlpack_device__($self, /)\n--\n\n" \
	"(device type, device index) with the numbers of DLPack; (1, 0) is the CPU."

#define DOC_NOTIFY \
	"SimpleNotify()\n--\n\n" \
	"Makes the current CUDA stream wait for a request, or for a batch, while Python\n" \
	"continues to queue later work. The stream waits for a flag in pinned host memory. One\n" \
	"wait at a time, and not in a CUDA graph. Needs a GPU and a build with CUDA.\n" \
	"\n" \
	"Launch each kernel once before it is first used after such a wait, in worker and\n" \
	"server: CUDA loads a kernel at its first launch, and may then wait for all streams,\n" \
	"forever if a stream waits for later work. CUDA_MODULE_LOADING=EAGER also prevents this."
#define DOC_NOTIFY_INIT \
	"init($self, /)\n--\n\n" \
	"Create the flag. Call it once, before the other methods; before or after\n" \
	"fserver_lib.init(), which the other methods need.\n" \
	"\n" \
	"Raises Error (no GPU or no CUDA, and what is missing; stopped)."
#define DOC_NOTIFY_STREAM_WAIT_EVENT \
	"stream_wait_event($self, handler, /)\n--\n\n" \
	"Worker: make the current stream wait until the request is answered; return at once.\n" \
	"\n" \
	"handler: the result of push_pull(). The limit is 15 s from push_pull(). After the limit,\n" \
	"    as after any error, the stream continues, and wait_event_done() raises.\n" \
	"\n" \
	"Raises Error (wait_event_done() was not called since the last one; not a worker)."
#define DOC_NOTIFY_WAIT_EVENT_DONE \
	"wait_event_done($self, /)\n--\n\n" \
	"Wait until the request of stream_wait_event() is complete. Raises what wait() raises."
#define DOC_NOTIFY_BLOCK_NOW_STREAM \
	"block_now_stream($self, /)\n--\n\n" \
	"Only make the current stream wait for the next release of this object: the end of the\n" \
	"stream_wait_event() or block_now_stream_and_get_batch() that follows or is under way."
#define DOC_NOTIFY_BLOCK_AND_GET_BATCH \
	"block_now_stream_and_get_batch($self, /)\n--\n\n" \
	"Server: make the current stream wait until a get_batch() in the background has its\n" \
	"result; get_future_batch_data() returns it. Returns at once.\n" \
	"\n" \
	"Raises Error (the last result was not fetched; not a server)."
#define DOC_NOTIFY_GET_FUTURE_BATCH_DATA \
	"get_future_batch_data($self, /)\n--\n\n" \
	"Server: wait for the result of block_now_stream_and_get_batch(), once for each call.\n" \
	"\n" \
	"Returns and raises what get_batch() does."

#define DOC_MAP_PINNED_TENSOR \
	"map_pinned_tensor($module, tensor, device_index, /)\n--\n\n" \
	"A CUDA tensor of the memory of a pinned host tensor, with its shape and dtype.\n" \
	"\n" \
	"tensor: contiguous, in pinned memory (pin_memory=True). The result keeps it.\n" \
	"device_index: the GPU, with PyTorch's number.\n" \
	"\n" \
	"Raises ValueError (not on the host, not contiguous), Error (not pinned; no GPU or no\n" \
	"CUDA, and what is missing)."
#define DOC_WRITE_FLAG \
	"write_flag($module, flag, seq, /)\n--\n\n" \
	"In the current CUDA stream: flag[0] = seq[0], visible to the CPU and to other GPUs\n" \
	"after all earlier work of the stream. A graph may capture it.\n" \
	"\n" \
	"flag, seq: int64 tensors on the same GPU, or of map_pinned_tensor(). Only the first\n" \
	"    element is used.\n" \
	"\n" \
	"Raises ValueError (another dtype or device), Error (no GPU or no CUDA)."
#define DOC_WAIT_FLAG \
	"wait_flag($module, flag, seq, /)\n--\n\n" \
	"In the current CUDA stream: wait until flag[0] >= seq[0]. seq is read once, when the\n" \
	"wait begins. A graph may capture it. Arguments and errors as write_flag()."
#define DOC_SEQ_ADD_ONE \
	"seq_add_one($module, seq, /)\n--\n\n" \
	"In the current CUDA stream: seq[0] += 1.\n" \
	"\n" \
	"seq: int64 tensor on a GPU; only the first element is used. A graph may capture it; each\n" \
	"    replay adds 1. Errors as write_flag()."

#define DOC_ERROR \
	"The base class of all errors of this module. The text names this node's role and rank, the\n" \
	"peer, the request, and what to do. Raised itself for calls at the wrong time:\n" \
	"before init(), after stop(), in the wrong role, a second respond()."
#define DOC_TIMEOUT_ERROR \
	"A limit has passed; the text names the missing nodes, the elapsed time and the limit."
#define DOC_CONNECTION_ERROR \
	"A peer or the scheduler is lost; the text names it."
#define DOC_FINISHED \
	"get_batch() returns no more batches: all workers are in stop(), or have been lost\n" \
	"without a replacement. It is a SystemExit with the code 0, not an Exception: a program that\n" \
	"does not catch it ends as if it had called stop(), with status 0. A thread\n" \
	"other than the main one ends silently."
#define DOC_VALUE_ERROR \
	"An argument or an environment variable is invalid; the text names it, and says what is allowed."
#define DOC_TYPE_ERROR \
	"An argument has a wrong type; the text names it, its value and the wanted type."

/* Communicators. self is $module or $self. */

#define DOC_COMMUNICATOR \
	"Communicator(ranks=None, *, id=1, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"A communicator: nodes of one role that exchange tensors among themselves. All ranks create\n" \
	"it at the same time, with the same arguments, and then make the same calls in the same\n" \
	"order. It returns when all ranks have created theirs.\n" \
	"\n" \
	"ranks: instance ranks of this process's role, ascending; None means the instances of its\n" \
	"    group.\n" \
	"id: 1 to 4095, distinguishes the communicators of a process. The functions of the module,\n" \
	"    all_gather() and so on, use the group's communicator, with id 0. Their first call\n" \
	"    creates it, and waits for the other ranks for up to 15 s.\n" \
	"timeout_ms: limit of the creation, and of each call, counted from the call; None means 15 s.\n" \
	"\n" \
	"An error among ranks ends the communicator on all of them: a rank is lost or late, or the\n" \
	"calls differ. rebuild(), which all ranks call, begins anew. A replacement process creates a\n" \
	"Communicator instead, or, for the group's, calls rebuild() of the module as well. Up to 64\n" \
	"calls may be in flight; a large all_reduce() counts as two. All ranks must be nodes of this\n" \
	"library: C++ nodes are refused.\n" \
	"\n" \
	"The tensors of a call are all on the host, or all on this process's GPU: then the call begins\n" \
	"after the work queued so far in PyTorch's current stream. Reductions need host tensors.\n" \
	"\n" \
	"Raises ValueError, TypeError (names the argument), TimeoutError (names the missing ranks),\n" \
	"ConnectionError, Error."
#define DOC_OPEN_WINDOW(self) \
	"open_window(" self ", /, size, signals=1, *, device=None, timeout_ms=None)\n--\n\n" \
	"Open a window: size bytes on each rank, into which the other ranks write. All ranks call it,\n" \
	"with the same arguments. On GPUs of one host with peer access, the GPU of the caller copies\n" \
	"the data in its stream; no CPU and no kernel takes part. In host memory it works\n" \
	"everywhere; a rank may then pass a tensor in place of size, which becomes its window.\n" \
	"\n" \
	"    w = f.open_window(1 << 20)\n" \
	"    w.put_signal(1, 0, x)        # rank 0\n" \
	"    w.wait_signal(0)             # rank 1: now x is in w.tensor (on a GPU: in stream order)\n" \
	"\n" \
	"signals: number of signals from each rank to each other rank\n" \
	"device: 'cuda', 'cpu', or None: the device of this node's tensors (STEPMESH_BAKCEND)\n" \
	"timeout_ms: how long to wait for the other ranks; None is the communicator's limit\n" \
	"\n" \
	"Returns a Window.\n" \
	"\n" \
	"Raises ValueError, TypeError, TimeoutError, ConnectionError, MemoryError, Error (no GPU, GPUs\n" \
	"without peer access, other arguments on another rank)."
#define DOC_WINDOW \
	"The result of open_window(): memory of all ranks of a communicator. It ends on all ranks\n" \
	"when a rank is lost or the communicator fails; check() raises the reason, and the program\n" \
	"opens a new one. It is closed when it and its tensor are dropped. Programs cannot create one.\n" \
	"\n" \
	"On GPUs every call but close() is queued to PyTorch's current stream and returns; a stream\n" \
	"that is being captured is refused. Streams continue when the window ends, also when a rank\n" \
	"closes it while another rank's stream waits for it. In host memory the calls themselves\n" \
	"wait, up to the communicator's limit, and a rank that closes its end does not end the others."
#define DOC_WINDOW_PUT \
	"put($self, /, rank, offset, x)\n--\n\n" \
	"Copy x into the memory of a rank, at offset bytes. What is put to one rank and then signaled\n" \
	"arrives in the order of the calls, from any streams. x is on the window's device. On a GPU, x\n" \
	"may be changed after the put in stream order. On the host, x must not be changed until flush()\n" \
	"to that rank, or close(), has returned. put() waits only while the rank has not received more\n" \
	"than 128 messages or 32 MiB.\n" \
	"\n" \
	"Raises ValueError, TimeoutError, what check() raises, and Error (that rank has closed the window)."
#define DOC_WINDOW_PUT_SIGNAL \
	"put_signal($self, /, rank, offset, x, signal=0)\n--\n\n" \
	"put(), then signal()."
#define DOC_WINDOW_SIGNAL \
	"signal($self, /, rank, signal=0)\n--\n\n" \
	"Add one to a signal from this rank to another rank, after everything that was put there before.\n" \
	"\n" \
	"Raises what put() raises."
#define DOC_WINDOW_WAIT_SIGNAL \
	"wait_signal($self, /, rank, signal=0, *, timeout_ms=None)\n--\n\n" \
	"Wait until a rank has signaled, and consume one signal: each signal ends one wait, in the order\n" \
	"of the calls. What the rank has put here before the signal is then in tensor. If it raises, it\n" \
	"has consumed none. timeout_ms: for windows on the host; None is the communicator's limit.\n" \
	"\n" \
	"On GPUs the stream waits. The only limit is the end of the window. In the default stream there\n" \
	"is none at all if more work is queued than the stream can hold: if a rank is lost then, the\n" \
	"process hangs. To queue far ahead, use a stream of your own\n" \
	"(torch.cuda.stream(torch.cuda.Stream())).\n" \
	"\n" \
	"Raises what put() raises."
#define DOC_WINDOW_FLUSH \
	"flush($self, /, rank)\n--\n\n" \
	"Wait until everything that was put to a rank is in its memory. On GPUs the stream waits for puts\n" \
	"of other streams."
#define DOC_WINDOW_CHECK \
	"check($self, /)\n--\n\n" \
	"Raise the reason why the window has ended: ConnectionError, TimeoutError, Error. If it raises\n" \
	"nothing, everything that streams have waited for so far is correct. Does not wait: synchronize\n" \
	"with the stream before."
#define DOC_WINDOW_CLOSE \
	"close($self, /)\n--\n\n" \
	"Close this rank's end after all its puts have arrived. Each rank closes its end after it has\n" \
	"received what it waits for: see Communicator.barrier(). On GPUs a stream of this rank that still\n" \
	"waits continues, and the window ends on all ranks. The memory stays until the process ends, since\n" \
	"other ranks have mapped it."
#define DOC_ALL_GATHER(self) \
	"all_gather(" self ", /, out, x)\n--\n\n" \
	"Fill out with the tensors x of all ranks, in their order. All have one size and type, and out\n" \
	"has as many times that size as there are ranks. x may be this rank's part of out.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_ALL_GATHER_V(self) \
	"all_gather_v(" self ", /, out, x)\n--\n\n" \
	"Fill out[r] with the tensor x of rank r. out is a list of one tensor for each rank, with the\n" \
	"sizes of the ranks' tensors, which may differ and be 0.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_ALL_TO_ALL(self) \
	"all_to_all(" self ", /, out, x)\n--\n\n" \
	"Send x[r] to rank r, and fill out[r] with the tensor of rank r for this one. Both are lists of\n" \
	"one tensor for each rank; sizes may differ and be 0.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_BROADCAST(self) \
	"broadcast(" self ", /, x, root)\n--\n\n" \
	"Fill x on all ranks with the x of rank root.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_GATHER(self) \
	"gather(" self ", /, out, x, root)\n--\n\n" \
	"Fill out, on rank root, with the tensors x of all ranks, in their order. Other ranks pass None.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_SCATTER(self) \
	"scatter(" self ", /, out, x, root)\n--\n\n" \
	"Fill out with this rank's part of the tensor x of rank root, which has as many times the size\n" \
	"of out as there are ranks. Other ranks pass None as x.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_REDUCE_SCATTER(self) \
	"reduce_scatter(" self ", /, out, x, op='sum')\n--\n\n" \
	"Fill out with the reduction of this rank's parts of the tensors x of all ranks. Each x has as\n" \
	"many times the size of out as there are ranks.\n" \
	"\n" \
	"Elements are reduced in the order of ranks: op is 'sum', 'min', 'max' or 'product', of\n" \
	"integers, float16, bfloat16, float32 or float64.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_ALL_REDUCE(self) \
	"all_reduce(" self ", /, out, x, op='sum')\n--\n\n" \
	"Fill out with the reduction of the tensors x of all ranks. out may be x.\n" \
	"\n" \
	"Elements are reduced in the order of ranks: op is 'sum', 'min', 'max' or 'product', of\n" \
	"integers, float16, bfloat16, float32 or float64.\n" \
	"\n" \
	"Returns an Operation at once. Until its wait() has returned, do not use the tensors."
#define DOC_REBUILD(self) \
	"rebuild(" self ", /, *, timeout_ms=None)\n--\n\n" \
	"Make a failed communicator usable again, when all ranks call it. Calls in flight fail. When\n" \
	"it returns, no other rank reads tensors of failed calls. rebuild() of the module creates the\n" \
	"group's communicator if this process has none yet.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds; None means the communicator's limit.\n" \
	"\n" \
	"Raises TimeoutError (names the missing ranks), ConnectionError, Error."
#define DOC_COMM_BARRIER \
	"barrier($self, /, *, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"Wait until all ranks have called it. If timeout_ms (None: the communicator's limit) passes,\n" \
	"the communicator fails."
#define DOC_COMM_CLOSE \
	"close($self, /, *, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"End the communicator on all ranks, and wait until no rank reads tensors of this one, for\n" \
	"timeout_ms (None: the communicator's limit). When no object refers to it any more, not even an\n" \
	"Operation, the same happens in the background."
#define DOC_OPERATION \
	"A collective under way. wait() of the module accepts it as well. If it is dropped, the\n" \
	"operation continues as long as its communicator exists."
#define DOC_OPERATION_WAIT \
	"wait($self, /, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"Wait until the results are complete and all other ranks have received this rank's tensors.\n" \
	"The program may then use all of them. It may be called again, with the same result.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds from now; after it the communicator fails. The\n" \
	"    communicator's own limit, which counts from the collective call, applies as well.\n" \
	"\n" \
	"Raises ConnectionError (a rank is lost), TimeoutError (also if ranks name different roots,\n" \
	"each its own rank), Error (the calls of ranks do not match: names both, or says that the\n" \
	"other one has ended; canceled by another rank), KeyboardInterrupt (wait again). After an error\n" \
	"nothing writes to the results any more; their contents are undefined. Other ranks may still\n" \
	"read this rank's input and the result of all_reduce(): do not change them until rebuild() or\n" \
	"close() has returned. The library holds references to all tensors, so they may go out of\n" \
	"scope."

#endif
