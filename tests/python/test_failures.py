"""What fails while tensors are read, made and answered with, and that nothing is lost by it."""

import ctypes
import os

import arrays
import pytest
from harness import by_hand

SIZE = (64,)


def tensor(n, seed):
    return n.lib.make("uint8", SIZE, arrays.pattern(seed, "uint8", SIZE))


# respond_vec goes on when a worker is lost.

@by_hand
def vec_worker(n):
    n.f.init()
    pull = n.lib.zeros("uint8", SIZE)
    h = n.f.push_pull([tensor(n, n.rank)], [1], [pull], [1])
    n.tell("sent")
    if n.rank == 1:
        n.f.wait(h)
        assert n.lib.bytes(pull) == arrays.pattern(5, "uint8", SIZE)
        n.tell("answered")
    n.listen()


@by_hand
def vec_server(n):
    n.f.init()
    batches = n.f.get_batch()
    n.tell("got")
    with n.raises(ConnectionError, "worker 0"):
        n.f.get_batch()
    with n.raises(ConnectionError, "worker 0"):
        n.f.respond_vec(tensor(n, 5), [b[1][0] for b in batches], [b[0] for b in batches])
    n.tell("went on")
    n.listen()


def test_respond_vec_to_a_lost_worker(cluster):
    c = cluster(workers=2)
    workers, (server,) = c.start(vec_worker, vec_server)
    assert [p.hear() for p in workers] == ["sent", "sent"]
    assert server.hear() == "got"
    workers[0].kill()
    assert server.hear() == "went on"
    assert workers[1].hear() == "answered"
    for p in (workers[1], server):
        p.tell("end")
        assert p.wait(20) == 0, p.report()
