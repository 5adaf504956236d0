"""The functions and classes of fserver_lib under the name that StepMesh gives them.

    import fserver
    fserver.init()
    help(fserver.push_pull)

fserver.f is the module fserver_lib itself. It is imported when a name of it is used for the
first time, not before: a process that has it cannot use it after a fork, and inference
engines import what they find before they fork. PyTorch is imported first if it is
installed, so that get_batch() returns torch.Tensor; it is not required.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import fserver_lib as f
    from fserver_lib import (  # "as" tells type checkers what is meant for others
        Answer,
        Communicator,
        ConnectionError as ConnectionError,
        Error,
        Exchange,
        Finished,
        Operation,
        SimpleNotify,
        StreamExchange,
        Tensor,
        TimeoutError as TimeoutError,
        TypeError as TypeError,
        ValueError as ValueError,
        Window,
        all_gather,
        all_gather_v,
        all_reduce,
        all_to_all,
        answer_tensor,
        barrier,
        broadcast,
        empty_shared,
        fetch_trace,
        fileno,
        finalize,
        gather,
        get_all_handlers,
        get_batch,
        get_nanosecond,
        init,
        map_pinned_tensor,
        open_window,
        poll,
        prepare,
        prepare_streams,
        push_pull,
        rebuild,
        reduce_scatter,
        refuse,
        register_recv_buffer,
        respond,
        respond_vec,
        scatter,
        seq_add_one,
        stats,
        stop,
        wait,
        wait_flag,
        write_flag,
    )

__version__ = "0.0.5.post1+go.1"

# Without the classes that "import *" would put in place of built-in ones.
__all__ = [
    "Answer",
    "Communicator",
    "Error",
    "Exchange",
    "Finished",
    "Operation",
    "SimpleNotify",
    "StreamExchange",
    "Tensor",
    "Window",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "answer_tensor",
    "barrier",
    "broadcast",
    "empty_shared",
    "f",
    "fetch_trace",
    "fileno",
    "finalize",
    "gather",
    "get_all_handlers",
    "get_batch",
    "get_nanosecond",
    "init",
    "map_pinned_tensor",
    "open_window",
    "poll",
    "prepare",
    "prepare_streams",
    "push_pull",
    "rebuild",
    "reduce_scatter",
    "refuse",
    "register_recv_buffer",
    "respond",
    "respond_vec",
    "scatter",
    "seq_add_one",
    "stats",
    "stop",
    "wait",
    "wait_flag",
    "write_flag",
]


_HIDDEN = ("ConnectionError", "TimeoutError", "TypeError", "ValueError")  # which "import *" does not give


def _load():
    """Imports fserver_lib, and gives this module its names."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as e:
        if e.name != "torch":  # a broken PyTorch is worth knowing
            raise
    import fserver_lib

    names = {name: getattr(fserver_lib, name) for name in (*__all__, *_HIDDEN) if name != "f"}
    globals().update(names, f=fserver_lib)


def __getattr__(name):
    if name not in __all__ and name not in _HIDDEN:
        raise AttributeError("module %r has no attribute %r" % (__name__, name))
    _load()
    return globals()[name]


def __dir__():
    return sorted({*globals(), *__all__, *_HIDDEN})
