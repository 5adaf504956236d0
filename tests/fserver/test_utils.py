"""Common parts of the test programs: tensor keys, the device, and a node's life."""

import argparse
import os
import sys

import torch
import fserver_lib as f

PULL = 1 << 24  # a pull key is the push key of the same tensor plus this


def gen_push_key(private_key: int, microbatch: int = 0, worker_rank: int = -1) -> int:
    """The key of one tensor: private_key in bits 0 to 7, microbatch in 8 to 15,
    the rank of the worker's node in 16 to 23.

    worker_rank -1 is DMLC_NODE_RANK, or 0 without it. Numbers that do not fit
    raise AssertionError: they would be another tensor's key.
    """
    if worker_rank == -1:
        worker_rank = int(os.environ.get("DMLC_NODE_RANK") or 0)
    assert 0 <= private_key < 256, f"private_key {private_key}: want 0 to 255"
    assert 0 <= microbatch < 256, f"microbatch {microbatch}: want 0 to 255"
    assert 0 <= worker_rank < 256, f"worker_rank {worker_rank}: want 0 to 255"
    return private_key + (microbatch << 8) + (worker_rank << 16)


def gen_pull_key(private_key: int, microbatch: int = 0, worker_rank: int = -1) -> int:
    """The key under which a worker pulls; see gen_push_key."""
    return gen_push_key(private_key, microbatch, worker_rank) + PULL


def get_worker_rank(key: int) -> int:
    """The rank of the worker's node in a key of gen_push_key or gen_pull_key."""
    return key >> 16 & 0xFF


def device() -> torch.device:
    """Where the tensors of this process live: its GPU if there is one and the
    backend is not the CPU."""
    if not torch.cuda.is_available() or os.environ.get("STEPMESH_BAKCEND") == "CPU":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("STEPMESH_GPU") or 0))


def iterations(default: int) -> int:
    """BENCHMARK_ITER, or the program's own number. 0 is endless."""
    return int(os.environ.get("BENCHMARK_ITER") or default)


def rounds(count: int):
    """The numbers from 0 below count, or all if it is 0."""
    i = 0
    while count == 0 or i < count:
        yield i
        i += 1


def num_servers() -> int:
    return int(os.environ["DMLC_NUM_SERVER"])


def arguments() -> None:
    """Reads the command line of a program without options. Arguments that are not options
    are ignored, as the original's programs ignore them."""
    p = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, epilog="DMLC_ROLE says which part the process plays; the scripts of tests/fserver start a cluster.")
    p.add_argument("ignored", nargs="*", help=argparse.SUPPRESS)
    p.parse_args()


def main(worker, server) -> None:
    """Runs worker or server, depending on DMLC_ROLE, between init and stop.

    A check that fails leaves at once: stop would wait for the other nodes, which may
    wait for this one.
    """
    role = os.environ.get("DMLC_ROLE")
    if role not in ("scheduler", "server", "worker"):
        sys.exit(f"DMLC_ROLE={role}: want scheduler, server or worker")
    f.init()
    if role == "server":
        server()
    elif role == "worker":
        worker()
    f.stop()
