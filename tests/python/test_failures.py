"""Failures while tensors are read, created and answered with. No batch is lost."""

import ctypes
import gc
import signal
import weakref

import arrays
import pytest
from harness import by_hand

SIZE = (64,)


def tensor(n, seed):
    return n.lib.make("uint8", SIZE, arrays.pattern(seed, "uint8", SIZE))


# respond_vec continues if a worker is lost.

@by_hand
def vec_worker(n):
    n.f.init()
    pull = n.lib.zeros("uint8", SIZE)
    h = n.f.push_pull([tensor(n, n.rank)], [1], [pull], [1])
    n.tell("sent")
    if n.rank == 1:
        n.f.wait(h)
        assert n.lib.bytes(pull) == arrays.pattern(5, "uint8", SIZE)
        n.tell("answered")
    n.listen()


@by_hand
def vec_server(n):
    n.f.init()
    batches = n.f.get_batch()
    n.tell("got")
    with n.raises(ConnectionError, "worker 0"):
        n.f.get_batch()  # waits for a replacement first
    # The answer to the lost worker is dropped: the program serves the others.
    n.f.respond_vec(tensor(n, 5), [b[1][0] for b in batches], [b[0] for b in batches])
    n.tell("went on")
    n.listen()


def test_respond_vec_to_a_lost_worker(cluster):
    c = cluster(workers=2, env={"STEPAF_REPLACE_TIMEOUT": "1"})
    workers, (server,) = c.start(vec_worker, vec_server)
    assert [p.hear() for p in workers] == ["sent", "sent"]
    assert server.hear() == "got"
    workers[0].kill()
    assert server.hear() == "went on"
    assert workers[1].hear() == "answered"
    for p in (workers[1], server):
        p.tell("end")
        assert p.wait() == 0, p.report()


# A consumer of DLPack may free its tensors after the end of the interpreter.

@by_hand
def late_server(n):
    n.f.init()
    (handler, (t,), _), = n.f.get_batch()
    n.f.respond([t], handler)
    capsule, get, rename = t.__dlpack__(), ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName
    get.restype, get.argtypes, rename.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p), (ctypes.py_object, ctypes.c_char_p)
    managed = get(capsule, b"dltensor")
    late_server.name = ctypes.c_char_p(b"used_dltensor")
    rename(capsule, late_server.name)
    # void deleter(managed) comes after the 48 bytes of the tensor and a pointer.
    deleter = ctypes.cast(managed + 56, ctypes.POINTER(ctypes.c_void_p))[0]
    at_exit = ctypes.CDLL(None).__cxa_atexit
    at_exit.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    assert at_exit(deleter, managed, None) == 0
    n.f.stop()


def late_worker(n):
    pull = n.lib.zeros("uint8", SIZE)
    n.f.wait(n.f.push_pull([tensor(n, 1)], [1], [pull], [1]))


def test_freed_after_the_interpreter(cluster):
    pytest.importorskip("numpy", reason="a server without PyTorch gets fserver_lib.Tensor")
    cluster(lib="numpy").run(late_worker, late_server)


# fserver_lib.Tensor exports its memory, and has no other operations.

def offer_worker(n):
    torch = arrays.load("torch").torch
    tensors = [torch.ones(2, 3)]
    tensors += [torch.arange(8, dtype=torch.uint8).view(getattr(torch, name)) for name in ("complex32", "bits8", "int4") if hasattr(torch, name)]
    pull = torch.zeros(1)
    n.f.wait(n.f.push_pull(tensors, range(len(tensors)), [pull], [1]))


def offer_server(n):
    (handler, (t, *others), _), = n.f.get_batch()
    n.f.respond([arrays.load("numpy").zeros("float32", (1,))], handler)
    for good in (dict(), dict(copy=None), dict(copy=False), dict(dl_device=None), dict(dl_device=(1, 0)), dict(stream=None),
                 dict(stream=None, max_version=(1, 1), dl_device=t.__dlpack_device__(), copy=False)):
        assert "dltensor" in repr(t.__dlpack__(**good)), good
    for version, name in ((None, '"dltensor"'), ((0, 8), '"dltensor"'), ((1, 0), '"dltensor_versioned"'), ((2, 3), '"dltensor_versioned"')):
        assert name in repr(t.__dlpack__(max_version=version)), version
    for bad, kind, words in ((dict(copy=True), BufferError, "copy"), (dict(dl_device=(2, 0)), BufferError, "(2, 0)"),
                             (dict(dl_device=(1, 1)), BufferError, "(1, 1)"), (dict(dl_device="cpu"), BufferError, "'cpu'"),
                             (dict(device=1), TypeError, "device"),
                             (dict(max_version=1), TypeError, "max_version is 1, want"), (dict(max_version=("1", 0)), TypeError, "want None or a tuple of two ints"),
                             (dict(max_version=(1 << 70, 0)), OverflowError, "")):
        with pytest.raises(kind) as e:
            t.__dlpack__(**bad)
        assert words in str(e.value), e.value
    import numpy

    assert numpy.asarray(t).tolist() == [[1, 1, 1]] * 2 and numpy.asarray(t).dtype == "float32"
    assert numpy.shares_memory(numpy.asarray(t), numpy.from_dlpack(t)) and not numpy.shares_memory(numpy.array(t), numpy.from_dlpack(t))
    assert numpy.shares_memory(t.__array__(copy=False), numpy.from_dlpack(t)) and not numpy.shares_memory(t.__array__(copy=True), numpy.from_dlpack(t))
    assert numpy.asarray(t, "int64").tolist() == [[1, 1, 1]] * 2 and (t + numpy.ones(3)).tolist() == [[2, 2, 2]] * 2
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    for x in others:
        if x.dtype == "complex32":
            c = x.__dlpack__()
            assert ctypes.string_at(get(c, b"dltensor") + 20, 4) == bytes([5, 32, 1, 0])  # DLPack's type: complex, of 32 bits
            continue
        with n.raises(ValueError, x.dtype, "DLPack"):
            x.__dlpack__()
        with n.raises(ValueError, x.dtype, "DLPack"):
            numpy.asarray(x)
    return [x.dtype for x in others]


def test_what_a_tensor_offers(cluster):
    torch = pytest.importorskip("torch", reason="pushes types that NumPy has not")
    pytest.importorskip("numpy", reason="its server answers with NumPy's arrays")
    _, names = cluster(lib="").run(offer_worker, offer_server)
    assert names == [name for name in ("complex32", "bits8", "int4") if hasattr(torch, name)]


# An exception of Python's own, such as Ctrl-C or a lack of memory, passes through the calls that ask a tensor for its
# properties. Other exceptions become ours.

class Steps:
    """Raises an exception at one of the steps that count()."""

    def __init__(self):
        self.left, self.error = -1, None

    def count(self):
        self.left -= 1
        if self.left == 0:
            raise self.error("mine")


def interrupted(n, steps, push, min_steps):
    """Pushes push repeatedly, with an exception at each step."""
    for kind in (KeyboardInterrupt, SystemExit, MemoryError, ZeroDivisionError):
        for step in range(1, 100):
            steps.left, steps.error = step, kind
            try:
                h = n.f.push_pull([push()], [1], [n.lib.zeros("uint8", SIZE)], [1])
                n.f.wait(h)
                assert steps.left > 0 or kind is ZeroDivisionError, f"{kind.__name__} at step {step} was lost"
            except kind:
                assert kind is not ZeroDivisionError
            except n.f.Error as e:
                assert kind is ZeroDivisionError and "push_tensors[0]" in str(e), f"{kind.__name__} at step {step}: {e}"
            if steps.left > 0:
                break
        assert step > min_steps, f"only {step - 1} steps"
    steps.left = -1


def interrupted_worker(n):
    steps = Steps()
    if n.lib.name == "torch":
        torch = n.lib.torch

        class Own(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                steps.count()
                return super().__torch_function__(function, types, args, kwargs or {})

        interrupted(n, steps, lambda: torch.zeros(SIZE, dtype=torch.uint8).as_subclass(Own), 5)
    else:
        np = n.lib.np

        class Attributes:
            """A NumPy array by DLPack, of which every attribute is a step."""

            def __init__(self):
                self.array = np.zeros(SIZE, "uint8")

            def __getattribute__(self, name):
                if name != "array":
                    steps.count()
                return getattr(object.__getattribute__(self, "array"), name) if "dlpack" in name else object.__getattribute__(self, name)

        interrupted(n, steps, Attributes, 2)
    n.f.wait(n.f.push_pull([n.lib.make("uint8", (1,), b"e")], [2], [], []))


def interrupted_server(n):
    key = 1
    while key == 1:
        (handler, tensors, (key,)), = n.f.get_batch()
        n.f.respond(tensors if key == 1 else [], handler)


def test_interrupted_while_reading(cluster, lib):
    if lib == "jax":
        lib = "numpy"  # JAX's arrays are read in the same way
    cluster(lib=lib).run(interrupted_worker, interrupted_server)


# A tensor of a dtype that PyTorch lacks is received as fserver_lib.Tensor, together with tensors of PyTorch.

def nameless_worker(n):
    np = arrays.load("numpy")
    pull = np.zeros("uint16", (3, 5))
    for i in range(2):
        push = [np.make("float32", (2,), bytes(8)), np.make("uint16", (3, 5), arrays.pattern(n.rank, "uint16", (3, 5))), np.make("uint16", (0, 5), b"")]
        n.f.wait(n.f.push_pull(push, [1, 2, 3], [pull], [4]))
        assert np.bytes(pull) == arrays.pattern(n.rank, "uint16", (3, 5))


def nameless_server(n):
    torch, np = n.lib.torch, arrays.load("numpy")
    if hasattr(torch, "uint16"):
        del torch.uint16  # before fserver_lib looks it up
    for i in range(2):
        for rank, (handler, (x, t, empty), keys) in enumerate(n.f.get_batch()):
            assert type(x) is torch.Tensor and keys == [1, 2, 3]
            assert type(t) is type(empty) is n.f.Tensor and t.dtype == empty.dtype == "uint16", (t, empty)
            assert t.shape == (3, 5) and empty.shape == (0, 5)
            assert np.bytes(t) == arrays.pattern(rank, "uint16", (3, 5))
            n.f.respond([t], handler)


def test_without_a_name(cluster):
    pytest.importorskip("torch", reason="is about PyTorch's types")
    pytest.importorskip("numpy", reason="pushes types that PyTorch had not for long")
    cluster(workers=2, lib="torch").run(nameless_worker, nameless_server)


# If the tensors of batches cannot be created, the next get_batch returns the batches again.

BATCHES = ((1, 1), (3, 0), (1, 0), (0, 1), (3, 2))  # pushes and pulls of each
BIG = 4 << 20


def again_worker(n):
    waits = []
    for i, (pushes, pulls) in enumerate(BATCHES):
        pull = [n.lib.zeros("uint8", SIZE) for _ in range(pulls)]
        waits.append((n.f.push_pull([tensor(n, 100 * n.rank + 10 * i + k) for k in range(pushes)], range(pushes), pull, range(pulls)), pull))
    for h, pull in waits:
        n.f.wait(h)
        assert all(n.lib.bytes(t) == arrays.pattern(7, "uint8", SIZE) for t in pull)
    for _ in range(40):
        n.f.wait(n.f.push_pull([n.lib.make("uint8", (BIG,), bytes(BIG))], [1], [], []))


def again_server(n):
    torch, left = n.lib.torch, [0]
    make = torch._C._from_dlpack

    def fails(capsule):
        left[0] -= 1
        if left[0] == 0:
            raise fails.error("mine")
        return make(capsule)

    def failing(step, error):
        left[0], fails.error = step, error
        with pytest.raises(error, match="mine"):
            n.f.get_batch(timeout_ms=10000)

    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        torch.Tensor.__dlpack_c_exchange_api__ = None
    torch._C._from_dlpack = fails  # before fserver_lib looks it up
    for i, (pushes, pulls) in enumerate(BATCHES):
        for step in range(1, 2 * pushes + 1):
            for error in (MemoryError, KeyboardInterrupt):
                failing(step, error)
        batches = n.f.get_batch(timeout_ms=10000)
        for rank, (handler, tensors, keys) in enumerate(batches):
            assert keys == list(range(pushes))
            assert [n.lib.bytes(t) for t in tensors] == [arrays.pattern(100 * rank + 10 * i + k, "uint8", SIZE) for k in keys]
            n.f.respond([tensor(n, 7)] * pulls, handler)
    sizes = []
    for _ in range(40):
        failing(2, MemoryError)
        failing(1, MemoryError)
        for handler, _, _ in n.f.get_batch():
            n.f.respond([], handler)
        with open("/proc/self/statm") as s:
            sizes.append(int(s.read().split()[1]) * 4096)
    return sizes


def test_batches_come_again(cluster):
    pytest.importorskip("torch", reason="replaces a function of PyTorch's")
    *_, sizes = cluster(workers=2, lib="torch").run(again_worker, again_server)
    assert max(sizes[20:]) < max(sizes[:20]) + 8 * BIG, [s >> 20 for s in sizes]


# A tensor that gets other memory ("t.data = ...") does not take the registered memory with it.

def other_memory_worker(n):
    n.listen()
    n.f.wait(n.f.push_pull([tensor(n, 1)], [1], [], []))


def other_memory_server(n):
    torch = n.lib.torch

    class Memory(bytearray):
        """Memory that weak references can point to."""

    memory = Memory(64)
    kept, t = weakref.ref(memory), torch.frombuffer(memory, dtype=torch.uint8)
    del memory
    n.f.register_recv_buffer(t, [0], [1])
    t.data = torch.zeros(SIZE, dtype=torch.uint8)
    gc.collect()
    assert kept() is not None, "the registered memory was freed"
    n.tell("registered")
    (handler, _, _), = n.f.get_batch()
    n.f.respond([], handler)
    assert bytes(kept()) == arrays.pattern(1, "uint8", SIZE) and n.lib.bytes(t) == bytes(64)


def test_registered_memory_stays(cluster):
    torch = pytest.importorskip("torch", reason="its tensors can get other memory")
    if not hasattr(torch, "frombuffer"):
        pytest.skip("this PyTorch cannot use the memory of an object")
    c = cluster(lib="torch")
    (w,), (s,) = c.start(other_memory_worker, other_memory_server)
    assert s.hear() == "registered", s.report()
    w.tell("go on")
    c.finish()


# A signal whose handler raises an exception arrives shortly before a batch.

SIGNALS = 20


def signalled_worker(n):
    for i in range(SIGNALS):
        n.listen()
        n.f.wait(n.f.push_pull([tensor(n, i)], [i], [], []), timeout_ms=120000)


def signalled_server(n):
    for i in range(SIGNALS):
        with pytest.raises(KeyboardInterrupt):
            n.announce()
            n.f.get_batch()
        (handler, _, keys), = n.f.get_batch(timeout_ms=30000)
        assert keys == [i]
        n.f.respond([], handler)


def test_signal_before_a_batch(cluster):
    c = cluster()
    (w,), (s,) = c.start(signalled_worker, signalled_server)
    for _ in range(SIGNALS):
        assert s.hear() == "waiting", s.report()
        s.signal(signal.SIGINT)
        w.tell("go on")
    c.finish()
