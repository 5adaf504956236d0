"""The functions and classes of fserver_lib under the name that StepMesh gives them.

    import fserver
    fserver.init()
    help(fserver.push_pull)

fserver.f is the module fserver_lib itself. PyTorch is imported first if it is
installed, so that get_batch() returns torch.Tensor; it is not required.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as e:
    if e.name != "torch":  # a broken PyTorch is worth knowing
        raise

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
    barrier,
    broadcast,
    fetch_trace,
    gather,
    get_all_handlers,
    get_batch,
    get_nanosecond,
    init,
    map_pinned_tensor,
    open_window,
    prepare,
    prepare_streams,
    push_pull,
    rebuild,
    reduce_scatter,
    register_recv_buffer,
    respond,
    respond_vec,
    scatter,
    seq_add_one,
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
    "barrier",
    "broadcast",
    "f",
    "fetch_trace",
    "gather",
    "get_all_handlers",
    "get_batch",
    "get_nanosecond",
    "init",
    "map_pinned_tensor",
    "open_window",
    "prepare",
    "prepare_streams",
    "push_pull",
    "rebuild",
    "reduce_scatter",
    "register_recv_buffer",
    "respond",
    "respond_vec",
    "scatter",
    "seq_add_one",
    "stop",
    "wait",
    "wait_flag",
    "write_flag",
]
