"""Random arguments for every call: they raise, and the process lives.

SEED chooses others, COUNT how many (10000).
"""

import os
import random
import subprocess
import sys

import arrays
import harness
import pytest

COUNT = int(os.environ.get("COUNT") or 10000)
SEED = int(os.environ.get("SEED") or 1)


class Nasty:
    """An object whose every use raises an exception, or returns a meaningless value."""

    def __init__(self, r):
        self._r = r

    def _act(self, *_, **__):
        kind = self._r.randrange(7)
        if kind == 0:
            raise self._r.choice((ValueError, KeyError, MemoryError, ZeroDivisionError, StopIteration))("nasty")
        return (None, -1, 2**70, "x", (1, 0), [])[kind - 1]

    __len__ = __getitem__ = __iter__ = __index__ = __int__ = __bool__ = __dlpack__ = __dlpack_device__ = __str__ = __repr__ = _act
    __array_interface__ = data_ptr = shape = dtype = property(_act)


class Subclass(list):
    def __getitem__(self, i):
        del self[:]  # shrinks while it is read
        raise IndexError(i)


class Shrinking(list):
    """A sequence that gets shorter while its elements are converted."""

    def __init__(self, items):
        super().__init__(items)
        self.insert(0, Shrinker(self))


class Shrinker:
    def __init__(self, owner):
        self.owner = owner

    def __index__(self):
        del self.owner[:]
        return 5

    def __dlpack_device__(self):
        del self.owner[:]
        return (1, 0)


class Maker:
    def __init__(self, seed, lib):
        self.r, self.lib, self.pool = random.Random(seed), lib, []
        import fserver_lib

        self.f = fserver_lib

    def integer(self):
        r = self.r
        return r.choice((0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -2**63, -2**64, 10**30,
                         r.getrandbits(64), r.randrange(10)))

    def tensor(self):
        if len(self.pool) < 100:  # some libraries need long to create one
            r = self.r
            dtype = r.choice(self.lib.dtypes)
            shape = tuple(r.choice((0, 1, 1, 2, 3)) for _ in range(r.randrange(10)))
            self.pool.append(self.lib.make(dtype, shape, bytes(arrays.size(dtype, shape))))
            return self.pool[-1]
        return self.r.choice(self.pool)

    def thing(self, depth=0):
        r = self.r
        simple = (
            lambda: None, lambda: r.random(), self.integer, self.integer, lambda: r.choice((True, False)), lambda: "text",
            lambda: b"bytes", lambda: bytearray(16), lambda: memoryview(b"1234"), lambda: object(), lambda: Nasty(r), lambda: int,
            lambda: 1j, lambda: float("nan"), lambda: range(r.randrange(4)), lambda: {}, lambda: {1, 2}, lambda: iter([1]),
            lambda: (x for x in [1]), lambda: Subclass([1, 2]), lambda: Shrinking([1, 2]), lambda: self.f, lambda: self.f.Error,
            lambda: r.choice(self.calls()), self.tensor, self.tensor, lambda: "\ud800", lambda: "x" * 10000)
        many = (
            lambda: [self.thing(depth + 1) for _ in range(r.randrange(5))],
            lambda: tuple(self.thing(depth + 1) for _ in range(r.randrange(5))),
            lambda: [self.tensor() for _ in range(r.randrange(5))],
            lambda: [self.integer() for _ in range(r.randrange(5))],
            lambda: Shrinking([self.tensor() for _ in range(3)]),
        )
        return r.choice(simple if depth > 2 or r.random() < 0.5 else many)()

    def calls(self):
        values = [value for name, value in sorted(vars(self.f).items()) if not name.startswith("_") and callable(value)]
        return [v for v in values if not (isinstance(v, type) and issubclass(v, BaseException))]

    NAMES = ("push_tensors", "push_keys", "pull_tensors", "pull_keys", "need_event", "handler", "timeout_ms", "tensors",
             "include_server", "include_client", "instance_barrier", "what")

    def call(self):
        r = self.r
        function = r.choice(self.calls())
        arguments = [self.thing() for _ in range(r.choice((0, 1, 2, 3, 3, 4, 4, 5, 6)))]
        named = {r.choice(self.NAMES): self.thing() for _ in range(r.choice((0, 0, 1, 2)))}
        if function is self.f.init:
            # It would rightly wait for a cluster; a limit lets it fail at once.
            named["timeout_ms"] = r.choice((0, 1, -1, "x", None)) if "DMLC_ROLE" not in os.environ else 1
        if function is self.f.empty_shared:  # it would rightly allocate that much
            arguments = [min(a, 1 << 20) if isinstance(a, int) else a for a in arguments]
        return function, arguments, named


def fuzz():
    """The process, without a node, that must survive."""
    seed, count, lib = int(sys.argv[1]), int(sys.argv[2]), arrays.load(sys.argv[3])
    m = Maker(seed, lib)
    raised = harmless = 0
    import fserver_lib as f

    environ = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1",
               "DMLC_PS_ROOT_PORT": sys.argv[4], "DMLC_NODE_HOST": "127.0.0.1"}
    for i in range(count):
        if i == count // 2:
            os.environ.update(environ)  # from here on init has something to try
        function, arguments, named = m.call()
        if function is f.init and i >= count // 2 and m.r.random() < 0.9:
            continue
        try:
            function(*arguments, **named)
        except (KeyboardInterrupt, SystemExit, SystemError):
            raise
        except Exception as e:
            raised += 1
            if isinstance(e, f.Error):
                str(e)
        else:
            # Calls that need no node.
            assert function in (f.get_nanosecond, f.SimpleNotify, f.empty_shared), (i, function, arguments, named)
            harmless += 1
    print(raised, harmless)


def run(python, *arguments, env=None):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(harness.OURS)}
    environ.update(PYTHONPATH=os.pathsep.join([harness.HERE, environ.get("PYTHONPATH", "")]), PYTHONFAULTHANDLER="1")
    environ.update(env or {})
    code = "import test_fuzz; test_fuzz.fuzz()"
    return subprocess.run([python, "-c", code, *map(str, arguments)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=300)


def test_without_init(lib):
    p = run(sys.executable, SEED, COUNT, lib, harness.free_port())
    assert p.returncode == 0, f"seed {SEED}: {p.returncode}\n{p.stderr[-5000:]}"
    raised, harmless = map(int, p.stdout.split())
    assert raised > 0.8 * COUNT * 0.8 and harmless > 0, p.stdout


# The same with a node, which still works afterwards.

def fuzz_node(n, m, count):
    """Calls that do not wait for other nodes."""
    f = n.f
    for i in range(count):
        function, arguments, named = m.call()
        if function in (f.stop, f.init) or function is f.get_batch and n.role == "server":
            continue
        if function is f.barrier:
            named["timeout_ms"] = 1
        try:
            result = function(*arguments, **named)
        except (KeyboardInterrupt, SystemExit, SystemError):
            raise
        except Exception as e:
            if isinstance(e, f.Error):
                str(e)
        else:
            if function is f.push_pull:
                raise AssertionError(f"{i}: push_pull took {arguments} {named}: {result}")


class NodeMaker(Maker):
    """Misuse only: a valid push_pull would be a batch for the server."""

    def call(self):
        function, arguments, named = super().call()
        if function is self.f.push_pull and len(arguments) > 1:
            arguments[1] = [2**64]
        return function, arguments, named


def misusing_worker(n):
    fuzz_node(n, NodeMaker(SEED, n.lib), COUNT // 4)
    pull = n.lib.zeros("uint8", (3,))
    handler = n.f.push_pull([n.lib.make("uint8", (3,), b"abc")], [1], [pull], [1])
    n.f.wait(handler, timeout_ms=100_000)  # the server makes all its calls before it answers
    assert n.lib.bytes(pull) == b"abc"


def misusing_server(n):
    (handler, tensors, _), = n.f.get_batch()
    kept = handler, tensors
    m = NodeMaker(SEED + 1, n.lib)
    m.integer = lambda: m.r.choice((1, -1, 2**64, 2**63, 77))  # not the existing handler
    fuzz_node(n, m, COUNT // 4)
    n.f.respond(kept[1], kept[0])


def test_with_init(cluster, lib):
    cluster(lib=lib).run(misusing_worker, misusing_server)
