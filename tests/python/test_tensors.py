"""Tensors: dtypes, shapes, views, lifetimes, and objects that are no tensors."""

import gc
import itertools

import arrays
import pytest

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 4), (1, 1, 1, 1, 1, 1, 1, 1), (2, 1, 3, 1, 2, 1, 2, 2), (1000, 33)]


def dtype_cases(lib):
    return list(enumerate(itertools.product(lib.dtypes, SHAPES)))


def dtypes_worker(n):
    cases = dtype_cases(n.lib)
    n.f.wait(n.f.push_pull([n.lib.make("uint8", (1,), bytes([len(cases) % 256]))], [0], [], []))
    for seed, (dtype, shape) in cases:
        data = arrays.pattern(seed, dtype, shape)
        push, pull = n.lib.make(dtype, shape, data), n.lib.zeros(dtype, shape)
        n.f.wait(n.f.push_pull([push], [seed], [pull], [seed]))
        assert n.lib.bytes(pull) == data, f"{dtype} {shape}"


def dtypes_server(n):
    cases = dtype_cases(n.lib)
    (handler, _, _), = n.f.get_batch()
    n.f.respond([], handler)
    held, np = [], arrays.load("numpy").np
    for seed, (dtype, shape) in cases:
        (handler, (t,), keys), = n.f.get_batch()
        assert keys == [seed]
        assert n.lib.own(t) and n.lib.shape(t) == shape, (dtype, shape)
        data = arrays.pattern(seed, dtype, shape)
        if not n.lib.own(n.lib.zeros("uint8", (1,))):
            # A fserver_lib.Tensor, for from_dlpack.
            assert t.dtype == dtype and t.nbytes == len(data) and "Tensor" in repr(t)
            assert t.__dlpack_device__() == (1, 0)
            if dtype.startswith(("int", "uint", "float32", "float64")):
                assert np.asarray(t).tobytes() == np.array(t).tobytes() == data
        assert n.lib.dtype(t) == dtype
        assert n.lib.bytes(t) == data
        n.f.respond([t], handler)
        held.append((t, data))
    for t, data in held:
        assert n.lib.bytes(t) == data


@pytest.mark.parametrize("ipc", ["1", "0"], ids=["shm", "zmq"])
def test_dtypes_and_shapes(cluster, lib, ipc):
    cluster(lib=lib, env={"BYTEPS_ENABLE_IPC": ipc}).run(dtypes_worker, dtypes_server)


# Received tensors may be changed in place, also without PyTorch.

def in_place_worker(n):
    np = arrays.load("numpy").np
    for key, dtype in enumerate(IN_PLACE):
        push, pull = np.zeros((2, 3), dtype), np.ones((2, 3), dtype)
        n.f.wait(n.f.push_pull([push], [key], [pull], [key]))
        assert (pull == np.array([[1, 1, 1], [1, 1, 0]]).astype(dtype)).all(), (dtype, pull)


def in_place_server(n):
    np = arrays.load("numpy").np
    for key, dtype in enumerate(IN_PLACE):
        (handler, (t,), _), = n.f.get_batch()
        a = np.asarray(t)
        assert a.flags.writeable and a.dtype == dtype and a.shape == (2, 3), (dtype, a.dtype, a.flags)
        assert t.__array_interface__["data"] == (a.__array_interface__["data"][0], False)
        assert t.__array__().flags.writeable
        version, view = tuple(map(int, np.__version__.split(".")[:2])), None
        if dtype != "bool" or version >= (1, 25):
            view = np.from_dlpack(t)
            assert np.shares_memory(a, view)
            assert view.flags.writeable or version < (2, 1), "the capsule does not say that it can be written to"
        a[:] = 1
        del a, view
        gc.collect()
        again = np.asarray(t)
        again[1, 2] = 0
        n.f.respond([again if key % 2 else t], handler)


IN_PLACE = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split()


def test_received_arrays_are_writable(cluster):
    pytest.importorskip("numpy", reason="what is changed are arrays of NumPy")
    cluster(lib="numpy").run(in_place_worker, in_place_server)


# PyTorch since 2.10 has a table of C functions for its tensors. Without one that is
# understood, all goes by its methods.

def replace_table(torch, kind):
    """Takes the table away, or replaces it with an unusable one: of an unknown later
    version, or with an old one that cannot describe tensors."""
    import ctypes

    if kind == "gone":
        torch.Tensor.__dlpack_c_exchange_api__ = None
        return
    pointer, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    words = ctypes.c_uint64 * 7  # version, older table, allocate, describe and keep, make, describe, stream
    name = b"dlpack_exchange_api"
    old = words.from_buffer_copy((ctypes.c_char * 56).from_address(pointer(torch.Tensor.__dlpack_c_exchange_api__, name)))
    assert old[0] & 0xFFFFFFFF == 1
    old[5] = 0
    newer = words(2, ctypes.addressof(old) if kind == "older" else 0, *[1] * 5)  # to call any would crash
    torch.table = old, newer  # keeps them
    torch.Tensor.__dlpack_c_exchange_api__ = new(ctypes.addressof(newer), name, None)


def without_table_worker(n):
    replace_table(n.lib.torch, n.args)
    dtypes_worker(n)


def without_table_server(n):
    replace_table(n.lib.torch, n.args)
    dtypes_server(n)


@pytest.mark.parametrize("kind", ["gone", "newer", "older"])
def test_without_table(cluster, kind):
    torch = pytest.importorskip("torch", reason="is about PyTorch's tensors")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no table: all tests are without it")
    cluster(lib="torch").run(without_table_worker, without_table_server, kind)


# Tensors of PyTorch that are not simply contiguous memory.

def kinds(torch):
    """Each with its elements, and the name of its type."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)

    class Own(torch.Tensor):
        pass

    yield base[1:3], "float32"  # begins in the middle
    yield base[2:3].t(), "float32"
    yield base.t()[:, :1].t(), "float32"  # a stride of 1 where there is one row
    yield torch.arange(3.0)[1], "float32"
    yield base[:0], "float32"
    yield torch.zeros(2, 0).expand(2, 0), "float32"
    yield torch.nn.Parameter(base.clone()), "float32"
    yield base.clone().requires_grad_(), "float32"
    yield base.clone().as_subclass(Own), "float32"
    yield torch.tensor([True, False, True]), "bool"
    yield torch.tensor([1 + 2j, 3 - 4j]), "complex64"
    for name in ("int4", "uint4", "uint7", "bits8", "float4_e2m1fn_x2"):
        if hasattr(torch, name):
            yield torch.arange(5, dtype=torch.uint8).view(getattr(torch, name)), name


def raw(tensor):
    import ctypes

    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def kinds_worker(n):
    torch = n.lib.torch
    for i, (t, name) in enumerate(kinds(torch)):
        pull = torch.zeros(max(len(raw(t)), 1), dtype=torch.uint8)[: len(raw(t))]
        n.f.wait(n.f.push_pull([t], [i], [pull], [100 + i]))
        assert raw(pull) == raw(t), f"{i}: {name}"
        del t
    flipped = torch.ones(3, dtype=torch.complex64).conj()
    for bad in (flipped, flipped.imag, torch._neg_view(torch.ones(3)), torch.ones(3).expand(3, 3), torch.ones(2, 3).t()):
        with n.raises(ValueError, "push_tensors[0]", "keep the result"):
            n.f.push_pull([bad], [1], [], [])
        with n.raises(ValueError, "pull_tensors[0]", "keep the result"):
            n.f.push_pull([torch.ones(1)], [1], [bad], [1])


def kinds_server(n):
    torch = n.lib.torch
    for i, (want, name) in enumerate(kinds(torch)):
        (handler, (t,), keys), = n.f.get_batch()
        assert keys == [i] and t.dtype == getattr(torch, name) and t.shape == want.shape, (i, name, t.dtype, t.shape)
        assert type(t) is torch.Tensor and not t.requires_grad and t.is_contiguous() and raw(t) == raw(want), (i, name)
        n.f.respond([t], handler)


def test_kinds_of_tensors(cluster):
    pytest.importorskip("torch", reason="is about PyTorch's tensors")
    cluster(lib="torch").run(kinds_worker, kinds_server)


# Tensors of get_batch do not change while Python refers to them.

KEPT = 200


def kept_worker(n):
    pull = n.lib.zeros("uint8", (4096,))
    for i in range(KEPT):
        push = n.lib.make("uint8", (4096,), arrays.pattern(i, "uint8", (4096,)))
        n.f.wait(n.f.push_pull([push], [7], [pull], [7]))


def kept_server(n):
    held = []
    for i in range(KEPT):
        (handler, (t,), _), = n.f.get_batch()
        if i % 2:
            held.append((i, t))
        n.f.respond([t], handler)
        del t
        for j, kept in held[-3:]:
            assert n.lib.bytes(kept) == arrays.pattern(j, "uint8", (4096,))
    assert len({n.lib.pointer(t) for _, t in held}) == len(held)
    n.f.stop()
    for i, t in held:  # after the end too
        assert n.lib.bytes(t) == arrays.pattern(i, "uint8", (4096,))
    first = n.lib.pointer(held[0][1])
    assert first == n.lib.pointer(held[0][1]), "a view, not a copy each time"


def test_kept_tensors(cluster, lib):
    cluster(lib=lib).run(kept_worker, kept_server)


def views_server(n):
    """A part of a tensor keeps all of its memory."""
    (handler, (t,), _), = n.f.get_batch()
    part = (t if n.lib.name == "torch" else n.lib.view(t))[100:200]
    pointer = n.lib.pointer(t)
    n.f.respond([t], handler)
    del t
    gc.collect()
    for i in range(20):
        (handler, (t,), _), = n.f.get_batch()
        assert n.lib.pointer(t) != pointer
        n.f.respond([t], handler)
        del t
    assert n.lib.bytes(part) == arrays.pattern(0, "uint8", (4096,))[100:200]


def views_worker(n):
    pull = n.lib.zeros("uint8", (4096,))
    for i in range(21):
        n.f.wait(n.f.push_pull([n.lib.make("uint8", (4096,), arrays.pattern(i, "uint8", (4096,)))], [7], [pull], [7]))
        assert n.lib.bytes(pull) == arrays.pattern(i, "uint8", (4096,))


def test_part_of_a_tensor(cluster, lib):
    if lib == "jax":
        lib = "numpy"  # a part of a JAX array is a copy
    cluster(lib=lib).run(views_worker, views_server)


# Memory is released.

BIG = 8 << 20


def resident():
    with open("/proc/self/statm") as s:
        return int(s.read().split()[1]) * 4096


def release_server(n):
    held = []
    for i in range(8):
        (handler, tensors, _), = n.f.get_batch()
        n.f.respond([], handler)
        held.append(tensors[0])
    full = resident()
    del held, tensors
    gc.collect()
    for i in range(24):
        (handler, _, _), = n.f.get_batch()
        n.f.respond([], handler)
    return full, resident()


def release_worker(n):
    push = n.lib.make("uint8", (BIG,), bytes(BIG))
    for _ in range(32):
        n.f.wait(n.f.push_pull([push], [1], [], []))


def test_memory_is_released(cluster, lib):
    _, (full, after) = cluster(lib=lib).run(release_worker, release_server)
    assert after < full - 4 * BIG, f"{full >> 20} MiB while 8 tensors of 8 MiB were held, {after >> 20} MiB afterwards"


# Batches of pushes alone need no answer, and are not kept for one.

def unanswered_server(n):
    sizes = []
    for i in range(100):
        (handler, tensors, keys), = n.f.get_batch()
        del tensors
        sizes.append(resident())
        if i % 10 == 0:
            with n.raises(ValueError, f"handler {handler}", "pulls 0"):
                n.f.respond([n.lib.zeros("uint8", (1,))], handler)
            n.f.respond([], handler)
            with n.raises((), f"handler {handler} was answered already"):
                n.f.respond([], handler)
    return sizes


def unanswered_worker(n):
    push = n.lib.make("uint8", (BIG,), bytes(BIG))
    for _ in range(100):
        n.f.wait(n.f.push_pull([push, push], [1, 2], [], []))


def test_unanswered_pushes(cluster, lib):
    _, sizes = cluster(lib=lib).run(unanswered_worker, unanswered_server)
    assert max(sizes[50:]) < max(sizes[:50]) + 16 * BIG, [s >> 20 for s in sizes]


# Capsules are consumed, so that no other code can free memory in flight.

def capsule_worker(n):
    torch = n.lib.torch

    class Same:
        def __init__(self):
            self.capsule = torch.utils.dlpack.to_dlpack(torch.arange(100, dtype=torch.uint8))

        def __dlpack__(self, **more):
            return self.capsule

    same, pull = Same(), torch.zeros(100, dtype=torch.uint8)
    h = n.f.push_pull([same], [1], [pull], [1])
    with n.raises(TypeError, "push_tensors[0]", "used_dltensor"):
        n.f.push_pull([same], [1], [pull], [1])
    n.f.wait(h)
    assert n.lib.bytes(pull) == bytes(range(100))


def capsule_server(n):
    (handler, tensors, _), = n.f.get_batch()
    n.f.respond(tensors, handler)


def test_capsules(cluster):
    pytest.importorskip("torch", reason="makes capsules")
    cluster(lib="torch").run(capsule_worker, capsule_server)


# The program need not keep references to tensors in flight.

def temporaries_worker(n):
    import random

    for i in range(50):
        a = arrays.pattern(i, "uint8", (50000,))
        pull = n.lib.zeros("uint8", (50000,))
        h = n.f.push_pull([n.lib.make("uint8", (50000,), a), n.lib.make("uint8", (50000,), a[::-1])], [1, 2], [pull], [1])
        junk = [n.lib.make("uint8", (50000,), b"\xff" * 50000) for _ in range(random.Random(i).randrange(4))]
        n.f.wait(h)
        del junk
        assert n.lib.bytes(pull) == bytes(x ^ y for x, y in zip(a, a[::-1])), f"round {i}"
    # The library keeps pull tensors to which the program has no references.
    h = n.f.push_pull([n.lib.make("uint8", (50000,), a)] * 2, [1, 2], [n.lib.zeros("uint8", (50000,))], [1])
    gc.collect()
    n.f.wait(h)


def temporaries_server(n):
    for _ in range(51):
        (handler, (a, b), _), = n.f.get_batch()
        data = bytes(x ^ y for x, y in zip(n.lib.bytes(a), n.lib.bytes(b)))
        n.f.respond([n.lib.make("uint8", (50000,), data)], handler)
        junk = [n.lib.make("uint8", (50000,), b"\xff" * 50000) for _ in range(3)]
        del a, b, junk


def test_temporaries(cluster, lib):
    cluster(lib=lib).run(temporaries_worker, temporaries_server)


def sums_worker(n):
    torch = n.lib.torch
    for i in range(30):
        a, b = torch.full((1000,), float(i)), torch.ones(1000)
        pull = torch.zeros(1000)
        n.f.wait(n.f.push_pull([a + b, a * 2], [1, 2], [pull], [1]))
        assert torch.equal(pull, 3 * a + 1)


def sums_server(n):
    for _ in range(30):
        for handler, tensors, _ in n.f.get_batch():
            n.f.respond([sum(tensors)], handler)


def test_expressions(cluster):
    pytest.importorskip("torch", reason="expressions of torch tensors")
    cluster(lib="torch").run(sums_worker, sums_server)


# Refused calls send nothing.

def refused_worker(n):
    f, lib = n.f, n.lib
    good = lib.make("float32", (4, 4), bytes(64))
    target = lib.zeros("float32", (4, 4))

    class Odd:
        """An object with memory of another kind of device, or without memory."""

        def __init__(self, device=None, error=None):
            self.device, self.error = device, error

        def __dlpack_device__(self):
            return self.device

        def __dlpack__(self, stream=None, **more):
            raise self.error or BufferError("no capsule for you")

    class Faked:
        """An object that claims to be a NumPy array."""

        def __init__(self, typestr, shape, a, address=None):
            data = a.__array_interface__["data"] if address is None else (address, False)
            self.__array_interface__ = dict(typestr=typestr, shape=shape, data=data, version=3)

    class Nameless:
        @property
        def __class__(self):
            raise ZeroDivisionError("mine")

    class Interrupted:
        def __dlpack__(self, **more):
            raise KeyboardInterrupt("mine")

        __index__ = __dlpack__

    nine = lib.make("uint8", (1,) * 9, b"x")
    cases = [
        # (push, pull, class, words)
        ([nine], [target], ValueError, ("push_tensors[0]", "9")),
        ([good], [lib.zeros("uint8", (1,) * 9)], ValueError, ("pull_tensors[0]", "9")),
        ([good, Odd((4, 0))], [target], (ValueError, TypeError), ("push_tensors[1]",)),
        ([good], [Odd((4, 0))], (ValueError, TypeError), ("pull_tensors[0]",)),
        ([Odd("what")], [target], (), ("push_tensors[0]",)),
        ([Odd((1, 0), ZeroDivisionError("mine"))], [target], (), ("push_tensors[0]",)),
        ([Nameless()], [target], TypeError, ("push_tensors[0]",)),
        ([1], [target], TypeError, ("push_tensors[0]", "int")),
        ([None], [target], TypeError, ("push_tensors[0]", "NoneType")),
        (["abcd"], [target], TypeError, ("push_tensors[0]", "str")),
        ([[1.0, 2.0]], [target], TypeError, ("push_tensors[0]", "list")),
        ([good], [object()], TypeError, ("pull_tensors[0]", "object")),
        ([good], [bytearray(64)], TypeError, ("pull_tensors[0]", "bytearray")),
        ([type(good)], [target], (ValueError, TypeError), ("push_tensors[0]",)),
        (good, [target], (), ("push_tensors",)),
        (None, [target], TypeError, ("push_tensors", "sequence")),
        (5, [target], TypeError, ("push_tensors", "sequence")),
        ([good], {1: 2}, TypeError, ("pull_tensors",)),
        ([good], {target.shape}, TypeError, ("pull_tensors", "sequence")),
    ]
    if lib.name == "torch":
        torch = lib.torch
        cases += [
            ([good.t()], [target], ValueError, ("push_tensors[0]", "contiguous")),
            ([torch.zeros(4, 8)[:, ::2]], [target], ValueError, ("push_tensors[0]", "contiguous")),
            ([good], [torch.zeros(4, 8)[:, ::2]], ValueError, ("pull_tensors[0]", "contiguous")),
            ([torch.ones(1).expand(4)], [target], ValueError, ("push_tensors[0]", "contiguous")),
            ([torch.zeros(4, 4, device="meta")], [target], ValueError, ("push_tensors[0]", "meta")),
            ([good.to_sparse()], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            ([torch.quantize_per_tensor(good, 0.1, 0, torch.quint8)], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            # Views whose memory has other values.
            ([torch.ones(4, 4, dtype=torch.complex64).conj()], [target], ValueError, ("push_tensors[0]", "resolve_conj")),
            ([torch.ones(1, dtype=torch.complex64).conj().imag], [target], ValueError, ("push_tensors[0]", "resolve_neg")),
            ([good], [torch.ones(8, dtype=torch.complex64).conj()], ValueError, ("pull_tensors[0]", "resolve_conj")),
        ]
    if lib.name == "numpy":
        np = lib.np
        readonly = np.zeros((4, 4), "float32")
        readonly.flags.writeable = False
        cases += [
            ([good.T], [target], ValueError, ("push_tensors[0]", "contiguous")),
            ([good], [np.zeros((4, 8), "float32")[:, ::2]], ValueError, ("pull_tensors[0]", "contiguous")),
            ([good], [readonly], ValueError, ("pull_tensors[0]", "read")),
            ([np.array(["a"])], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            ([np.array([None])], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            ([np.zeros(4, ">f4")], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            ([np.zeros(4, "M8[s]")], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            ([np.zeros(4, [("a", "i4")])], [target], (ValueError, TypeError), ("push_tensors[0]",)),
            # Scalars: their memory is gone with the interface.
            ([np.float64(1)], [target], TypeError, ("push_tensors[0]", "float64", "numpy.array")),
            ([good], [np.float64(1)], TypeError, ("pull_tensors[0]", "float64", "numpy.array")),
            # Arrays with a mask, which would not be sent.
            ([np.ma.array([1, 2], mask=[0, 1])], [target], TypeError, ("push_tensors[0]", "MaskedArray", "filled")),
            ([good], [np.ma.array([1.0, 2.0])], TypeError, ("pull_tensors[0]", "MaskedArray")),
            ([Faked("<i32", (2,), good)], [target], TypeError, ("push_tensors[0]",)),
            ([Faked("<i0", (2,), good)], [target], TypeError, ("push_tensors[0]",)),
            ([Faked("<i4", ("x",), good)], [target], TypeError, ("push_tensors[0]",)),
            ([Faked("<i4", (2,), good, 0)], [target], ValueError, ("push_tensors[0]", "memory")),
            ([good], [Faked("<f4", (4, 4), good, 0)], ValueError, ("pull_tensors[0]", "memory")),
        ]
    if lib.name == "jax":
        cases += [([good], [lib.jnp.zeros((4, 4))], (ValueError, TypeError), ("pull_tensors[0]", "JAX", "written"))]
    if lib.name != "jax":  # answers that would overwrite each other, though their keys differ
        room = lib.zeros("float32", (4, 4))
        for pull in ([room, room], [target, room, room[1:3]]):
            last = len(pull) - 1
            with n.raises(ValueError, f"pull tensor {last} (key {10 + last}) shares memory with pull tensor {last - 1}"):
                f.push_pull([good], [1], pull, [10 + i for i in range(len(pull))])
    for push, pull, classes, words in cases:
        keys = [1, 2][: len(push) if isinstance(push, list) else 1]
        with n.raises(classes, *words):
            f.push_pull(push, keys, pull, [3])
    for push, keys in (([Interrupted()], [1]), ([good], [Interrupted()])):
        try:
            f.push_pull(push, keys, [target], [3])
            raise AssertionError("an interrupt was lost")
        except KeyboardInterrupt:
            pass
    with n.raises(ValueError, "push_keys", "1000000000000"):
        f.push_pull([good], range(10**12), [target], [3])
    # A size that no other tensor of the test has: 2 GiB, of which no page is touched.
    if lib.name == "torch":
        huge = lib.torch.empty(2 << 30, dtype=lib.torch.uint8)
    elif lib.name == "numpy":
        huge = lib.np.empty(2 << 30, "uint8")
    else:
        huge = None
    if huge is not None:
        with n.raises(ValueError, "push_tensors[0]", str((2 << 30) - 1)):
            f.push_pull([huge], [1], [target], [3])
    # Nothing of all this was sent: the first batch that the server sees is this one,
    # and its handler is the first.
    h = f.push_pull([good], [1], [target], [3])
    with n.raises((), f"handler {h - 1}"):
        f.wait(h - 1)
    f.wait(h)


def refused_server(n):
    (handler, tensors, keys), = n.f.get_batch()
    assert keys == [1] and n.lib.shape(tensors[0]) == (4, 4)
    for bad, classes, words in (
            ([5], TypeError, ("tensors[0]", "int")), (7, TypeError, ("tensors", "sequence")), (None, TypeError, ("tensors",)),
            ([tensors[0], tensors[0]], ValueError, ("2", "1")), ([], ValueError, ("0", "1")),
            ([n.lib.make("float32", (4, 3), bytes(48))], ValueError, ("48 bytes", "64")),
            ([n.lib.make("float32", (1,) * 9, bytes(4))], ValueError, ("tensors[0]", "9"))):
        with n.raises(classes, *words):
            n.f.respond(bad, handler)
    n.f.respond(tensors, handler)


def test_refused(cluster, lib):
    cluster(lib=lib).run(refused_worker, refused_server)
