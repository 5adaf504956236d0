/* Texts that help() shows. The part of a function's text before "--" is its
 * signature, which CPython cuts off and gives to inspect.signature. */
#ifndef STEPAF_FSERVER_DOCS_H
#define STEPAF_FSERVER_DOCS_H

#define DOC_MODULE \
	"Tensors between attention processes (workers) and FFN processes (servers).\n" \
	"\n" \
	"A process is one node of a cluster: the scheduler, a worker or a server, as\n" \
	"DMLC_ROLE says. All call init(). A worker then calls push_pull() and wait(), a\n" \
	"server get_batch() and respond(). stop() leaves the cluster together.\n" \
	"\n" \
	"    import fserver_lib as f\n" \
	"    f.init()\n" \
	"    h = f.push_pull([x], [1], [y], [2])           # worker: send x, y is to be filled\n" \
	"    f.wait(h)                                     # y is there, both are yours again\n" \
	"    for handler, tensors, keys in f.get_batch():  # server: one batch of each worker\n" \
	"        f.respond([g(tensors[0])], handler)\n" \
	"\n" \
	"Tensors are torch.Tensor, or anything with __dlpack__ (NumPy, JAX, CuPy). They\n" \
	"must be C-contiguous, have at most 8 dimensions and less than 2 GiB. They are\n" \
	"not copied in Python. Read-only arrays can be pushed but not pulled into.\n" \
	"\n" \
	"Keys are ints in 0..2**64-1 of the program's choice. A handler is the int that\n" \
	"names a request (push_pull) or a batch (get_batch). Lists may be any sequence.\n" \
	"Times are ints in milliseconds (timeout_ms) or nanoseconds (traces).\n" \
	"\n" \
	"Every call works from any thread, lets other threads run while it waits, and is\n" \
	"ended by Ctrl-C. The environment is read by init(), not by the import. After a\n" \
	"fork the child cannot use the module: start processes with method \"spawn\".\n" \
	"\n" \
	"All errors are fserver_lib.Error, a RuntimeError; the classes TimeoutError,\n" \
	"ConnectionError, ValueError and TypeError are the built-in ones as well, so\n" \
	"\"except TimeoutError\" works."

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
	"Worker: send tensors to all servers, and have tensors filled by them. Returns at once.\n" \
	"\n" \
	"push_tensors: sequence of tensors. Each goes to every server, with its dtype and\n" \
	"    shape. One without elements is fine.\n" \
	"push_keys: one int in 0..2**64-1 for each push tensor, all different.\n" \
	"pull_tensors: sequence of writable tensors to be filled. With S servers, their\n" \
	"    number is a multiple of S, and server i fills number [i*B, (i+1)*B) with\n" \
	"    B = len(pull_tensors) // S. The answer must have as many bytes as the tensor;\n" \
	"    dtype and shape are not compared.\n" \
	"pull_keys: one key for each pull tensor; those for one server all different.\n" \
	"need_event: with GPU tensors, True sends after the work queued so far on the\n" \
	"    current CUDA stream; False sends at once. No effect on CPU tensors.\n" \
	"servers: None for all, or the ranks of some, in any order: these alone are asked, S\n" \
	"    is their number, and pull_tensors has their parts in that order. Not in a\n" \
	"    cluster with a C++ server. They use get_batch(any=True).\n" \
	"\n" \
	"Both lists may be empty, but not both at once. Until wait() has returned do not\n" \
	"write to the push tensors or use the pull tensors; the library holds references\n" \
	"to them, so they may go out of scope. Pull tensors share no memory with each other;\n" \
	"with push tensors only if S is 1.\n" \
	"\n" \
	"Returns the handler (int) for wait(). Handlers count up from a random number: the call\n" \
	"uses one for each push tensor, then one for each of the B pulls, and returns the first.\n" \
	"\n" \
	"Raises ValueError (lengths that do not fit, a key out of range or twice, a tensor\n" \
	"not contiguous, too large, read-only or on a wrong device, one that shares memory, a\n" \
	"server twice or one that does not exist; names the argument),\n" \
	"TypeError (not a tensor, a masked array, not an int), ConnectionError (a server is lost), Error\n" \
	"(not a worker, before init() or after stop()). Nothing is sent then."

#define DOC_PREPARE \
	"prepare($module, /, push_tensors, push_keys, pull_tensors, pull_keys, need_event=True, *, servers=None)\n--\n\n" \
	"Worker: a push_pull() that is checked now and started as often as wanted.\n" \
	"\n" \
	"The arguments are those of push_pull(). A round costs less: its tensors, keys and\n" \
	"servers are settled, and its contents are those at the start.\n" \
	"\n" \
	"    x = f.prepare([hidden], [1], [out], [2])\n" \
	"    x.start()        # or x.start(rows=n): the first n rows of each tensor\n" \
	"    x.wait()         # out is filled, both are yours until the next start()\n" \
	"\n" \
	"Returns an Exchange, which keeps the memory of the tensors. Do not resize them. On the\n" \
	"server nothing is different, and it may be a C++ one; over RDMA the first round must\n" \
	"then be the largest, and none may be empty. On a GPU start() is ordered after PyTorch's\n" \
	"current stream, not after those of other libraries.\n" \
	"\n" \
	"Raises what push_pull() does, but for lost servers, which wait() tells. Nothing is sent."

#define DOC_EXCHANGE \
	"What prepare() returns: tensors that are exchanged again and again, one round at a\n" \
	"time; several exchanges may be under way. When it is dropped, the library lets go of\n" \
	"the tensors, after the round under way. Programs cannot make one."
#define DOC_EXCHANGE_START \
	"start($self, /, rows=None)\n--\n\n" \
	"Begin a round: send the push tensors, and have the pull tensors filled. Returns at once.\n" \
	"\n" \
	"rows: None for all, or n to send and fill the first n of the first dimension of each\n" \
	"    tensor. 0 is fine. The server sees tensors of n rows.\n" \
	"\n" \
	"Returns a handler (int), for fetch_trace() and get_all_handlers(). With need_event=True\n" \
	"it sends after the work queued so far on the current CUDA stream. If a server was\n" \
	"replaced since the last round, this one goes to the process in its place.\n" \
	"\n" \
	"While the current CUDA stream is captured into a graph nothing is sent, and -1 is\n" \
	"returned: each replay sends when the stream comes here. Tensors must be on the GPU.\n" \
	"wait() is captured then, too, before the next start(). See docs/gpu.md.\n" \
	"\n" \
	"Raises what a round of a replayed graph has failed with, once, as wait(), check() and\n" \
	"close() do; Error (started already: wait() first; closed; stopped), ValueError (more rows than\n" \
	"a tensor has: names it)."
#define DOC_EXCHANGE_WAIT \
	"wait($self, /, timeout_ms=15000)\n--\n\n" \
	"Wait until all servers have answered the round; then start() may be called again, also\n" \
	"after an error.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds, counted from start(). Captured into a graph it is\n" \
	"    for the rounds of all graphs from then on; the stream goes on after it.\n" \
	"\n" \
	"Raises TimeoutError, ConnectionError, KeyboardInterrupt (wait again) as wait() of the\n" \
	"module does, Error (not started, stopped), ValueError (another thread waits; the round\n" \
	"ended more than 4096 unwaited requests ago)."
#define DOC_EXCHANGE_CHECK \
	"check($self, /)\n--\n\n" \
	"Raise, once, what rounds of replayed graphs have failed with: the first of them, with its\n" \
	"number and the servers concerned. Does not wait: synchronise with the stream before.\n" \
	"Also after close() and stop(), where a replayed graph finds nobody to ask."
#define DOC_EXCHANGE_CLOSE \
	"close($self, /)\n--\n\n" \
	"Let go of the tensors, after the round under way if there is one. start() raises Error\n" \
	"from then on, and replayed graphs do not start or wait for anything. Dropping the\n" \
	"exchange does the same. Raises as check() does; it is closed then, too."

#define DOC_PREPARE_STREAMS \
	"prepare_streams($module, /, push_tensors, push_keys, pull_tensors, pull_keys, *, peers=None, timeout_ms=15000, round_timeout_ms=15000, host=False)\n--\n\n" \
	"Worker and server: an exchange that the streams of their GPUs make by themselves, on one\n" \
	"host: no CPU and no kernel on the way. Both ends prepare it, and queue it or capture it\n" \
	"into graphs as often as wanted.\n" \
	"\n" \
	"    x = f.prepare_streams([hidden], [1], [out], [2])    # worker\n" \
	"    x.send(); x.receive()                               # each token, or captured\n" \
	"    x = f.prepare_streams([hidden], [1], [out], [2])    # server, of one worker\n" \
	"    x.receive(); compute(hidden, out); x.send()\n" \
	"\n" \
	"On a worker the arguments are those of push_pull(). On a server push_tensors is what the\n" \
	"workers' tensors are copied to, and pull_tensors what they get: first all for the first\n" \
	"worker, then all for the next, as many for each. The two ends find each other by their\n" \
	"keys, in order.\n" \
	"\n" \
	"peers: ranks of servers or workers, ascending; None for all\n" \
	"timeout_ms: how long to wait for the other ends; None for no limit\n" \
	"round_timeout_ms: how long a worker's round may take; None for no limit\n" \
	"host: True, on both ends: send() and receive() are made by the processors, which look at\n" \
	"    each other's words in memory, not by streams: less time for a round, no graphs\n" \
	"\n" \
	"Returns a StreamExchange, which keeps the memory of the tensors.\n" \
	"\n" \
	"Raises TimeoutError (names who has not prepared), ValueError (tensors that are not on this\n" \
	"GPU, sizes that differ), TypeError, ConnectionError, Error (no GPU, GPUs that do not reach\n" \
	"each other, before init(), after stop())."
#define DOC_STREAMS \
	"What prepare_streams() returns: one end of an exchange in streams. A worker sends first,\n" \
	"a server receives first, then both take turns. It ends as a whole when a peer is lost or\n" \
	"closes its end, or when a round takes too long: streams go on, check() says why, and it is\n" \
	"prepared anew. When it is dropped it is closed. Programs cannot make one."
#define DOC_STREAMS_SEND \
	"send($self, /, need_event=True)\n--\n\n" \
	"Put into the current CUDA stream: tell the peers that the tensors for them are ready.\n" \
	"They may be written to again behind the next receive(). With host=True: tell them when the\n" \
	"current stream comes to this point, or now with need_event=False, which says that the\n" \
	"tensors are complete, and saves a look at the stream; does not wait.\n" \
	"\n" \
	"Raises what check() does, and Error (it is not send()'s turn)."
#define DOC_STREAMS_RECEIVE \
	"receive($self, /, timeout_ms=None)\n--\n\n" \
	"Put into the current CUDA stream: wait until all peers have sent, and copy what they have\n" \
	"into the tensors of this end. With host=True: do that, and return when it is done; after\n" \
	"timeout_ms raise TimeoutError, which names who has not sent: another receive() goes on, and\n" \
	"until it returns, or close(), tensors may change.\n" \
	"\n" \
	"Raises what check() does, and Error (it is not receive()'s turn)."
#define DOC_STREAMS_CHECK \
	"check($self, /)\n--\n\n" \
	"Raise why the exchange is over, as from then on each call does: ConnectionError,\n" \
	"TimeoutError, Error. If it does not, what streams have received by now is right. Does not\n" \
	"wait: synchronise with the stream before."
#define DOC_STREAMS_CLOSE \
	"close($self, /)\n--\n\n" \
	"End it on all its nodes, when what was queued is done. Raises as check() does; it is\n" \
	"closed then, too. What was captured keeps its tensors."

#define DOC_WAIT \
	"wait($module, /, handler, timeout_ms=15000)\n--\n\n" \
	"Worker: wait until all servers have answered the request.\n" \
	"\n" \
	"handler: what push_pull() returned, or an Operation, see its wait(): timeout_ms is\n" \
	"    as there, then. A later handler of the same request (see\n" \
	"    get_all_handlers) waits for that tensor only.\n" \
	"timeout_ms: limit in milliseconds, counted from push_pull(), not from this call.\n" \
	"\n" \
	"Afterwards the pull tensors are filled, and all tensors of the request are yours\n" \
	"again. Waiting for the same handler again returns, or raises the same, at once.\n" \
	"\n" \
	"Raises TimeoutError (names the servers that have not answered; the request is\n" \
	"given up, late answers are dropped), ConnectionError (a server that owes an answer\n" \
	"is lost), ValueError (unknown handler, or more than a server takes),\n" \
	"KeyboardInterrupt (the request goes on, wait again), Error (not a worker, before\n" \
	"init(), stopped)."

#define DOC_GET_ALL_HANDLERS \
	"get_all_handlers($module, handler, /)\n--\n\n" \
	"Worker: the handlers of all tensors of a request, as a list of ints.\n" \
	"\n" \
	"handler: what push_pull() returned.\n" \
	"\n" \
	"[h, h+1, ...]: the push tensors in order, then one for each pull of a server. Call\n" \
	"it before wait(); for a handler that was waited for, or is not known, it is [handler]."

#define DOC_FETCH_TRACE \
	"fetch_trace($module, handler, /)\n--\n\n" \
	"Worker: when one tensor passed which point, a list of 8 ints in nanoseconds.\n" \
	"\n" \
	"handler: one of get_all_handlers(). Valid once its answer is there, so call it after\n" \
	"    wait(); zeros before. With several servers it is that of the last answer.\n" \
	"\n" \
	"  0 request.start      worker: the message enters the transport\n" \
	"  1 request.postsend   worker: just before it is handed to the network\n" \
	"  2 request.postrecv   server: it has arrived\n" \
	"  3 request.process    server: handed to the application\n" \
	"  4 response.start     server: the answer enters the transport\n" \
	"  5 response.postsend  server: just before it is handed to the network\n" \
	"  6 response.postrecv  worker: it has arrived\n" \
	"  7 response.process   worker: the request is told\n" \
	"\n" \
	"0, 1, 6, 7 are of the worker's clock, get_nanosecond(); 2 to 5 of the server's. Take\n" \
	"differences within one host only, or (t6-t1) - (t5-t2), the time on the network.\n" \
	"Stamps of a StepMesh peer that does not send them are 0.\n" \
	"\n" \
	"Raises ValueError (unknown or too old a handler), Error (not a worker, before init())."

#define DOC_GET_NANOSECOND \
	"get_nanosecond($module, /)\n--\n\n" \
	"The clock of the traces: an int in nanoseconds since this host's boot, monotonic.\n" \
	"\n" \
	"Comparable between processes of one host. Works in every role and before init()."

#define DOC_GET_BATCH \
	"get_batch($module, /, *, timeout_ms=None, any=False, max_batches=None)\n--\n\n" \
	"Server: wait until every worker has sent a batch; return the oldest of each.\n" \
	"A worker that waits in stop() is not waited for: it sends no other batch.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds; None waits without limit. After a timeout no\n" \
	"    batch is lost: call again.\n" \
	"any: True waits for one batch, of any worker, and returns all that are there, the\n" \
	"    oldest first, several of one worker among them. The keys, or the first of them,\n" \
	"    can say whose a batch is.\n" \
	"max_batches: with any=True, return at most so many; None for no limit.\n" \
	"\n" \
	"Returns a list of tuples; without any=True one for each of the DMLC_NUM_WORKER\n" \
	"workers, in the order of their ranks:\n" \
	"\n" \
	"    (handler, tensors, keys)\n" \
	"\n" \
	"handler: int, for respond(). tensors, keys: what that worker pushed, in its order,\n" \
	"with its dtypes and shapes; both are empty for a request that only pulls. The\n" \
	"tensors are torch.Tensor if torch was imported and has the dtype, else\n" \
	"fserver_lib.Tensor. They are views of receive memory, which is not used again while\n" \
	"Python holds them (but see register_recv_buffer), and may be answered with as they\n" \
	"are.\n" \
	"\n" \
	"Raises Finished (all workers wait in stop(); uncaught it ends the program, with status\n" \
	"0), TimeoutError (names the workers that have sent nothing), ConnectionError (a\n" \
	"worker is lost; with any=True, all are), ValueError (max_batches below 1, or without\n" \
	"any=True), KeyboardInterrupt, MemoryError, Error (not a server, before init(),\n" \
	"stopped). Batches of which no tensors could be made are those of the next call."

#define DOC_RESPOND \
	"respond($module, /, tensors, handler, need_event=False)\n--\n\n" \
	"Server: answer a batch. Returns at once; answers leave in the order of the calls.\n" \
	"\n" \
	"tensors: sequence of as many tensors as the batch has pulls, in their order. Each\n" \
	"    has exactly as many bytes as the worker's pull tensor. Empty for a batch\n" \
	"    without pulls: a single push without pull waits for this answer; two and more\n" \
	"    are acknowledged when they arrive.\n" \
	"handler: the int from get_batch().\n" \
	"need_event: with GPU tensors, True sends after the work queued so far on the\n" \
	"    current CUDA stream; False sends at once. No effect on CPU tensors.\n" \
	"\n" \
	"The library holds references to the tensors until they are sent. Returns an Answer,\n" \
	"which may be ignored: its done() and wait() tell when the tensors have left and may\n" \
	"be written to. A copy, or a tensor of get_batch(), is safe without.\n" \
	"\n" \
	"Raises ValueError (unknown handler, another number of tensors or bytes, not\n" \
	"contiguous, wrong device), TypeError (not a tensor), Error (answered already, not a\n" \
	"server, before init(), stopped). If the worker is lost the answer is dropped."

#define DOC_REFUSE \
	"refuse($module, /, handler, reason)\n--\n\n" \
	"Server: end a batch without an answer. The worker's wait() raises Error at once,\n" \
	"with the reason in its text. One refusal is enough to end a push_pull to several\n" \
	"servers.\n" \
	"\n" \
	"handler: the int from get_batch().\n" \
	"reason: a str, of which the worker gets about the first 900 bytes.\n" \
	"\n" \
	"A worker that runs the C++ library cannot be told: it waits for its limit, which\n" \
	"this server's log says.\n" \
	"\n" \
	"Raises ValueError (unknown handler), TypeError (not a str), Error\n" \
	"(answered or refused already, pushes without a pull, which are acknowledged as they\n" \
	"arrive, not a server, before init(), stopped). If the worker is lost nothing happens."

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
	"When one batch cannot be answered, its pull tensor being of another size, the others\n" \
	"are answered all the same, and the first such error is raised.\n" \
	"\n" \
	"Raises ValueError (lengths differ, more rows than the buffer has, and as respond()),\n" \
	"TypeError, Error."

#define DOC_REGISTER_RECV_BUFFER \
	"register_recv_buffer($module, tensor, worker_ranks, push_keys, /)\n--\n\n" \
	"Server: let pushed tensors land in memory of yours.\n" \
	"\n" \
	"tensor: writable tensor, cut into len(push_keys) chunks of as many whole elements.\n" \
	"worker_ranks, push_keys: sequences of the same length, not empty. What worker\n" \
	"    worker_ranks[i] (DMLC_NODE_RANK) pushes with push_keys[i] lands in chunk i.\n" \
	"\n" \
	"get_batch() then returns views of the chunk, with the pushed dtype and shape; a\n" \
	"pushed tensor may be smaller than the chunk. The next push of that key by that\n" \
	"worker overwrites it, held or not: that is what was asked for. The library keeps\n" \
	"the tensor. Call it right after init(), then barrier(True, True) on both sides, so\n" \
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
	"    one of those chosen; the scheduler cannot take part.\n" \
	"instance_barrier: True waits for every process; False for as many calls as there\n" \
	"    are groups (DMLC_NUM_WORKER, DMLC_NUM_SERVER), one process of each should call.\n" \
	"timeout_ms: limit in milliseconds; None waits for\n" \
	"    STEPAF_BARRIER_TIMEOUT (an hour).\n" \
	"\n" \
	"Raises ValueError (the caller is not in the set), TimeoutError, ConnectionError (a\n" \
	"node or the scheduler is lost), KeyboardInterrupt, Error (before init(), stopped)."

#define DOC_TENSOR \
	"A view of memory that a push was received in; what get_batch() returns when torch\n" \
	"was not imported or does not have the dtype.\n" \
	"\n" \
	"Hand it to numpy.asarray, numpy.from_dlpack, jax.dlpack.from_dlpack or torch.from_dlpack: no copy.\n" \
	"An array of numpy.asarray can be written to; one of numpy.from_dlpack can from NumPy 2.1 on.\n" \
	"The memory lives as long as this object or an array made from it. respond() takes\n" \
	"it as it is. Programs cannot make one."

#define DOC_ANSWER \
	"What respond() returns: an answer on its way. It may be dropped at any time: the\n" \
	"tensors leave all the same. Programs cannot make one."
#define DOC_ANSWER_DONE \
	"done($self, /)\n--\n\n" \
	"Whether all tensors of the answer have left, or will not leave since the worker is\n" \
	"lost or has given up: they are yours again, to write to. Does not wait."
#define DOC_ANSWER_WAIT \
	"wait($self, /, timeout_ms=None)\n--\n\n" \
	"Wait until done().\n" \
	"\n" \
	"timeout_ms: limit in milliseconds; None waits without limit.\n" \
	"\n" \
	"Raises TimeoutError (wait again), KeyboardInterrupt, Error (stopped)."

#define DOC_TENSOR_SHAPE "Its sizes, a tuple of ints; () for a scalar."
#define DOC_TENSOR_DTYPE "The name of its element type as the sender had it, a str such as \"float32\" or \"bfloat16\"."
#define DOC_TENSOR_NBYTES "Its size in bytes, an int."
#define DOC_TENSOR_ARRAY_INTERFACE \
	"The memory as NumPy describes it, for numpy.asarray: it can be written to. Tensors of a\n" \
	"dtype that NumPy itself does not have, or on a GPU, have no such attribute."
#define DOC_TENSOR_ARRAY \
	"__array__($self, /, dtype=None, copy=None)\n--\n\n" \
	"numpy.asarray(self), or for a dtype that NumPy itself does not have numpy.from_dlpack(self):\n" \
	"no copy but to another dtype, or with copy=True.\n" \
	"\n" \
	"Raises what from_dlpack does for a dtype that NumPy has not, or memory of a GPU."
#define DOC_TENSOR_DLPACK \
	"__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n" \
	"A DLPack capsule on the memory, for from_dlpack of any library; no copy.\n" \
	"\n" \
	"stream: of no effect; what was received is complete. max_version: from (1, 0) on the\n" \
	"capsule has a version, and says that the memory can be written to.\n" \
	"dl_device: None, or what __dlpack_device__() returns. copy: None or False.\n" \
	"\n" \
	"Raises ValueError (a dtype that DLPack has no code for, such as bits8 or int4),\n" \
	"BufferError (a copy, or another device)."
#define DOC_TENSOR_DLPACK_DEVICE \
	"__dlpack_device__($self, /)\n--\n\n" \
	"(device type, device index) as DLPack numbers them; (1, 0) is the CPU."

#define DOC_NOTIFY \
	"SimpleNotify()\n--\n\n" \
	"Lets the current CUDA stream wait for a request, or for a batch, while Python goes\n" \
	"on to queue what comes behind it: a word in pinned host memory, for which the stream\n" \
	"waits. One wait at a time. Needs a GPU and a build with CUDA.\n" \
	"\n" \
	"Launch each kernel once before it is first used behind such a wait, in worker and\n" \
	"server: CUDA loads a kernel at its first launch, and may wait for all streams then,\n" \
	"for ever if one waits for what comes later. CUDA_MODULE_LOADING=EAGER serves, too."
#define DOC_NOTIFY_INIT \
	"init($self, /)\n--\n\n" \
	"Make the word. Call it once, before the others; before or after fserver_lib.init(),\n" \
	"which the others need.\n" \
	"\n" \
	"Raises Error (no GPU or no CUDA, and what is missing; stopped)."
#define DOC_NOTIFY_STREAM_WAIT_EVENT \
	"stream_wait_event($self, handler, /)\n--\n\n" \
	"Worker: let the current stream wait until the request is answered; return at once.\n" \
	"\n" \
	"handler: what push_pull() returned. The limit is 15 s from push_pull(); then, as after\n" \
	"    any error, the stream goes on, and wait_event_done() raises.\n" \
	"\n" \
	"Raises Error (wait_event_done() was not called since the last one; not a worker)."
#define DOC_NOTIFY_WAIT_EVENT_DONE \
	"wait_event_done($self, /)\n--\n\n" \
	"Wait until what stream_wait_event() waits for has come. Raises what wait() would."
#define DOC_NOTIFY_BLOCK_NOW_STREAM \
	"block_now_stream($self, /)\n--\n\n" \
	"Let the current stream wait for the next release of this object, and do nothing else:\n" \
	"the end of the stream_wait_event() or block_now_stream_and_get_batch() that follows,\n" \
	"or is under way."
#define DOC_NOTIFY_BLOCK_AND_GET_BATCH \
	"block_now_stream_and_get_batch($self, /)\n--\n\n" \
	"Server: let the current stream wait until a get_batch() in the background has its\n" \
	"result, which get_future_batch_data() returns. Returns at once.\n" \
	"\n" \
	"Raises Error (the last result was not fetched; not a server)."
#define DOC_NOTIFY_GET_FUTURE_BATCH_DATA \
	"get_future_batch_data($self, /)\n--\n\n" \
	"Server: wait for the result of block_now_stream_and_get_batch(), once for each.\n" \
	"\n" \
	"Returns and raises what get_batch() does."

#define DOC_MAP_PINNED_TENSOR \
	"map_pinned_tensor($module, tensor, device_index, /)\n--\n\n" \
	"A CUDA tensor on the memory of a pinned tensor of the host, with its shape and dtype.\n" \
	"\n" \
	"tensor: contiguous, in pinned memory (pin_memory=True). The result keeps it.\n" \
	"device_index: the GPU, as PyTorch counts them.\n" \
	"\n" \
	"Raises ValueError (not on the host, not contiguous), Error (not pinned; no GPU or no\n" \
	"CUDA, and what is missing)."
#define DOC_WRITE_FLAG \
	"write_flag($module, flag, seq, /)\n--\n\n" \
	"In the current CUDA stream: flag[0] = seq[0], visible to the CPU and to other GPUs\n" \
	"after all that the stream did before. A graph may capture it.\n" \
	"\n" \
	"flag, seq: int64 tensors on the same GPU, or of map_pinned_tensor(); the first\n" \
	"    element counts.\n" \
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
	"seq: int64 tensor on a GPU; the first element counts. A graph may capture it; each\n" \
	"    replay adds 1. Errors as write_flag()."

#define DOC_ERROR \
	"What all errors of this module are. Its text names this node's role and rank, the\n" \
	"peer, what was asked, and what to do. Raised itself for calls that are misplaced:\n" \
	"before init(), after stop(), in the wrong role, a second respond()."
#define DOC_TIMEOUT_ERROR "A limit has passed; the text says who is missing, how long it took and what the limit was."
#define DOC_CONNECTION_ERROR "A peer, or the scheduler, is lost; the text says which."
#define DOC_FINISHED \
	"get_batch() returns nothing any more: all workers wait in stop(), or have been lost\n" \
	"without a replacement. It is a SystemExit with the code 0, no Exception: a program that\n" \
	"does not catch it ends in order, as if it had called stop(), with status 0. A thread\n" \
	"other than the main one ends silently."
#define DOC_VALUE_ERROR "An argument, or an environment variable, that makes no sense; the text says which, and what is allowed."
#define DOC_TYPE_ERROR "An argument of a wrong type; the text says which, what came and what is wanted."

/* Communicators. self is $module or $self. */

#define DOC_COMMUNICATOR \
	"Communicator(ranks=None, *, id=1, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"Nodes of one role that exchange tensors among themselves. All ranks make it at the same\n" \
	"time, with the same arguments, and then make the same calls in the same order. It returns\n" \
	"when all have made theirs.\n" \
	"\n" \
	"ranks: instance ranks of this process's role, ascending; None means the instances of its\n" \
	"    group.\n" \
	"id: 1 to 4095, tells the communicators of a process apart. The functions of the module,\n" \
	"    all_gather() and so on, use one of the group with 0. The first call of one makes that,\n" \
	"    and waits for the others' up to 15 s.\n" \
	"timeout_ms: limit of making it, and of each call, counted from the call; None means 15 s.\n" \
	"\n" \
	"What goes wrong among ranks ends the communicator on all of them: one that is lost or late,\n" \
	"or calls that differ. rebuild(), which all ranks call, begins anew; a process in the place\n" \
	"of a lost one makes a Communicator instead, or, for the group's, calls rebuild() of the\n" \
	"module as well. Up to 64 calls may be in flight, of which a large all_reduce() counts as\n" \
	"two. All ranks must be nodes of this library: C++ nodes are refused.\n" \
	"\n" \
	"Tensors lie on the host, or all of a call on this process's GPU: then it begins after\n" \
	"the work queued so far in PyTorch's current stream. Those with arithmetic want the host.\n" \
	"\n" \
	"Raises ValueError, TypeError (names the argument), TimeoutError (names who has not come),\n" \
	"ConnectionError, Error."
#define DOC_OPEN_WINDOW(self) \
	"open_window(" self ", /, size, signals=1, *, device=None, timeout_ms=None)\n--\n\n" \
	"Open a window: size bytes on each rank, into which the others write. All ranks call it, with\n" \
	"the same arguments. On GPUs, which are of one host and reach each other, puts are copies by the\n" \
	"GPU that puts, in its stream, so no CPU and no kernel is in them. In memory of the hosts it\n" \
	"works everywhere; a rank may give a tensor there in place of size, which is its window then.\n" \
	"\n" \
	"    w = f.open_window(1 << 20)\n" \
	"    w.put_signal(1, 0, x)        # rank 0\n" \
	"    w.wait_signal(0)             # rank 1: from here on x is in w.tensor (on a GPU: in the stream)\n" \
	"\n" \
	"signals: how many each rank has at each other one\n" \
	"device: 'cuda', 'cpu', or None: where this node's tensors lie (STEPMESH_BAKCEND)\n" \
	"timeout_ms: how long to wait for the other ranks; None is the communicator's limit\n" \
	"\n" \
	"Returns a Window.\n" \
	"\n" \
	"Raises ValueError, TypeError, TimeoutError, ConnectionError, MemoryError, Error (no GPU, GPUs\n" \
	"that do not reach each other, other arguments on another rank)."
#define DOC_WINDOW \
	"What open_window() returns: memory of all ranks of a communicator. It is over for all ranks\n" \
	"when one is lost or when the communicator fails; check() says why, and it is opened anew. When\n" \
	"it is dropped, and its tensor, it is closed. Programs cannot make one.\n" \
	"\n" \
	"On GPUs every call but close() puts something into PyTorch's current stream and returns;\n" \
	"streams that are being captured are refused. Streams go on when it is over, also when a rank\n" \
	"closes it while another one's stream waits for it. In memory of the hosts calls wait\n" \
	"themselves, for the communicator's limit, and a rank that closes its end ends nobody else's."
#define DOC_WINDOW_PUT \
	"put($self, /, rank, offset, x)\n--\n\n" \
	"Copy x into the memory of a rank, offset bytes behind its beginning. What is put to one rank,\n" \
	"and signalled, comes in the order of the calls, in whichever streams. x lies where the window\n" \
	"does. On a GPU x may be written to again behind it in the stream. On the host x is the\n" \
	"library's until flush() to that rank, or close(), has returned; put() waits only while\n" \
	"more than 128 messages or 32 MiB have not been taken there.\n" \
	"\n" \
	"Raises ValueError, TimeoutError, what check() does, and Error (that rank has closed the window)."
#define DOC_WINDOW_PUT_SIGNAL \
	"put_signal($self, /, rank, offset, x, signal=0)\n--\n\n" \
	"put(), and behind it signal()."
#define DOC_WINDOW_SIGNAL \
	"signal($self, /, rank, signal=0)\n--\n\n" \
	"Add one to a signal of this rank at another one, behind everything that was put there before.\n" \
	"\n" \
	"Raises as put() does."
#define DOC_WINDOW_WAIT_SIGNAL \
	"wait_signal($self, /, rank, signal=0, *, timeout_ms=None)\n--\n\n" \
	"Wait until a rank has signalled, and take one: each signal lets one wait go on, in the order of\n" \
	"the calls. What the rank has put here before the signal is in tensor then. When it raises it has\n" \
	"taken none. timeout_ms: for windows on the host; None is the communicator's limit.\n" \
	"\n" \
	"On GPUs it is the stream that waits. There is no limit of time but the end of the window, and\n" \
	"none at all in the default stream when more is queued there than it has room for: if a rank is\n" \
	"lost then, the process hangs. To queue far ahead use a stream of your own\n" \
	"(torch.cuda.stream(torch.cuda.Stream())).\n" \
	"\n" \
	"Raises as put() does."
#define DOC_WINDOW_FLUSH \
	"flush($self, /, rank)\n--\n\n" \
	"Wait until what was put to a rank is in its memory. On GPUs the stream waits for what was put\n" \
	"there in other streams."
#define DOC_WINDOW_CHECK \
	"check($self, /)\n--\n\n" \
	"Raise why the window is over: ConnectionError, TimeoutError, Error. If it does not, what streams\n" \
	"have waited for by now is right. Does not wait: synchronise with the stream before."
#define DOC_WINDOW_CLOSE \
	"close($self, /)\n--\n\n" \
	"Close this rank's end, when what it has put has arrived. All ranks close theirs, when what they\n" \
	"wait for has come: see Communicator.barrier(). On GPUs a stream of this rank that still waits goes\n" \
	"on, and the window is over for all ranks; the memory stays until the process ends, since\n" \
	"others have mapped it."
#define DOC_ALL_GATHER(self) \
	"all_gather(" self ", /, out, x)\n--\n\n" \
	"Make out the tensors x of all ranks, in their order. All have one size and type, and out\n" \
	"has as many times that as there are ranks. x may be this rank's part of out.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_ALL_GATHER_V(self) \
	"all_gather_v(" self ", /, out, x)\n--\n\n" \
	"Make out[r] the tensor x of rank r. out is a list, of one tensor for each rank, with the\n" \
	"sizes of what they give, which may differ and be 0.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_ALL_TO_ALL(self) \
	"all_to_all(" self ", /, out, x)\n--\n\n" \
	"Give x[r] to rank r, and make out[r] what rank r gives this one. Both are lists of one\n" \
	"tensor for each rank; sizes may differ and be 0.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_BROADCAST(self) \
	"broadcast(" self ", /, x, root)\n--\n\n" \
	"Make x on all ranks what it is on rank root.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_GATHER(self) \
	"gather(" self ", /, out, x, root)\n--\n\n" \
	"Make out, on rank root, the tensors x of all ranks, in their order. Others give None.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_SCATTER(self) \
	"scatter(" self ", /, out, x, root)\n--\n\n" \
	"Make out this rank's part of the tensor x of rank root, which has as many times the size\n" \
	"as there are ranks. Others give None as x.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_REDUCE_SCATTER(self) \
	"reduce_scatter(" self ", /, out, x, op='sum')\n--\n\n" \
	"Make out the reduction of this rank's parts of the tensors x of all ranks, each of which\n" \
	"has as many times the size of out as there are ranks.\n" \
	"\n" \
	"Elements are reduced in the order of ranks: op is 'sum', 'min', 'max' or 'product', of\n" \
	"integers, float16, bfloat16, float32 or float64.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_ALL_REDUCE(self) \
	"all_reduce(" self ", /, out, x, op='sum')\n--\n\n" \
	"Make out the reduction of the tensors x of all ranks. out may be x.\n" \
	"\n" \
	"Elements are reduced in the order of ranks: op is 'sum', 'min', 'max' or 'product', of\n" \
	"integers, float16, bfloat16, float32 or float64.\n" \
	"\n" \
	"Returns an Operation at once; see its wait(). The tensors are the library's until then."
#define DOC_REBUILD(self) \
	"rebuild(" self ", /, *, timeout_ms=None)\n--\n\n" \
	"Make a communicator usable again that has failed, when all ranks call it; calls in flight\n" \
	"fail. When it returns no other rank reads tensors of calls that have failed. The one of\n" \
	"the module makes the group's communicator where this process has none yet.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds; None means that of the communicator.\n" \
	"\n" \
	"Raises TimeoutError (names who has not come), ConnectionError, Error."
#define DOC_COMM_BARRIER \
	"barrier($self, /, *, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"Wait until all ranks have called it. When timeout_ms passes, or for None the communicator's\n" \
	"limit, the communicator has failed."
#define DOC_COMM_CLOSE \
	"close($self, /, *, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"End the communicator on all ranks, and wait until none reads tensors of this one, for\n" \
	"timeout_ms, or for None the communicator's limit. When it is no longer referred to, by an\n" \
	"Operation neither, the same happens in the background."
#define DOC_OPERATION \
	"A collective under way. wait() of the module takes one as well. Dropping it lets the\n" \
	"operation go on, as long as there is its communicator."
#define DOC_OPERATION_WAIT \
	"wait($self, /, timeout_ms=None)\n" \
	"--\n" \
	"\n" \
	"Wait until the results are there and all others have taken this rank's tensors: all are\n" \
	"the caller's again then. It may be called again, with the same result.\n" \
	"\n" \
	"timeout_ms: limit in milliseconds from now, with which the communicator fails, besides that\n" \
	"    of the communicator, which counts from the call.\n" \
	"\n" \
	"Raises ConnectionError (a rank is lost), TimeoutError (also where broadcasts have different\n" \
	"roots, each its own rank), Error (calls of ranks do not match: names both, or says that the\n" \
	"other one has ended; given up by another rank), KeyboardInterrupt (wait again). After an error\n" \
	"nothing writes to the results any more, whose contents are any. What others may still read,\n" \
	"which is all that this rank gives and the result of all_reduce(), must stay as it is until\n" \
	"rebuild() or close() has returned. The library holds references to all of them, so they\n" \
	"may go out of scope."

#endif
