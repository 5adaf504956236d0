"""An engine's process joins and leaves the cluster."""

import logging
import os
import socket
import subprocess
import sys

import fserver as f

from . import layout

log = logging.getLogger("fserver.connectors")

ROLES = {"attention": "worker", "ffn": "server"}

# The program of the scheduler's process. It ends after the last node.
SCHEDULER = "import sys; sys.path[:0] = %r\nimport fserver_lib as f\nf.init()\nf.stop()\n"


def environment(role, rank, attention, ffn, host, port, device=0, transport=None):
    """Returns the variables with which a rank of an engine joins, as a dict. Each rank is a
    node of its own (groups of one), so that either side may have any number of ranks."""
    if role not in ROLES:
        raise ValueError("role is %r, want one of %s" % (role, ", ".join(map(repr, ROLES))))
    layout._check(attention, ffn)
    layout._rank(role, rank, attention if role == "attention" else ffn)
    for name, value in (("port", port), ("device", device)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError("%s is %r, want an int" % (name, value))
    if not host:
        raise ValueError("host is empty, want the address of FFN rank 0")
    if not 0 < port < 65536:
        raise ValueError("port is %d, want 1 to 65535" % port)
    env = {
        "DMLC_ROLE": ROLES[role], "DMLC_NODE_RANK": str(rank), "DMLC_GROUP_SIZE": "1",
        "DMLC_NUM_WORKER": str(attention), "DMLC_NUM_SERVER": str(ffn),
        "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port),
        # Without the offset, a group of one on device k would have rank k.
        "STEPMESH_GPU": str(device), "DMLC_RANK_OFFSET": str(-device),
    }
    if transport:
        env["DMLC_ENABLE_RDMA"] = transport
    if host.startswith("127.") and not os.environ.get("DMLC_NODE_HOST"):
        env["DMLC_NODE_HOST"] = host  # a cluster within one machine
    return env


def join(role, rank, attention, ffn, host="127.0.0.1", port=8123, device=0, transport=None, scheduler="auto", timeout_ms=None):
    """Makes this process attention or FFN rank `rank`. Returns when all ranks have joined. A
    replacement of a lost rank returns when it has that rank.

    host and port are the scheduler's. With scheduler="auto", FFN rank 0 starts the scheduler,
    unless one listens there; host must then be an address of its machine. With "no", join
    starts none. timeout_ms is the time within which the other ranks must join. Each node and
    the scheduler use STEPAF_START_TIMEOUT, so join sets it to that time unless it is set.
    """
    os.environ.update(environment(role, rank, attention, ffn, host, port, device, transport))
    if scheduler not in ("auto", "no"):
        raise ValueError("scheduler is %r, want 'auto' or 'no'" % (scheduler,))
    limits = timeout_ms is not None and not os.environ.get("STEPAF_START_TIMEOUT", "").strip()
    if limits:
        os.environ["STEPAF_START_TIMEOUT"] = str(max(1, min(-(-timeout_ms // 1000), 604800)))
    child = None
    try:
        if scheduler == "auto" and role == "ffn" and rank == 0 and not listening(host, port):
            child = start_scheduler()
        f.init(timeout_ms=timeout_ms)
    except BaseException:
        if child is not None and not _joined():  # without this rank the scheduler would not end
            child.kill()
            child.wait()
        if limits:  # the next attempt may have another limit
            del os.environ["STEPAF_START_TIMEOUT"]
        raise


def _joined():
    """Whether this process is a node: Ctrl-C may be raised after f.init() has succeeded."""
    try:
        f.stats()
        return True
    except f.Error:
        return False


def listening(host, port):
    """Whether a process listens there. After a restart of FFN rank 0 it is the scheduler of
    the job, which keeps running."""
    try:
        socket.create_connection((host, port), 2).close()
        return True
    except OSError:
        return False


def start_scheduler():
    """Starts the scheduler of this process's cluster as a separate process in a separate
    session, so that it outlives this rank, which may be replaced."""
    env = dict(os.environ, DMLC_ROLE="scheduler", STEPMESH_BAKCEND="CPU", CUDA_VISIBLE_DEVICES="")
    for name in ("DMLC_NODE_RANK", "DMLC_RANK_OFFSET", "STEPMESH_GPU"):
        env.pop(name, None)
    home = os.path.dirname(os.path.abspath(f.f.__file__))
    return subprocess.Popen([sys.executable, "-c", SCHEDULER % [home]], env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def leave(timeout_ms=10000):
    """Leaves the cluster, together with the other ranks if they leave in time. A process can
    join only once."""
    try:
        f.stop(timeout_ms=timeout_ms)
    except (f.TimeoutError, f.ConnectionError) as e:
        log.warning("left the cluster without the other ranks: %s", e)
