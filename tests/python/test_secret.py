"""The secret of a cluster: a file that all nodes read, and invalid files."""

import os
import time

import pytest
from harness import by_hand

OWN, OTHER = "correct horse battery staple", "tr0ub4dor&3 tr0ub4dor&3"


def write(path, text, mode=0o600):
    path.write_text(text + "\n")
    path.chmod(mode)
    return str(path)


def worker(n):
    push, pull = [n.lib.make("uint8", (1000,), bytes(range(250)) * 4)], [n.lib.zeros("uint8", (1000,))]
    n.f.wait(n.f.push_pull(push, [1], pull, [1]))
    assert n.lib.bytes(pull[0]) == n.lib.bytes(push[0])


def server(n):
    for handler, tensors, keys in n.f.get_batch():
        n.f.respond(tensors, handler)


@pytest.mark.parametrize("ipc", ["0", "1"])
def test_file(cluster, tmp_path, ipc):
    """A cluster whose nodes read one file, over TCP and through shared memory."""
    env = {"STEPAF_SECRET_FILE": write(tmp_path / "secret", OWN), "BYTEPS_ENABLE_IPC": ipc}
    cluster(env=env).run(worker, server)


def test_variable(cluster):
    cluster(env={"STEPAF_SECRET": OWN}).run(worker, server)


@by_hand
def refused(n):
    began = time.monotonic()
    with n.raises((), "secret") as e:
        n.f.init(timeout_ms=4000)
    n.tell([time.monotonic() - began, str(e.error)])


@pytest.mark.parametrize("env", [{"STEPAF_SECRET": OTHER}, {}])
def test_another_secret(cluster, env):
    """A node with another secret, or none, says so within its limit of 4 s, and shows no secret."""
    c = cluster()
    c.spawn("scheduler", refused, env={"STEPAF_SECRET": OWN})
    p = c.spawn("worker", refused, env=env)
    assert p.wait() == 0, p.report()
    took, text = p.hear()
    assert took < 5 and OWN not in text and OTHER not in text, text


@by_hand
def bad_files(n):
    for setting, words in n.args:
        os.environ.update(setting)
        with n.raises(ValueError, *words):
            n.f.init()
        for name in setting:
            del os.environ[name]


def test_bad_files(cluster, tmp_path):
    """A file that a node must not read is a ValueError that names the variable, the file, and the reason."""
    def file(name, text, mode=0o600):
        return {"STEPAF_SECRET_FILE": write(tmp_path / name, text, mode)}

    cases = [
        (file("readable", OWN, 0o644), ["STEPAF_SECRET_FILE", str(tmp_path / "readable"), "mode 0644", "chmod 600"]),
        (file("empty", ""), ["STEPAF_SECRET_FILE", str(tmp_path / "empty"), "0 bytes", "16 to 4096 bytes"]),
        (file("short", "hunter2"), ["STEPAF_SECRET_FILE", "7 bytes", "stepaf secret"]),
        ({"STEPAF_SECRET_FILE": str(tmp_path)}, ["STEPAF_SECRET_FILE", str(tmp_path), "a directory"]),
        ({"STEPAF_SECRET_FILE": str(tmp_path / "none")}, ["STEPAF_SECRET_FILE", str(tmp_path / "none"), "no such file"]),
        ({"STEPAF_SECRET": "hunter2"}, ["STEPAF_SECRET", "(set)", "7 bytes"]),
        ({"STEPAF_AUTH": "require"}, ["STEPAF_AUTH", "no secret is set"]),
        ({**file("good", OWN), "STEPAF_SECRET": OWN}, ["STEPAF_SECRET_FILE", "STEPAF_SECRET is set too"]),
    ]
    p = cluster().spawn("worker", bad_files, args=cases)
    assert p.wait() == 0, p.report()
    assert "hunter2" not in p.report() and OWN not in p.report()
