"""The assignment of attention ranks to FFN ranks, in blocks.

With at least as many attention ranks as FFN ranks, each attention rank has one FFN rank, and
an FFN rank has a block of consecutive attention ranks. With fewer, an attention rank has a
block of FFN ranks, and each gets a share of its rows. Block sizes differ by at most one.
"""


def _check(attention, ffn):
    for name, n in (("attention", attention), ("ffn", ffn)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError("%s is %r, want the number of %s ranks" % (name, n, name))
        if n < 1:
            raise ValueError("%s is %d, want at least 1 rank" % (name, n))


def _rank(role, rank, count):
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError("the %s rank is %r, want an int" % (role, rank))
    if not 0 <= rank < count:
        raise ValueError("there is no %s rank %d, want 0 to %d" % (role, rank, count - 1))


def servers_of(rank, attention, ffn):
    """Returns the FFN ranks of attention rank `rank`, in rising order."""
    _check(attention, ffn)
    _rank("attention", rank, attention)
    if attention >= ffn:
        return [rank * ffn // attention]
    return [s for s in range(ffn) if s * attention // ffn == rank]


def workers_of(rank, attention, ffn):
    """Returns the attention ranks of FFN rank `rank`, in rising order."""
    _check(attention, ffn)
    _rank("ffn", rank, ffn)
    if attention >= ffn:
        return [w for w in range(attention) if w * ffn // attention == rank]
    return [rank * attention // ffn]


def share(rows, index, parts):
    """Returns the range of rows of part `index` of `parts`, as (begin, end)."""
    return rows * index // parts, rows * (index + 1) // parts
