"""How a process of an engine joins the cluster, and leaves it."""

import logging
import os
import socket
import subprocess
import sys

import fserver as f

log = logging.getLogger("fserver.connectors")

ROLES = {"attention": "worker", "ffn": "server"}

# The scheduler's process: it introduces the nodes to each other, and ends with the last.
SCHEDULER = "import sys; sys.path[:0] = %r\nimport fserver_lib as f\nf.init()\nf.stop()\n"


def environment(role, rank, attention, ffn, host, port, device=0, transport=None):
    """The variables with which a rank of an engine joins, as a dict. Each rank is a node
    of its own (groups of one), so that any number of them may be on either side."""
    if role not in ROLES:
        raise ValueError("role is %r, want one of %s" % (role, ", ".join(map(repr, ROLES))))
    count = attention if role == "attention" else ffn
    if not 0 <= rank < count:
        raise ValueError("there is no %s rank %d, want 0 to %d" % (role, rank, count - 1))
    if not host:
        raise ValueError("host is empty, want the address of FFN rank 0")
    if not 0 < port < 65536:
        raise ValueError("port is %d, want 1 to 65535" % port)
    env = {
        "DMLC_ROLE": ROLES[role], "DMLC_NODE_RANK": str(rank), "DMLC_GROUP_SIZE": "1",
        "DMLC_NUM_WORKER": str(attention), "DMLC_NUM_SERVER": str(ffn),
        "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port),
        # A group of one on device k would have rank k otherwise.
        "STEPMESH_GPU": str(device), "DMLC_RANK_OFFSET": str(-device),
    }
    if transport:
        env["DMLC_ENABLE_RDMA"] = transport
    if host.startswith("127.") and not os.environ.get("DMLC_NODE_HOST"):
        env["DMLC_NODE_HOST"] = host  # a cluster within one machine
    return env


def join(role, rank, attention, ffn, host="127.0.0.1", port=8123, device=0, transport=None, scheduler="auto", timeout_ms=None):
    """Makes this process attention or FFN rank `rank`, and returns when all are there; one
    that comes in the place of a lost rank, when it has that rank's place.

    host and port are the scheduler's. With scheduler="auto" FFN rank 0 starts it, unless
    one listens there, so host is then an address of its machine; with "no" nobody does.
    timeout_ms is how long the others may take; STEPAF_START_TIMEOUT is set to that, too,
    unless it is set already, since each node and the scheduler keep to it.
    """
    os.environ.update(environment(role, rank, attention, ffn, host, port, device, transport))
    if scheduler not in ("auto", "no"):
        raise ValueError("scheduler is %r, want 'auto' or 'no'" % (scheduler,))
    limits = timeout_ms is not None and not os.environ.get("STEPAF_START_TIMEOUT", "").strip()
    if limits:
        os.environ["STEPAF_START_TIMEOUT"] = str(max(1, min(-(-timeout_ms // 1000), 604800)))
    child = None
    if scheduler == "auto" and role == "ffn" and rank == 0 and not listening(host, port):
        child = start_scheduler()
    try:
        f.init(timeout_ms=timeout_ms)
    except BaseException:
        if child is not None:  # without this rank nobody would end it
            child.kill()
            child.wait()
        if limits:  # the next attempt may have another limit
            del os.environ["STEPAF_START_TIMEOUT"]
        raise


def listening(host, port):
    """Whether somebody listens there: when FFN rank 0 was restarted, the scheduler of the
    job, which outlives it."""
    try:
        socket.create_connection((host, port), 2).close()
        return True
    except OSError:
        return False


def start_scheduler():
    """Starts the scheduler of this process's cluster as a process of its own, in a session
    of its own, so that it outlives this rank, which may be replaced."""
    env = dict(os.environ, DMLC_ROLE="scheduler", STEPMESH_BAKCEND="CPU", CUDA_VISIBLE_DEVICES="")
    for name in ("DMLC_NODE_RANK", "DMLC_RANK_OFFSET", "STEPMESH_GPU"):
        env.pop(name, None)
    home = os.path.dirname(os.path.abspath(f.f.__file__))
    return subprocess.Popen([sys.executable, "-c", SCHEDULER % [home]], env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def leave(timeout_ms=10000):
    """Leaves the cluster, together with the others if they come in time. A process can
    join once only."""
    try:
        f.stop(timeout_ms=timeout_ms)
    except (f.TimeoutError, f.ConnectionError) as e:
        log.warning("left without the others: %s", e)
