"""Prepared exchanges as operators of PyTorch, so that torch.compile makes one graph of what
uses them. It needs PyTorch 2.4; fserver and fserver_lib do without this module.

    from fserver import ops

    x = ops.prepare([hidden], [1], [out], [2])

    @torch.compile(fullgraph=True)
    def layer(h):
        hidden.copy_(h)
        x.start()
        x.wait()
        return out + h

start() and wait() are torch.ops.stepaf.start and .wait, which know the exchange by its
number. A compiled function may hand them other tensors than those prepared, with the
values that these would have: they are copied. Nothing is where they are the same.
"""

import itertools
import weakref

import fserver as f
import torch
from torch import library

if not hasattr(library, "register_fake"):
    raise ImportError("fserver.ops needs PyTorch 2.4 or newer, this is %s" % torch.__version__)

__all__ = ["Exchange", "prepare"]

_exchanges = weakref.WeakValueDictionary()  # by number, which is never used again
_numbers = itertools.count(1)


class Exchange:
    """What prepare() returns: an fserver_lib.Exchange with its tensors and a number."""

    def __init__(self, exchange, push, pull):
        self.exchange, self.push, self.pull = exchange, list(push), list(pull)
        self.number = next(_numbers)
        self.rows = -1  # of the round that was started last
        self.started = False  # and was not waited for
        _exchanges[self.number] = self

    def start(self, rows=-1):
        """Begins a round of all rows, or of the first so many of each tensor."""
        torch.ops.stepaf.start(self.number, self.push, self.pull, rows)

    def wait(self, timeout_ms=15000):
        """Waits for the round."""
        torch.ops.stepaf.wait(self.number, self.push, self.pull, timeout_ms)

    def check(self):
        """Raises what rounds of CUDA graphs have failed with."""
        self.exchange.check()

    def close(self):
        """Lets go of the tensors."""
        self.exchange.close()


def prepare(push_tensors, push_keys, pull_tensors, pull_keys, need_event=True, *, servers=None):
    """fserver_lib.prepare(), for tensors of PyTorch."""
    return Exchange(f.prepare(push_tensors, push_keys, pull_tensors, pull_keys, need_event, servers=servers), push_tensors, pull_tensors)


def _exchange(number):
    x = _exchanges.get(number)
    if x is None:
        raise f.ValueError("stepaf: there is no exchange %d, or it was dropped: keep what prepare() returned" % number)
    return x


def _bring(to, of, rows, what):
    """Copies the rows of tensors to others, where they are not the same."""
    if len(to) != len(of):
        raise f.ValueError("stepaf: %d %s tensors, but %d were prepared" % (len(of), what, len(to)))
    for i, (mine, given) in enumerate(zip(to, of)):
        if mine.shape != given.shape or mine.dtype != given.dtype:
            raise f.ValueError("stepaf: %s tensor %d is %s %s, but %s %s was prepared" % (what, i, given.dtype, tuple(given.shape), mine.dtype, tuple(mine.shape)))
        if mine.data_ptr() != given.data_ptr() and mine.numel() > 0:
            if rows < 0:
                mine.copy_(given)
            else:
                mine[:rows].copy_(given[:rows])


def _start(exchange, push, pull, rows=-1):
    x = _exchange(exchange)
    if x.started and any(mine.data_ptr() != given.data_ptr() for mine, given in zip(x.push, push)):
        raise f.Error("stepaf: start: the exchange is started already: wait() for that round first, its tensors are being sent")
    _bring(x.push, push, rows, "push")
    x.exchange.start(None if rows < 0 else rows)
    x.rows, x.started = rows, True


def _wait(exchange, push, pull, timeout_ms=15000):
    x = _exchange(exchange)
    try:
        x.exchange.wait(timeout_ms)
    except f.Error:
        x.started = False  # the round is over, or was given up
        raise
    x.started = False
    _bring(pull, x.pull, x.rows, "pull")


def _nothing(*args):
    return None


# Both have all tensors, and say that they change those to be filled: so what uses the
# values stays behind wait, and what writes new ones to be sent as well.
_ops = library.Library("stepaf", "DEF")
for _name, _last, _function in (("start", "SymInt rows=-1", _start), ("wait", "int timeout_ms=15000", _wait)):
    _ops.define("%s(int exchange, Tensor[] push, Tensor(a!)[] pull, %s) -> ()" % (_name, _last), tags=(torch.Tag.pt2_compliant_tag,))
    _ops.impl(_name, _function, "CompositeExplicitAutograd")
    library.register_fake("stepaf::" + _name, _nothing, lib=_ops)
