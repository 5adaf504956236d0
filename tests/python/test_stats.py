"""stats(), and path of prepared exchanges: the paths to the peers with their reasons, requests in flight, counters, and lost peers."""

import time

import pytest
from harness import by_hand, scheduler, within

SIZE = (1000,)
UNUSED = "the first data to the peer chooses it"


def peers(n):
    """The peers by name without the id."""
    return {p["node"].split(" (")[0]: p for p in n.f.stats()["peers"]}


def exchange(n):
    h = n.f.push_pull([n.lib.zeros("uint8", SIZE)], [1], [n.lib.zeros("uint8", SIZE)], [2])
    flying = n.f.stats()
    assert [a["in_flight"] for a in flying["apps"] if a["in_flight"]] == [1]
    n.f.wait(h)


def path_worker(n):
    path, why = n.args
    before = peers(n)
    assert sorted(before) == ["scheduler", "server 0", "worker %d" % (1 - n.rank)], before
    assert before["server 0"]["id"] == 8 and before["server 0"]["lost"] is None
    assert before["server 0"]["path"] == ("zmq" if path == "zmq" else "")
    assert before["server 0"]["why"] == (why if path == "zmq" else UNUSED)
    assert before["scheduler"]["path"] == before["scheduler"]["why"] == ""
    x = n.f.prepare([n.lib.zeros("uint8", SIZE)], [1], [], [])
    assert x.path == "messages: server 0: " + ("zmq" if path == "zmq" else "none (%s)" % UNUSED)
    exchange(n)
    assert x.path == "messages: server 0: " + path
    after = n.f.stats()
    assert after["node"].startswith("worker %d" % n.rank) and after["id"] == 9 + 2 * n.rank
    server = peers(n)["server 0"]
    assert (server["path"], server["why"]) == (path, why)
    moved = after["counters"]["transport"]
    assert moved["sent_bytes"] >= SIZE[0] and moved["received_bytes"] >= SIZE[0], moved
    assert after["counters"]["late_answers"] == 0


def path_server(n):
    for handler, _, _ in n.f.get_batch():
        n.f.respond([n.lib.zeros("uint8", SIZE)], handler)
    path, why = n.args
    assert {(p["path"], p["why"]) for node, p in peers(n).items() if "worker" in node} == {(path, why)}


@pytest.mark.parametrize("env,path,why", [
    ({}, "shared memory", ""),
    ({"BYTEPS_ENABLE_IPC": "0"}, "tcp", ""),
    ({"BYTEPS_ENABLE_IPC": "0", "STEPAF_DATA": "zmq"}, "zmq", ""),
], ids=["memory", "tcp", "zmq"])
def test_paths(cluster, env, path, why):
    cluster(workers=2, env=env).run(path_worker, path_server, (path, why))


NOT_SHARED = "not over shared memory: the peer offers none: it is a C++ node, or has BYTEPS_ENABLE_IPC=0"
NOT_TCP = "not over tcp: the peer has no port for data: it is a C++ node, or has STEPAF_DATA=zmq"


def reason_worker(n):
    exchange(n)
    server = peers(n)["server 0"]
    assert (server["path"], server["why"]) == tuple(n.args), server
    x = n.f.prepare([n.lib.zeros("uint8", SIZE)], [1], [], [])
    assert x.path == "messages: server 0: %s (%s)" % tuple(n.args)
    x.close()
    with pytest.raises(AttributeError):
        x.path = ""
    n.f.stop()
    assert x.path.startswith("messages: server 0: ")


def reason_server(n):
    for handler, _, _ in n.f.get_batch():
        n.f.respond([n.lib.zeros("uint8", SIZE)], handler)


@pytest.mark.parametrize("env,path,why", [
    ({"BYTEPS_ENABLE_IPC": "0"}, "tcp", NOT_SHARED),
    ({"BYTEPS_ENABLE_IPC": "0", "STEPAF_DATA": "zmq"}, "zmq", NOT_SHARED + "; " + NOT_TCP),
], ids=["tcp", "zmq"])
def test_reasons(cluster, env, path, why):
    """The server alone has these variables."""
    c = cluster()
    c.spawn("scheduler", scheduler)
    c.spawn("worker", reason_worker, args=(path, why))
    c.spawn("server", reason_server, env=env)
    c.finish()


@by_hand
def left_behind(n):
    n.f.init()
    exchange(n)
    n.tell("done")
    end = time.monotonic() + within(60)
    while peers(n)["server 0"]["lost"] is None and time.monotonic() < end:
        time.sleep(0.02)
    assert "connection" in peers(n)["server 0"]["lost"]
    with n.raises(n.f.ConnectionError, "server 0"):
        n.f.stop(timeout_ms=int(within(60) * 1000))  # fails when STEPAF_REPLACE_TIMEOUT is over
    with n.raises(n.f.Error, "stop"):
        n.f.stats()


def test_lost_peer(cluster):
    """stats() names the reason of a loss. After stop() it raises."""
    c = cluster(env={"STEPAF_REPLACE_TIMEOUT": "1"})
    (worker,), (server,) = c.start(left_behind, reason_server)
    assert worker.hear() == "done"
    server.kill()
    assert worker.wait() == 0, worker.report()
