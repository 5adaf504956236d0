"""Runs a cluster of three processes on the fserver_lib that is installed, and looks
at the libraries that each has loaded. See wheel_check.sh.

With the argument "hidden", libzmq of the system must be unusable.
"""

import ctypes
import os
import socket
import subprocess
import sys


def node():
    import numpy as np

    import fserver

    fserver.init()
    role = os.environ["DMLC_ROLE"]
    if role == "worker":
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        y = np.zeros_like(x)
        fserver.wait(fserver.push_pull([x], [1], [y], [2]))
        assert (y == 2 * x).all(), y
    elif role == "server":
        for handler, tensors, _ in fserver.get_batch():
            fserver.respond([2 * np.from_dlpack(tensors[0])], handler)
    fserver.stop()
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}  # paths may have blanks
    zmq = [p for p in loaded if "zmq" in os.path.basename(p)]
    assert zmq and all(p.startswith(sys.prefix) for p in zmq), "libzmq is %s, want the wheel's" % zmq
    print("wheel: %s: %s" % (role, ", ".join(map(os.path.basename, zmq))), flush=True)


def main():
    if sys.argv[1:] == ["hidden"]:
        try:
            ctypes.CDLL("libzmq.so.5")
        except OSError as e:
            print("wheel: libzmq of the system: %s" % e)
        else:
            sys.exit("libzmq of the system is not hidden")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_ENABLE_RDMA": "zmq",
        "STEPAF_START_TIMEOUT": "60",
    }
    nodes = [
        subprocess.Popen([sys.executable, __file__, "node"], env=dict(os.environ, **shared, DMLC_ROLE=role))
        for role in ("scheduler", "server", "worker")
    ]
    if any([n.wait() for n in nodes]):
        sys.exit("wheel: a node failed")
    print("wheel: works")


if __name__ == "__main__":
    node() if sys.argv[1:] == ["node"] else main()
