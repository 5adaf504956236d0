"""Prepared exchanges as operators of PyTorch, so that torch.compile makes one graph of code that
uses them. This module needs PyTorch 2.4; fserver and fserver_lib do not need this module.

    from fserver import ops

    x = ops.prepare([hidden], [1], [out], [2])

    @torch.compile(fullgraph=True)
    def layer(h):
        hidden.copy_(h)
        x.start()
        x.wait()
        return out + h

start() and wait() are torch.ops.stepaf.start and .wait, which identify the exchange by its
number. A compiled function may pass other tensors than the prepared ones: they are then
copied to or from the prepared ones. The same tensors are not copied.
"""

import itertools
import weakref

import fserver as f
import torch
from torch import library

if not hasattr(library, "register_fake"):
    raise ImportError("fserver.ops needs PyTorch 2.4 or newer, this is %s" % torch.__version__)

__all__ = ["Exchange", "prepare"]

_exchanges = weakref.WeakValueDictionary()  # by number; numbers are not reused
_numbers = itertools.count(1)
_LONGEST = 1 << 40  # the largest timeout_ms of Exchange.wait


class Exchange:
    """The result of prepare(): an fserver_lib.Exchange with its tensors and a number."""

    def __init__(self, exchange, push, pull):
        self.exchange, self.push, self.pull = exchange, list(push), list(pull)
        self.number = next(_numbers)
        self.rows = -1  # of the latest round
        self.started = False  # and not waited for yet
        self.waits = 0  # calls of wait under way
        _exchanges[self.number] = self

    def start(self, rows=-1):
        """Begins a round of all rows, or of the first `rows` rows of each tensor."""
        torch.ops.stepaf.start(self.number, self.push, self.pull, rows)

    def wait(self, timeout_ms=15000):
        """Waits for the round."""
        torch.ops.stepaf.wait(self.number, self.push, self.pull, timeout_ms)

    def check(self):
        """Raises the first error of rounds of CUDA graphs."""
        self.exchange.check()

    def close(self):
        """Releases the tensors."""
        self.exchange.close()


def prepare(push_tensors, push_keys, pull_tensors, pull_keys, need_event=True, *, servers=None):
    """fserver_lib.prepare(), for tensors of PyTorch."""
    return Exchange(f.prepare(push_tensors, push_keys, pull_tensors, pull_keys, need_event, servers=servers), push_tensors, pull_tensors)


def _exchange(number):
    x = _exchanges.get(number)
    if x is None:
        raise f.ValueError("stepaf: there is no exchange %d, or it was dropped: keep the result of prepare()" % number)
    return x


def _check(prepared, tensors, what):
    """Raises ValueError for tensors that do not have the form of the prepared ones."""
    if len(prepared) != len(tensors):
        raise f.ValueError("stepaf: %d %s tensors, but %d were prepared" % (len(tensors), what, len(prepared)))
    for i, (mine, given) in enumerate(zip(prepared, tensors)):
        if mine.shape != given.shape or mine.dtype != given.dtype:
            raise f.ValueError("stepaf: %s tensor %d is %s %s, but %s %s was prepared" % (what, i, given.dtype, tuple(given.shape), mine.dtype, tuple(mine.shape)))


def _copy_rows(to, of, rows):
    """Copies the rows of tensors (all, if rows is negative) to others, unless they are the same tensors."""
    for mine, given in zip(to, of):
        same = mine.data_ptr() == given.data_ptr() and given.is_contiguous()  # a transposed view begins at the same address
        if not same and mine.numel() > 0:
            if rows < 0:
                mine.copy_(given)
            else:
                mine[:rows].copy_(given[:rows])


def _start(exchange, push, pull, rows=-1):
    x = _exchange(exchange)
    if x.started and any(mine.data_ptr() != given.data_ptr() for mine, given in zip(x.push, push)):
        raise f.Error("stepaf: start: the exchange is started already: wait() for that round first, its tensors are being sent")
    _check(x.push, push, "push")
    _copy_rows(x.push, push, rows)
    was = x.rows, x.started
    x.rows, x.started = rows, True  # before start(): KeyboardInterrupt may be raised after the round has begun
    try:
        x.exchange.start(None if rows < 0 else rows)
    except f.Error:
        x.rows, x.started = was
        raise


def _wait(exchange, push, pull, timeout_ms=15000):
    x = _exchange(exchange)
    if not 0 <= timeout_ms <= _LONGEST:  # the exchange would refuse it: the round is still in flight
        raise f.ValueError("stepaf: timeout_ms is %d, want 0 to %d milliseconds" % (timeout_ms, _LONGEST))
    _check(x.pull, pull, "pull")
    x.waits += 1
    try:
        x.exchange.wait(timeout_ms)
    except f.Error:
        x.started = x.started and x.waits > 1  # the round has ended; if another thread waits for it, only this wait was refused
        raise
    finally:
        x.waits -= 1
    x.started = False
    _copy_rows(pull, x.pull, x.rows)


def _nothing(*args):
    return None


# Both operators take all tensors, and declare that they change the pull tensors. So the compiler
# keeps code that uses the values, or writes new values to send, after wait.
_ops = library.Library("stepaf", "DEF")
for _name, _last, _function in (("start", "SymInt rows=-1", _start), ("wait", "int timeout_ms=15000", _wait)):
    _ops.define("%s(int exchange, Tensor[] push, Tensor(a!)[] pull, %s) -> ()" % (_name, _last), tags=(torch.Tag.pt2_compliant_tag,))
    _ops.impl(_name, _function, "CompositeExplicitAutograd")
    library.register_fake("stepaf::" + _name, _nothing, lib=_ops)
