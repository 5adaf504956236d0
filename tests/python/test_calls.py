"""The calls of the module: names, arguments, defaults, return types."""

import builtins
import inspect

import fserver_lib as f
import pytest

CALLS = {
    "init": "(path='', /, *, timeout_ms=None)",
    "stop": "(*, timeout_ms=None)",
    "finalize": "(*, timeout_ms=None)",
    "push_pull": "(push_tensors, push_keys, pull_tensors, pull_keys, need_event=True, *, servers=None)",
    "wait": "(handler, timeout_ms=15000)",
    "poll": "(handler, /)",
    "fileno": "(*, any=False)",
    "get_all_handlers": "(handler, /)",
    "fetch_trace": "(handler, /)",
    "stats": "()",
    "get_nanosecond": "()",
    "get_batch": "(*, timeout_ms=None, any=False, max_batches=None)",
    "respond": "(tensors, handler, need_event=False)",
    "refuse": "(handler, reason)",
    "respond_vec": "(ret_buffer, tensors_vec, handler_vec, /)",
    "empty_shared": "(size, /)",
    "answer_tensor": "(handler, i=0)",
    "register_recv_buffer": "(tensor, worker_ranks, push_keys, /)",
    "barrier": "(include_server, include_client, instance_barrier=True, *, timeout_ms=None)",
}


@pytest.mark.parametrize("name", CALLS)
def test_signature(name):
    call = getattr(f, name)
    assert str(inspect.signature(call)) == CALLS[name]
    doc = inspect.getdoc(call)
    assert doc and len(doc.splitlines()) > 2, "help() should teach"
    for argument in inspect.signature(call).parameters:
        assert argument in doc, f"the text says nothing about {argument}"


def test_errors_are_runtime_errors():
    assert issubclass(f.Error, RuntimeError)
    for name in ("TimeoutError", "ConnectionError", "ValueError", "TypeError"):
        ours = getattr(f, name)
        assert ours.__mro__[0].__name__ == name
        assert issubclass(ours, f.Error) and issubclass(ours, getattr(builtins, name))
        assert ours.__doc__


# Each of these calls has valid arguments, so the error is that there is no node.
BEFORE_INIT = {
    "push_pull": [([], [], [], []), dict(push_tensors=[], push_keys=[], pull_tensors=[], pull_keys=[], need_event=False)],
    "wait": [(0,), (0, 5), dict(handler=0, timeout_ms=5)],
    "poll": [(0,)],
    "fileno": [(), dict(any=True)],
    "get_all_handlers": [(0,)],
    "fetch_trace": [(0,)],
    "stats": [()],
    "get_batch": [(), dict(timeout_ms=5)],
    "answer_tensor": [(0,), (0, 1), dict(handler=0, i=1)],
    "refuse": [(0, "no"), dict(handler=0, reason="no")],
    "respond": [([], 0), ([], 0, True), dict(tensors=[], handler=0, need_event=True)],
    "barrier": [(True, True), (True, False, False), dict(include_server=True, include_client=True, instance_barrier=False),
                dict(include_server=True, include_client=False, timeout_ms=5)],
}


@pytest.mark.parametrize("name", BEFORE_INIT)
def test_before_init(name):
    for arguments in BEFORE_INIT[name]:
        with pytest.raises(f.Error, match="init") as e:
            getattr(f, name)(**arguments) if isinstance(arguments, dict) else getattr(f, name)(*arguments)
        assert not isinstance(e.value, (TypeError, ValueError))


# Arguments that the signature does not have.
MISSHAPEN = [
    ("push_pull", (), {}), ("push_pull", ([], [], []), {}), ("push_pull", ([], [], [], [], True, 1), {}),
    ("push_pull", ([], [], []), dict(pull_key=[])),
    ("wait", (), {}), ("wait", (0,), dict(timeout=5)), ("wait", (0,), dict(handler=0)),
    ("get_all_handlers", (), dict(handler=0)), ("get_all_handlers", (), {}),
    ("fetch_trace", (), dict(handler=0)), ("fetch_trace", (1, 2), {}),
    ("get_batch", (5,), {}), ("get_nanosecond", (1,), {}), ("init", ("", 1), {}), ("init", (), dict(path="")), ("stop", (1,), {}),
    ("respond", ([],), {}), ("respond", ([], 0, True, 1), {}),
    ("respond_vec", (), dict(ret_buffer=0, tensors_vec=[], handler_vec=[])), ("respond_vec", (0, []), {}),
    ("empty_shared", (), {}), ("empty_shared", (1, 2), {}), ("answer_tensor", (), {}), ("answer_tensor", (0, 1, 2), {}),
    ("register_recv_buffer", (), dict(tensor=0, worker_ranks=[], push_keys=[])),
    ("barrier", (True,), {}), ("barrier", (True, True, True, 5), {}), ("barrier", (True, True), dict(timeout=5)),
]


@pytest.mark.parametrize("name,positional,named", MISSHAPEN)
def test_misshapen(name, positional, named):
    with pytest.raises(TypeError) as e:
        getattr(f, name)(*positional, **named)
    assert name in str(e.value)


def test_nanosecond():
    a, b = f.get_nanosecond(), f.get_nanosecond()
    assert type(a) is int and 0 < a <= b


def test_stop_without_init():
    for named in ({}, dict(timeout_ms=5)):
        with pytest.raises(f.Error, match="init"):
            f.stop(**named)


class NoMemory:
    """An argument whose every use fails for lack of memory."""

    def _act(self, *_, **__):
        raise MemoryError("mine")

    __index__ = __len__ = __getitem__ = __bool__ = __dlpack__ = _act
    __array_interface__ = property(_act)


WITHOUT_MEMORY = [
    ("wait", (NoMemory(),)), ("wait", (0, NoMemory())), ("poll", (NoMemory(),)), ("get_batch", (), dict(timeout_ms=NoMemory())),
    ("get_batch", (), dict(any=NoMemory())), ("respond", ([], NoMemory())), ("respond", (NoMemory(), 0)), ("respond", ([NoMemory()], 0)),
    ("push_pull", ([], [], [], []), dict(servers=NoMemory())), ("push_pull", ([], [], [], []), dict(servers=[NoMemory()])),
    ("empty_shared", (NoMemory(),)), ("answer_tensor", (NoMemory(),)), ("answer_tensor", (0, NoMemory())),
    ("register_recv_buffer", (NoMemory(), [0], [1])), ("Communicator", (), dict(id=NoMemory())),
]


@pytest.mark.parametrize("name,positional,named", [(*c, {})[:3] for c in WITHOUT_MEMORY], ids=range(len(WITHOUT_MEMORY)))
def test_without_memory(name, positional, named):
    with pytest.raises(MemoryError, match="mine"):
        getattr(f, name)(*positional, **named)


class NoBool:
    def __bool__(self):
        raise ArithmeticError("several values")

    def __repr__(self):
        return "NoBool"


@pytest.mark.parametrize("name,positional,named", [
    ("push_pull", ([], [], [], [], NoBool()), {}), ("prepare", ([], [], [], []), dict(need_event=NoBool())), ("respond", ([], 0), dict(need_event=NoBool())),
    ("get_batch", (), dict(any=NoBool())), ("fileno", (), dict(any=NoBool())), ("prepare_streams", ([], [], [], []), dict(host=NoBool()))])
def test_bool(name, positional, named):
    with pytest.raises(f.TypeError, match="%s is NoBool, want a bool" % next(iter(named), "need_event")):
        getattr(f, name)(*positional, **named)


def sequences_worker(n):
    f, lib = n.f, n.lib
    import numpy as np


    def tensors(count):
        return [lib.make("int32", (4,), bytes([i] * 16)) for i in range(count)]

    class Lazy:
        """A sequence that is neither list nor tuple."""

        def __init__(self, items):
            self.items = items

        def __len__(self):
            return len(self.items)

        def __getitem__(self, i):
            return self.items[i]

    handlers = []
    for make, keys in ((list, [1, 2]), (tuple, (1, 2)), (Lazy, range(1, 3)), (list, Lazy([1, 2])),
                       (list, np.array([1, 2])), (tuple, [np.uint64(1), np.int8(2)]), (list, [True, 2])):
        push, pull = tensors(2), [lib.zeros("int32", (4,)) for _ in range(2)]
        h = f.push_pull(make(push), keys, make(pull), keys)
        assert type(h) is int
        assert f.get_all_handlers(2**32 + h) == [2**32 + h]
        got = f.get_all_handlers(h)
        assert type(got) is list and got == [h, h + 1, h + 2, h + 3] and all(type(x) is int for x in got)
        assert f.wait(h) is None
        assert [lib.bytes(t) for t in pull] == [lib.bytes(t) for t in push]
        assert f.get_all_handlers(h) == [h]
        handlers.append(h)
    assert 0 <= handlers[0] < 2**30  # random, so that a process does not get the answers of an earlier one
    assert handlers == list(range(handlers[0], handlers[0] + 4 * len(handlers), 4))
    # By name, and with flags that have no effect on a CPU.
    pull = [lib.zeros("int32", (4,)) for _ in range(2)]
    h = f.push_pull(push_tensors=tensors(2), push_keys=[0, 2**64 - 1], pull_tensors=pull, pull_keys=[2**64 - 1, 0], need_event=False)
    assert f.wait(handler=np.int64(h), timeout_ms=np.int32(9000)) is None
    trace = f.fetch_trace(h)
    assert type(trace) is list and len(trace) == 8 and all(type(t) is int for t in trace)
    assert f.get_all_handlers(2**31 - 1) == [2**31 - 1]
    assert f.barrier(True, True) is None
    assert f.barrier(include_server=False, include_client=True, instance_barrier=False) is None


def sequences_server(n):
    for i in range(8):
        batches = n.f.get_batch()
        assert type(batches) is list and len(batches) == 1
        assert type(batches[0]) is tuple
        handler, tensors, keys = batches[0]
        assert type(handler) is int and handler == i
        assert type(tensors) is list and all(n.lib.own(t) for t in tensors)
        assert type(keys) is list and all(type(k) is int for k in keys)
        assert keys == ([0, 2**64 - 1] if i == 7 else [1, 2])
        if i % 3 == 0:
            result = n.f.respond(tuple(tensors), handler)
        elif i % 3 == 1:
            result = n.f.respond(tensors, handler, True)
        else:
            result = n.f.respond(handler=handler, tensors=tensors, need_event=False)
        assert isinstance(result, n.f.Answer)
    n.f.barrier(include_client=True, include_server=True, instance_barrier=True)


def test_sequences_and_types(cluster, lib):
    cluster(lib=lib).run(sequences_worker, sequences_server)
