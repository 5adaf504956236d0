"""Sessions: a controller runs functions on many processes. This is package kv/session for Python.

    from fserver import session                       # after fserver.init()

    session.serve({"forward": forward})               # on each server: runs until the session ends

    with session.open() as s:                         # on one worker
        x = s.broadcast(s.copy_to(array))             # to rank 0, then to all ranks
        y = s.call("forward", x, 0.5)                 # all ranks run it
        print(s.copy_from(y))                         # the result on rank 0

All ranks run the calls of a session one after the other, in the order in which they were made. call()
does not wait for them. The result of a function, any object, stays on its rank under a handle. A handle
without references is killed. Arguments and copied values are None, bool, int, float, str, bytes, NumPy
arrays of numbers, dates or times (no long doubles), and, as arguments, handles. Only one thread may call
at a time, as with barrier(). A thread in serve() counts as calling except while a function runs, so other
threads should not call init(), stop() or barrier() meanwhile.

If a function raises an exception, or a rank does not have the named function, wait(), sync() or a copy of
the result raises fserver_lib.Error, which names the rank. If a rank or the controller is lost, all waiting
calls raise ConnectionError or Error, and the session has ended.
"""

import struct

import fserver as f
import numpy as np

__all__ = ["Handle", "Session", "open", "serve"]

(_OPEN, _RUN, _WAIT, _COPY_TO, _BROADCAST, _GET, _SET, _HANDLES, _SYNC, _KILL, _SHUTDOWN, _CLOSE,
 _SERVE, _NEXT, _DONE, _FAIL, _LEAVE) = range(17)
_NONE, _CALL, _VALUE, _DROP = range(4)


_LONGEST = (1 << 31) - 4096


def _utf8(text):
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise f.ValueError("session: a str that cannot be encoded in UTF-8: %s" % e) from None


_NUMBERS = frozenset(("bool int8 uint8 int16 uint16 float16 bfloat16 int32 uint32 float32 int64 uint64 float64 complex64 "
                      "complex128").split())


def _travels(dtype):
    """Whether arrays of this dtype can be sent: only the dtype's name is sent, and the Go package must know it."""
    return dtype.isnative and (dtype.kind in "mM" or dtype.name in _NUMBERS)


class _Number(int):
    """A handle, or the number of a result, in encoded values."""


def _encode(values):
    """Encodes values in the format of session.Decode of the Go package."""
    b = bytearray(struct.pack("<I", len(values)))
    for v in values:
        if isinstance(v, np.generic) and v.dtype.kind not in "mM":
            v = v.item()
        if isinstance(v, (str, bytes, bytearray)) and len(v) > _LONGEST or isinstance(v, np.ndarray) and v.nbytes > _LONGEST:
            raise f.ValueError("session: a %s of %d bytes, want less than 2 GiB" % (type(v).__name__, getattr(v, "nbytes", 0) or len(v)))
        if v is None:
            b += b"\0"
        elif isinstance(v, bool):
            b += b"\1" + bytes([v])
        elif isinstance(v, (Handle, _Number)):
            b += struct.pack("<BQ", 7, v.number if isinstance(v, Handle) else v)
        elif isinstance(v, int):
            if not -1 << 63 <= v < 1 << 63:
                raise f.ValueError("session: %d, want an integer of 64 bits" % v)
            b += struct.pack("<Bq", 2, v)
        elif isinstance(v, float):
            b += struct.pack("<Bd", 3, v)
        elif isinstance(v, str):
            v = _utf8(v)
            b += struct.pack("<BI", 4, len(v)) + v
        elif isinstance(v, (bytes, bytearray)):
            b += struct.pack("<BI", 5, len(v)) + v
        elif isinstance(v, np.ndarray) and not isinstance(v, np.ma.MaskedArray):
            if not _travels(v.dtype):
                raise f.ValueError("session: an array of %r, want one of %s, datetime64 or timedelta64, in the byte order of this machine"
                                   % (v.dtype, ", ".join(sorted(_NUMBERS))))
            if v.ndim > 32:
                raise f.ValueError("session: an array of %d dimensions, want at most 32" % v.ndim)
            name = v.dtype.name.encode()
            b += struct.pack("<BB", 6, len(name)) + name + struct.pack("<B%dQI" % v.ndim, v.ndim, *v.shape, v.nbytes)
            b += bytes(-len(b) % 8)
            b += v.tobytes()
        else:
            raise f.TypeError("session: a %s, want None, a bool, int, float, str, bytes, an array or a handle" % type(v).__name__)
    return bytes(b)


def _decode(b):
    """Returns the values in b. Arrays are copies."""
    (n,), at, values = struct.unpack_from("<I", b), 4, []

    def take(form):
        nonlocal at
        got = struct.unpack_from("<" + form, b, at)
        at += struct.calcsize("<" + form)
        return got

    for _ in range(n):
        (kind,) = take("B")
        if kind == 0:
            values.append(None)
        elif kind == 1:
            values.append(take("?")[0])
        elif kind in (2, 3):
            values.append(take("q" if kind == 2 else "d")[0])
        elif kind in (4, 5):
            (v,) = take("%ds" % take("I"))
            values.append(v.decode() if kind == 4 else v)
        elif kind == 6:
            (name,) = take("%ds" % take("B"))
            shape = take("%dQ" % take("B"))
            (size,) = take("I")
            at += -at % 8
            dtype = np.dtype(name.decode())
            values.append(np.frombuffer(b, dtype, size // dtype.itemsize, at).reshape(shape).copy())
            at += size
        else:
            values.append(_Number(take("Q")[0]))
    return values


def _do(op, handle=0, rank=0, name="", data=b"", timeout_ms=None):
    return f.f._session(op, handle, rank, name, data, timeout_ms)


class Handle:
    """A result of one session, stored on its ranks."""

    def __init__(self, number, session):
        self.number, self._session = number, session
        self._kill = f.f._session  # the module may be freed before this object

    def __del__(self):
        self.kill()

    def kill(self):
        """Releases the result: the ranks release it before the next call."""
        kill, self._kill = self._kill, None
        if kill is not None and self._session is _now:
            try:
                kill(_KILL, self.number, 0, "", b"", None)
            except f.Error:
                pass  # the process has stopped

    def wait(self, timeout_ms=None):
        """Waits until all ranks have run the call, and raises their errors."""
        self._session._do(_WAIT, self._session._number(self), timeout_ms=timeout_ms)


class Session:
    """The result of open(). It is a context manager: at the end it shuts the session down, or after an
    exception closes it."""

    def __init__(self, ranks):
        self.ranks = ranks
        self._open = True

    def _number(self, handle):
        """Returns the number of a handle of this session. Other sessions use the same numbers."""
        if not isinstance(handle, Handle):
            raise f.TypeError("session: a %s, want a handle" % type(handle).__name__)
        if handle._session is not self or self is not _now:
            raise f.ValueError("session: handle %d of another session" % handle.number)
        return handle.number

    def _do(self, *args, **kw):
        """Makes a call of this session. A process has one session at a time: without the check, the call would be made in the next session."""
        if self is not _now or not self._open:
            raise f.Error("session: this session has ended")
        return _do(*args, **kw)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.shutdown() if kind is None else self.close()

    def call(self, name, *args, timeout_ms=None):
        """Runs a function on all ranks. The limit is for the wait until the window of calls has space."""
        if not isinstance(name, str):
            raise f.TypeError("session: a %s, want the name of a function" % type(name).__name__)
        if b"\0" in _utf8(name):
            raise f.ValueError("session: the name %r, want one without a zero character" % name)
        for a in args:
            if isinstance(a, Handle):
                self._number(a)
        return Handle(self._do(_RUN, 0, 0, name, _encode(args), timeout_ms)[0], self)

    def copy_to(self, value, timeout_ms=None):
        """Stores a value on rank 0."""
        return Handle(self._do(_COPY_TO, 0, 0, "", _encode([value]), timeout_ms)[0], self)

    def broadcast(self, handle, timeout_ms=None):
        """Stores rank 0's value on all ranks, under a new handle. The value is sent through this process."""
        return Handle(self._do(_BROADCAST, self._number(handle), timeout_ms=timeout_ms)[0], self)

    def copy_from(self, handle, timeout_ms=None):
        """Returns the value on rank 0."""
        return self.get(handle, 0, timeout_ms)

    def get(self, handle, rank, timeout_ms=None):
        """Returns the value on one rank."""
        return _decode(self._do(_GET, self._number(handle), rank, timeout_ms=timeout_ms)[3])[0]

    def set(self, handle, rank, value, timeout_ms=None):
        """Replaces the value on one rank."""
        self._do(_SET, self._number(handle), rank, "", _encode([value]), timeout_ms)

    def handles(self, rank, timeout_ms=None):
        """Returns the numbers of the handles that have a value on a rank."""
        return _decode(self._do(_HANDLES, 0, rank, timeout_ms=timeout_ms)[3])

    def sync(self, timeout_ms=None):
        """Waits for all calls, and raises the errors of calls without a wait()."""
        self._do(_SYNC, timeout_ms=timeout_ms)

    def shutdown(self, timeout_ms=None):
        """Waits for all calls, and ends serve() on all ranks."""
        if self._open and self is _now:
            _do(_SHUTDOWN, timeout_ms=timeout_ms)
            self._open = False  # after the call: a refused call has not ended the session

    def close(self):
        """Ends the session at once; serve() ends with an error on all ranks."""
        if self._open and self is _now:
            _do(_CLOSE)
            self._open = False


def open(timeout_ms=15000):
    """Begins a session with all servers. Returns when all have called serve(). Call it on a worker, after init()."""
    global _now
    _now = Session(_do(_OPEN, timeout_ms=timeout_ms)[1])
    return _now


_now = None  # the latest session: a process controls one at a time


def serve(functions):
    """Runs functions, a dict by name, for the controller, on the calling thread, until the controller shuts the
    session down or calls stop(). Call it on a server, after init(). Raises an error if the session has failed or the
    controller is lost, ConnectionError if no session is open and all workers are lost, and Finished if all workers are
    in stop(): that ends the program, as after get_batch()."""
    kept, last = {}, 0
    _do(_SERVE, data=_encode(list(functions)))
    try:
        while True:
            number, task, name, data = _do(_NEXT)
            if task == _NONE:
                return
            try:
                answer, out = 0, b""
                if task == _CALL:
                    last += 1
                    kept[last], answer = functions[name](*[kept[a] if isinstance(a, _Number) else a for a in _decode(data)]), last
                elif task == _VALUE:
                    out = _encode([kept[number]])
                else:
                    del kept[number]
            except Exception as e:
                _do(_FAIL, name=_text(e))
            else:
                _do(_DONE, answer, data=out)
            data = out = None  # releases long data
    except BaseException as e:
        _do(_LEAVE, name=_text(e))  # reports to the controller, unless that is the cause
        raise


def _text(e):
    """Returns the text of an exception, in a form that can be sent."""
    try:
        text = "%s: %s" % (type(e).__name__, e)
    except Exception:
        text = type(e).__name__
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
