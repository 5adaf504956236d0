"""Nodes that are copies (fork) of one process, like those of multiprocessing: nothing that
tells them apart may come from the state that a process gets when its program begins."""

import numpy as np


def worker(n):
    x, y = np.full(64, n.args, np.uint8), np.zeros(64, np.uint8)
    handler = n.f.push_pull([x], [1], [y], [2])
    n.tell("pushed")
    n.f.wait(handler, 20_000)
    assert (y == n.args).all(), f"pushed {n.args}, got {y}"


def server(n):
    held = n.f.get_batch(any=True)
    n.tell("held")
    n.listen()
    while True:
        for handler, tensors, _ in held:
            answer = np.array(np.from_dlpack(tensors[0]))
            n.f.respond([answer], handler).wait(20_000)
            if answer[0] == 100:
                return
        held = n.f.get_batch(any=True)


def test_a_copy_replaces_a_copy(cluster):
    c = cluster(lib="", copies="json")
    (first,), (held,) = c.start(worker, server, args=7)
    assert first.hear() == "pushed" and held.hear() == "held"
    first.kill()
    c.processes.remove(first)
    assert c.spawn("worker", worker, args=100).hear() == "pushed"
    held.tell("answer")
    c.finish()
