# A process of stepaf bench afd: with KIND fserver_lib a node of the role DMLC_ROLE, with KIND torch a rank of torch.distributed,
# which uses NCCL between GPUs and gloo between CPUs. The first ranks of torch.distributed are the servers.
#   KIND DEVICE PUSH PULL MICRO-BATCHES LAYERS WORKERS SERVERS ADDRESS RANK
# Each line "WHAT FORM AMOUNT COUNT" of the standard input asks for COUNT measurements. The answer is a line of JSON with their
# nanoseconds, of servers with zeros, or with an error. AMOUNT is a computation: on a CPU its nanoseconds, on a GPU the rows of its
# matrix products.
import collections
import json
import os
import sys
import time

import torch

OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # libraries print, too

KIND, DEVICE = sys.argv[1:3]
PUSH, PULL, MICRO_BATCHES, LAYERS, WORKERS, SERVERS = map(int, sys.argv[3:9])
ADDRESS, RANK = sys.argv[9], int(sys.argv[10])
NUMBERS = range(MICRO_BATCHES)
AHEAD = 8  # rounds that a server queues before it waits for its stream
PLACES = 32  # places of a tensor that a decode step writes and checks; the other bytes are constant
OTHERS = 7  # the constant of an answer of server 0; that of server 1 is greater by 1
WIDTH, PRODUCTS = 4096, 3  # columns of a matrix product, and products of a computation
MESSAGES = "push_pull", "prepared"
STREAMS = "streams", "side", "graphs"
now = time.perf_counter_ns
if KIND == "fserver_lib":
    import fserver_lib as f

SERVER = os.environ["DMLC_ROLE"] == "server" if KIND == "fserver_lib" else RANK < SERVERS
OWN = RANK - SERVERS if KIND == "torch" and not SERVER else RANK  # the rank within the role


class Place:
    """The device of the tensors. On a GPU all work is put into one stream, and receives of the form side into another."""

    def __init__(self):
        self.gpu = DEVICE == "gpu"
        self.device = torch.device("cuda", int(os.environ["STEPMESH_GPU"])) if self.gpu else torch.device("cpu")
        self.main = self.side = None
        if self.gpu:
            torch.cuda.set_device(self.device)
            self.main, self.side = torch.cuda.Stream(), torch.cuda.Stream()
            torch.cuda.set_stream(self.main)
        else:
            torch.set_num_threads(1)
        self.graphs, self.marks = {}, collections.deque()

    def zeros(self, *shape, dtype=torch.uint8):
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def finish(self):
        if self.gpu:
            torch.cuda.current_stream().synchronize()

    def throttle(self):
        """Waits until at most AHEAD rounds are queued."""
        if self.gpu:
            self.marks.append(torch.cuda.Event())
            self.marks[-1].record()
            if len(self.marks) > AHEAD:
                self.marks.popleft().synchronize()

    def replay(self, key, work):
        """Replays a graph of work. The first call runs the work, and captures the graph."""
        graph = self.graphs.get(key)
        if graph:
            return graph.replay()
        work()
        self.finish()
        if self.gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            self.graphs[key] = graph


class Computation:
    """The computation of a layer and micro-batch: matrix products on a GPU, a loop on a CPU. On a GPU it is replayed as a graph, as
    engines do: queueing its kernels one by one takes as long as short computations."""

    def __init__(self, place):
        self.place, self.tensors = place, {}

    def products(self, rows):
        if rows not in self.tensors:
            shapes = (rows, WIDTH), (WIDTH, WIDTH), (rows, WIDTH)
            self.tensors[rows] = [torch.ones(s, dtype=torch.bfloat16, device=self.place.device) for s in shapes]
        x, w, y = self.tensors[rows]
        for _ in range(PRODUCTS):
            torch.mm(x, w, out=y)

    def run(self, amount, start):
        if self.place.gpu:
            return self.products(amount)
        while now() - start < amount:
            pass

    def rows(self, ns):
        """The number of rows for which a computation takes about so many nanoseconds."""
        rows = 1024
        for _ in range(4):
            times = []
            for _ in range(20):
                self.place.finish()
                start = now()
                for _ in range(10):
                    self.products(rows)
                self.place.finish()
                times.append((now() - start) / 10)
            rows = max(int(rows * ns / sorted(times)[len(times) // 2] / 64 + 0.5) * 64, 64)
        return rows


# Exchanges of one micro-batch. A worker calls send, post and receive, a server post, receive and send. After receive the
# tensors are valid for the work that is queued next.


class Exchange:
    def __init__(self, exchange):
        self.exchange = exchange

    def post(self):
        """Begins to receive. Most forms have no separate begin."""

    def check(self):
        """Raises the error of rounds that streams have made."""

    def send(self):
        self.exchange.send()

    def receive(self):
        self.exchange.receive()


class Call(Exchange):
    """A push_pull of a worker."""

    def send(self):
        self.handler = f.push_pull(*self.exchange)

    def receive(self):
        f.wait(self.handler)


class Prepared(Exchange):
    """A prepared exchange of a worker."""

    def send(self):
        self.exchange.start()

    def receive(self):
        self.exchange.wait()


class Streams(Exchange):
    def check(self):
        self.exchange.check()


class Side(Streams):
    """An exchange in streams that receives in a stream of its own."""

    def __init__(self, exchange, place):
        super().__init__(exchange)
        self.place, self.done = place, torch.cuda.Event()

    def post(self):
        self.place.side.wait_stream(self.place.main)
        with torch.cuda.stream(self.place.side):
            self.exchange.receive()
            self.done.record()

    def receive(self):
        self.place.main.wait_event(self.done)


class Torch(Exchange):
    """Sends and receives of torch.distributed, in a group for each direction."""

    def __init__(self, groups, out, into, peers):
        dist = torch.distributed
        there, back = reversed(groups) if SERVER else groups
        self.out = [dist.P2POp(dist.isend, t, p, there) for t, p in zip(out, peers)]
        self.into = [dist.P2POp(dist.irecv, t, p, back) for t, p in zip(into, peers)]
        self.sent, self.received = [], []

    def send(self):
        self.sent = torch.distributed.batch_isend_irecv(self.out)

    def post(self):
        self.received = torch.distributed.batch_isend_irecv(self.into)

    def receive(self):
        for w in self.sent + self.received:
            w.wait()
        self.sent = []


def key(kind, i):
    """The key of a push tensor; the key of the pull tensor is the next number."""
    return 1000 * kind + 2 * i


TIMED, STEPS, BY_HOSTS, HOST_STEPS, IN_STREAMS, STREAM_STEPS, BATCHES, BATCH_STEPS = range(1, 9)  # kinds of keys


class End:
    """What workers and servers have in common."""

    def __init__(self, place, groups):
        self.place, self.groups, self.computation, self.made = place, groups, Computation(place), {}
        self.wrong = place.zeros(1, dtype=torch.bool)
        self.whole = False  # True: one graph has the whole decode step, and compute() queues kernels

    def exchange(self, form, steps, i, out, into):
        """The exchange i of a form. out and into are lists of a tensor for each peer."""
        form = "streams" if form == "graphs" else form
        at = form, steps, i
        if at in self.made:
            return self.made[at]
        if form == "torch":
            peers = range(SERVERS, SERVERS + WORKERS) if SERVER else range(SERVERS)
            x = Torch(self.groups, out, into, peers)
        elif form in MESSAGES:
            k = 1000 * 1000 * OWN + key(BATCH_STEPS if steps else BATCHES, i)
            call = out[:1], [k], into, [k + 1] * len(into)
            x = Call(call) if form == "push_pull" else Prepared(f.prepare(*call))
        else:
            host = form == "hosts"
            k = key((HOST_STEPS if steps else BY_HOSTS) if host else (STREAM_STEPS if steps else IN_STREAMS), i)
            shared = "hosts" if host else "streams", "exchange", steps, i
            if shared not in self.made:
                push, pull = (into, out) if SERVER else (out[:1], into)
                self.made[shared] = f.prepare_streams(push, [k] * len(push), pull, [k + 1] * len(pull), host=host, timeout_ms=60000)
            y = self.made[shared]
            x = Exchange(y) if host else Side(y, self.place) if form == "side" else Streams(y)
        self.made[at] = x
        return x

    def capture(self, amount):
        """Captures the computations of a decode step, unless it was done before. Meanwhile no exchange may be in flight."""
        wrong = self.wrong.clone()
        for m in NUMBERS if self.place.gpu else ():
            for full in (True, False):
                key = "compute", m, amount, full
                if key not in self.place.graphs:
                    self.place.replay(key, lambda: self.work(m, amount, full, 0))
        self.wrong.copy_(wrong)

    def compute(self, m, amount, full, start=None):
        """The computation of a micro-batch. full=False leaves out the check of this end's receive buffers."""
        graph = None if self.whole else self.place.graphs.get(("compute", m, amount, full))
        if graph:
            graph.replay()
        else:
            self.work(m, amount, full, start or now())

    def settle(self, form, exchanges):
        """Waits for the queued work, and raises the errors of it."""
        self.place.finish()
        for x in exchanges:
            x.check()
        if bool(self.wrong.any()):
            sys.exit(f"{form}: wrong values")

    def alone(self, amount, n):
        """Times n times the computations of a decode step."""
        self.capture(amount)
        self.whole = False
        ns, wrong = [], self.wrong.clone()
        for _ in range(n):
            self.place.finish()
            start = now()
            for _ in range(LAYERS):
                for m in NUMBERS:
                    self.compute(m, amount, True)
            self.place.finish()
            ns.append(now() - start)
        self.wrong.copy_(wrong)
        return ns


def places(t):
    """The places of rows of bytes that a decode step writes and checks."""
    return t[:, :: max(t.shape[1] // PLACES, 1)]


class Worker(End):
    def __init__(self, place, groups):
        super().__init__(place, groups)
        self.push, self.pull = place.zeros(PUSH), place.zeros(SERVERS, PULL)
        self.held = [place.zeros(SERVERS, PULL) for _ in range(2)]  # the expected answers of the server's two buffers
        # Of decode steps: a push has the same value in its places, and its answer the value plus the server's rank + 1.
        self.pushes, self.pulls = place.zeros(MICRO_BATCHES, PUSH), place.zeros(MICRO_BATCHES, SERVERS, PULL)
        self.value, self.want = place.zeros(1) + 16 * OWN, place.zeros(MICRO_BATCHES, SERVERS, 1)
        self.servers = (torch.arange(SERVERS, device=place.device) + 1).to(torch.uint8).reshape(SERVERS, 1)
        self.push_places, self.pull_places = [places(self.pushes[m : m + 1]) for m in NUMBERS], [places(self.pulls[m]) for m in NUMBERS]
        self.differs = torch.zeros_like(places(self.pull), dtype=torch.bool)
        self.wrong = torch.zeros_like(self.differs)

    def produce(self, m):
        self.value.add_(1)
        self.push_places[m].copy_(self.value)
        torch.add(self.value, self.servers, out=self.want[m])

    def consume(self, m):
        torch.ne(self.pull_places[m], self.want[m], out=self.differs)
        self.wrong.logical_or_(self.differs)

    def work(self, m, amount, full, start):
        if full:
            self.consume(m)
        self.produce(m)
        self.computation.run(amount, start)

    def compare(self, form, turn, when):
        self.place.finish()
        if not torch.equal(self.pull, self.held[turn]):
            sys.exit(f"{form}: wrong values after {when}")

    def trips(self, form, n):
        """Times n round trips, of which the server answers each from the other one of two buffers. Round trips before, which
        are not timed, set their contents. Every byte of these and of the last round trip is checked."""
        numbers = [[0, 1], [2, 3]] if form in MESSAGES else [[0, 1], [0, 1]]
        timed, checked = ([self.exchange(form, False, i, [self.push] * SERVERS, list(self.pull)) for i in of] for of in numbers)
        queued = form == "torch" or form in STREAMS

        def trip(x):
            x.send()
            x.post()
            x.receive()

        def once(turn):
            if form == "graphs":
                self.place.replay(("trip", turn), lambda: trip(timed[turn]))
            else:
                trip(timed[turn])
            if queued:
                self.place.finish()

        for turn in range(2):
            self.push.random_(0, 256)
            self.pull.zero_()
            self.place.finish()
            trip(checked[turn])
            self.place.finish()
            for server in range(SERVERS):
                answer(self.push, self.held[turn][server], 1 + server)
            self.compare(form, turn, "a checked round trip")
        for turn in range(2 * (form == "graphs")):
            once(turn)
        self.pull.zero_()
        self.place.finish()
        ns = []
        for i in range(n):
            start = now()
            once(i & 1)
            ns.append(now() - start)
        self.settle(form, timed)
        self.compare(form, (n - 1) & 1, "the timed round trips")
        return ns

    def steps(self, form, amount, n):
        """Times n decode steps."""
        self.capture(amount)
        self.whole = form == "graphs"
        every = [self.exchange(form, True, m, [self.pushes[m]] * SERVERS, list(self.pulls[m])) for m in NUMBERS]

        def work():
            for layer in range(LAYERS):
                for m, x in enumerate(every):
                    if layer > 0:
                        x.receive()
                    self.compute(m, amount, layer > 0)
                    x.send()
                    x.post()
            for x in every:
                x.receive()

        step = work
        if form == "graphs":
            def step():
                self.place.replay(("step", amount), work)

            step()
            self.place.finish()
        ns = []
        for _ in range(n):
            start = now()
            step()
            self.place.finish()
            ns.append(now() - start)
            for m in NUMBERS:
                self.consume(m)
        self.settle(form, every)
        for m in NUMBERS:
            want = (self.servers + (OTHERS - 1)).repeat(1, PULL)
            places(want).copy_(self.want[m].expand_as(places(want)))
            if not torch.equal(self.pulls[m], want):
                sys.exit(f"{form}: wrong values after the last decode step")
        return ns


def answer(push, out, add):
    """Writes the answer to a push, which depends on every byte of it."""
    for at in range(0, out.numel(), push.numel()):
        k = min(push.numel(), out.numel() - at)
        torch.add(push[:k], add, out=out[at : at + k])


class Server(End):
    def __init__(self, place, groups):
        super().__init__(place, groups)
        self.push = place.zeros(WORKERS, PUSH)
        self.answers = [place.zeros(WORKERS, PULL) for _ in range(2)]
        self.pushes, self.outs = place.zeros(MICRO_BATCHES, WORKERS, PUSH), place.zeros(MICRO_BATCHES, WORKERS, PULL)
        self.outs.fill_(OTHERS + OWN)
        self.out_places = [[places(of[w : w + 1]) for w in range(WORKERS)] for of in self.outs]
        self.wrong = torch.zeros_like(places(self.push)[:1], dtype=torch.bool)
        self.differs = torch.zeros_like(self.wrong)

    def reply(self, m, pushes):
        """Checks the pushes of all workers, and makes their answers."""
        for push, out in zip(pushes, self.out_places[m]):
            torch.ne(places(push.reshape(1, PUSH)), push[:1], out=self.differs)
            self.wrong.logical_or_(self.differs)
            torch.add(push[:1].expand_as(out), 1 + OWN, out=out)

    def work(self, m, amount, full, start):
        if full:
            self.reply(m, self.pushes[m])
        self.computation.run(amount, start)

    def trips(self, form, n):
        if form in MESSAGES:
            return self.answer_batches(WORKERS * (n + 2))
        both = [self.exchange(form, False, i, list(self.answers[i]), list(self.push)) for i in range(2)]

        def work(x, make=False):
            x.post()
            x.receive()
            if make:
                for push, out in zip(self.push, self.answers[both.index(x)]):
                    answer(push, out, 1 + OWN)
            x.send()

        for x in both:
            work(x, True)
            self.place.finish()
        for i in range(n + 2 * (form == "graphs")):
            if form == "graphs":
                self.place.replay(("trip", i & 1), lambda: work(both[i & 1]))
            else:
                work(both[i & 1])
            if form != "hosts":  # hosts wait for the GPU by themselves
                self.place.throttle()
        self.settle(form, both)
        return [0] * n

    def answer_batches(self, n):
        """Answers n batches of any worker."""
        while n > 0:
            for handler, tensors, keys in f.get_batch(any=True):
                worker, i = divmod(keys[0], 1000 * 1000)
                checked, turn = divmod((i - key(BATCHES, 0)) // 2, 2)
                out = self.answers[turn][worker]
                if checked:
                    answer(tensors[0], out, 1 + OWN)
                f.respond([out], handler, bool(checked))
                n -= 1
                del tensors
        return []

    def steps(self, form, amount, n):
        self.capture(amount)
        self.whole = form == "graphs"
        if form in MESSAGES:
            self.serve_batches(amount, n * LAYERS)
            self.settle(form, [])
            return [0] * n
        every = [self.exchange(form, True, m, list(self.outs[m]), list(self.pushes[m])) for m in NUMBERS]

        def work():
            for x in every:
                x.post()
            for layer in range(LAYERS):
                for m, x in enumerate(every):
                    x.receive()
                    self.compute(m, amount, True)
                    x.send()
                    if layer + 1 < LAYERS:
                        x.post()

        if form == "graphs":
            self.place.replay(("step", amount), work)
            self.place.finish()
        for _ in range(n):
            if form == "graphs":
                self.place.replay(("step", amount), work)
            else:
                work()
            self.place.finish()
        self.settle(form, every)
        return [0] * n

    def serve_batches(self, amount, layers):
        """Answers each micro-batch when it has arrived from all workers."""
        waiting, left = [{} for _ in NUMBERS], layers * MICRO_BATCHES
        while left > 0:
            for handler, tensors, keys in f.get_batch(any=True):
                worker, i = divmod(keys[0], 1000 * 1000)
                m = (i - key(BATCH_STEPS, 0)) // 2
                waiting[m][worker] = handler, tensors[0]
                del tensors
                if len(waiting[m]) < WORKERS:
                    continue
                start = now()
                self.reply(m, [waiting[m][w][1] for w in range(WORKERS)])
                self.compute(m, amount, False, start)
                for w in range(WORKERS):
                    f.respond([self.outs[m][w]], waiting[m][w][0], True)
                waiting[m].clear()
                left -= 1


def main():
    groups = None
    place = Place() if KIND == "torch" or os.environ["DMLC_ROLE"] != "scheduler" else None
    if KIND == "fserver_lib":
        f.init()
    else:
        dist = torch.distributed
        more = {"device_id": place.device} if place.gpu else {}
        dist.init_process_group("nccl" if place.gpu else "gloo", init_method=ADDRESS, rank=RANK, world_size=WORKERS + SERVERS, **more)
        groups = dist.new_group(), dist.new_group()
    end = (Server if SERVER else Worker)(place, groups)
    print(json.dumps({}), file=OUT)
    for line in sys.stdin:
        what, form, amount, n = line.split()
        amount, n = int(amount), int(n)
        if what == "rows":
            ns = [end.computation.rows(amount)]
        elif what == "alone":
            ns = end.alone(amount, n)
        elif what == "steps":
            ns = end.steps(form, amount, n)
        else:
            ns = end.trips(form, n) or [0] * n
        print(json.dumps({"ns": ns}), file=OUT)
    if KIND == "fserver_lib":
        end.made.clear()
        f.stop()
    else:
        torch.distributed.destroy_process_group()


main()
