"""DLPack capsules made by hand, of kinds that no installed array library exports."""

import ctypes
import gc

import fserver_lib as f
import pytest

c = ctypes


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32),
                ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16),
                ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class Managed(c.Structure):
    pass


DELETER = c.CFUNCTYPE(None, c.POINTER(Managed))
Managed._fields_ = [("tensor", Tensor), ("context", c.c_void_p), ("deleter", DELETER)]

new, name_of = c.pythonapi.PyCapsule_New, c.pythonapi.PyCapsule_GetName
new.restype, new.argtypes = c.py_object, (c.c_void_p, c.c_char_p, c.c_void_p)
name_of.restype, name_of.argtypes = c.c_char_p, (c.py_object,)


class Array:
    """Exports one capsule over its memory, and counts its deletions."""

    def __init__(self, shape, strides=None, data=b"", offset=0, code=0, bits=32, lanes=1, device=1, ndim=None):
        self.memory = c.create_string_buffer(data, len(data)) if data is not None else None
        self.shape = (c.c_int64 * max(len(shape), 1))(*shape)
        self.strides = (c.c_int64 * max(len(shape), 1))(*strides) if strides is not None else None
        self.deleted = 0
        self.deleter = DELETER(self.delete)
        address = c.addressof(self.memory) if self.memory is not None else None
        self.managed = Managed(Tensor(address, device, 0, len(shape) if ndim is None else ndim, code, bits, lanes,
                                      c.cast(self.shape, c.POINTER(c.c_int64)),
                                      c.cast(self.strides, c.POINTER(c.c_int64)) if self.strides is not None else None, offset), None, self.deleter)
        self.capsule = None

    def shapeless(self):
        self.managed.tensor.shape = None
        return self

    def delete(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, 0

    def __dlpack__(self, **_):
        self.capsule = new(c.addressof(self.managed), b"dltensor", None)
        return self.capsule


def numbers(*values):
    return b"".join(v.to_bytes(4, "little") for v in values)


def views_worker(n):
    # Pushes: the same six numbers in each contiguous layout.
    want = numbers(1, 2, 3, 4, 5, 6)
    made = []
    for key, a in enumerate([
        Array((2, 3), data=want),
        Array((2, 3), (3, 1), want),
        Array((2, 3), data=b"before!!" + want, offset=8),
        Array((2, 3), (3, 1), b"before!!" + want, offset=8),
        Array((1, 6), (99, 1), want),  # the stride of a dimension of 1 has no meaning
        Array((6, 1), (1, 7), want),
        Array((2, 1, 3), (3, -5, 1), want),
    ]):
        pull = n.lib.zeros("int32", (2, 3))
        n.f.wait(n.f.push_pull([a], [key], [pull], [100 + key]))
        assert n.lib.bytes(pull) == want, key
        assert name_of(a.capsule) == b"used_dltensor"
        made.append(a)
    # A pull into memory after an offset does not change the bytes before it.
    a = Array((6,), data=bytes(8) + bytes(24), offset=8)
    n.f.wait(n.f.push_pull([n.lib.make("int32", (6,), want)], [50], [a], [51]))
    assert a.memory.raw == bytes(8) + want, a.memory.raw
    made.append(a)
    for a in made:
        a.capsule = None
    # A tensor without elements has no memory.
    n.f.wait(n.f.push_pull([Array((0, 4), (4, 1), None), n.lib.make("int32", (6,), want)], [60, 61], [], []))
    # A capsule that a call has consumed is deleted once, some time after the call.
    import gc
    import time

    limit = time.monotonic() + 20
    while [a.deleted for a in made] != [1] * len(made):
        assert time.monotonic() < limit, [a.deleted for a in made]
        n.f.wait(n.f.push_pull([n.lib.make("int32", (6,), want)], [70], [], []))
        gc.collect()

    target = n.lib.zeros("int32", (2, 3))
    for a, *words in [
        (Array((2, 3), (1, 2), want), "contiguous"),  # transposed
        (Array((2, 3), (4, 1), bytes(40)), "contiguous"),  # rows with a gap: only the outermost stride shows it
        (Array((2, 3), (3, 2), bytes(48)), "contiguous"),
        (Array((2,), (2,), bytes(16)), "contiguous"),
        (Array((2, 3), (-3, 1), want), "contiguous"),
        (Array((2, 2, 2), (8, 2, 1), bytes(64)), "contiguous"),
        (Array((2, 3), data=want, lanes=2), "2 lanes"),
        (Array((2, 3), data=want, bits=24), "24 bits"),
        (Array((2, 3), data=want, code=77), "code 77"),
        (Array((2, 3), data=want, device=99), "99"),
        (Array((-1, 3), data=want),),
        (Array((1,) * 9, data=want), "9"),
        (Array((2, 3), data=want, ndim=-1), "-1"),
        (Array((1 << 62, 1 << 62), data=want),),
        (Array((2, 3), data=want).shapeless(), "no shape"),
        (Array((2, 3), data=None), "memory"),
    ]:
        with n.raises(ValueError, "push_tensors[0]", *words):
            n.f.push_pull([a], [1], [target], [2])
        with n.raises(ValueError, "pull_tensors[0]", *words):
            n.f.push_pull([n.lib.make("int32", (6,), want)], [1], [a], [2])
        assert name_of(a.capsule) == b"dltensor" and a.deleted == 0, f"{words}: a refused capsule still belongs to its producer"
    n.f.wait(n.f.push_pull([n.lib.make("int32", (6,), want)], [99], [], []))


def views_server(n):
    want = numbers(1, 2, 3, 4, 5, 6)
    last = None
    while last != 99:
        (handler, tensors, keys), = n.f.get_batch()
        last = keys[0]
        for t in tensors:
            assert n.lib.bytes(t) in (want, b""), (keys, n.lib.bytes(t))
        n.f.respond([] if 60 <= last < 100 and last != 51 else [tensors[0]], handler)


def test_views(cluster, lib):
    cluster(lib=lib).run(views_worker, views_server)


def test_deleter_during_an_exception():
    """A deleter in Python does not replace the exception during which the capsule is freed."""
    for call, error, words in (
            (lambda good: f.push_pull([good, object()], [1, 2], [], []), f.TypeError, r"push_tensors\[1\]"),
            (lambda good: f.push_pull([good], [2**64], [], []), f.ValueError, r"push_keys\[0\]"),
            (lambda good: f.respond([good, None], 0), f.TypeError, r"tensors\[1\]"),
            (lambda good: f.all_reduce(good, good), f.Error, "init")):
        good = Array((4,), data=bytes(16), code=2)
        with pytest.raises(error, match=words):
            call(good)
        good.capsule = None
        with pytest.raises(f.Error, match="init"):
            f.stats()  # every call drops what earlier ones have left
        gc.collect()
        assert good.deleted > 0
