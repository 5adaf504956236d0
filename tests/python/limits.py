"""A plugin of pytest: every test has a limit. A test fails in two cases: its thread has waited in one place for STILL seconds, and no
process of the test wants a processor or a disk; or it has waited there for BUSY seconds times the load of the machine. The report says
where it waited, and what its processes did. A test marked pytest.mark.still(seconds) may wait for so long."""

import collections
import glob
import os
import signal
import sys
import threading
import time
import traceback

import pytest

STILL = float(os.environ.get("PYTEST_STILL", 45))  # the plugin's own test makes it shorter
BUSY = 400  # more than a cluster of the harness may take
SHARE = 0.2  # of one CPU: processes that need more are working
WINDOW = 3  # seconds for which the processes are observed
LAST = 30  # after so many seconds more the whole run ends: the thread is in C code

SIGNAL = signal.SIGRTMIN + 7


class Late(Exception):
    """A test has exceeded its limit."""


def tree(pid):
    """A process and its descendants."""
    yield pid
    for name in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(name) as f:
                children = f.read().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def wanted():
    """The seconds that all processes of the test have used a processor or waited for one, by thread."""
    times = {}
    for pid in tree(os.getpid()):
        for name in glob.glob(f"/proc/{pid}/task/*/schedstat"):
            try:
                with open(name) as f:
                    ran, waited, _ = f.read().split()
            except (OSError, ValueError):
                continue
            times[name] = (int(ran) + int(waited)) / 1e9
    return times


def states():
    """Yields process, name and state of each thread of the test's processes. A thread in state D waits for a disk."""
    for pid in tree(os.getpid()):
        for name in glob.glob(f"/proc/{pid}/task/*/stat"):
            try:
                with open(name) as f:
                    head, rest = f.read().rsplit(")", 1)
            except (OSError, ValueError):
                continue
            yield pid, head.split(" (", 1)[1], rest.split()[0]


def load():
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1)


class Watch:
    """Watches the thread that runs a test."""

    def __init__(self, thread, still):
        self.thread, self.still = thread, still
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.run, name="limit of a test", daemon=True)
        self.why = ""

    def place(self):
        frame, at = sys._current_frames().get(self.thread), []
        while frame is not None:
            at.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return at

    def run(self):
        place, since, told = None, time.monotonic(), None
        while not self.over.wait(1):
            now, here = time.monotonic(), self.place()
            if here != place:
                place, since = here, now
            if told is not None:
                if now - told > LAST:
                    self.end()
                continue
            self.why = self.judge(now - since)
            if self.why and not self.over.is_set():
                told = now
                signal.pthread_kill(self.thread, SIGNAL)

    def judge(self, waited):
        if waited < self.still:
            return ""
        if waited > BUSY * load():
            return f"it has waited in one place for {waited:.0f} s"
        before, begun, disk = wanted(), time.monotonic(), 0
        if not before:
            return ""
        for _ in range(WINDOW * 10):
            if self.over.wait(0.1):
                return ""
            disk += 0.1 * any(state == "D" for _, _, state in states())
        demand = sum(t - before.get(name, 0) for name, t in wanted().items())
        if demand + disk > SHARE * (time.monotonic() - begun):
            return ""
        threads = collections.Counter(f"{pid} {program} {state}" for pid, program, state in states() if pid != os.getpid())
        return (f"it has waited in one place for {waited:.0f} s, and its processes want {demand:.2f} s of processor time and {disk:.1f} s of a disk in {WINDOW} s"
                f"; threads of its children by process, name and state: {dict(threads)}")

    def end(self):
        """Ends the run: the thread does not take the signal."""
        frame = sys._current_frames().get(self.thread)
        sys.__stderr__.write(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {self.why}, in code that takes no signal:\n")
        traceback.print_stack(frame, file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(1)


def limited(item):
    """Runs a part of a test with a limit."""
    if threading.current_thread() is not threading.main_thread() or item.config.getoption("usepdb"):
        return (yield)
    marker = item.get_closest_marker("still")
    watch = Watch(threading.get_ident(), marker.args[0] if marker else STILL)

    def late(*_):
        raise Late(watch.why)

    before = signal.signal(SIGNAL, late)
    watch.watcher.start()
    try:
        return (yield)
    finally:
        watch.over.set()
        watch.watcher.join(10)
        signal.signal(SIGNAL, before if before is not None else signal.SIG_DFL)


def pytest_configure(config):
    config.addinivalue_line("markers", "still(seconds): how long the test may wait in one place without a processor")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    return (yield from limited(item))
