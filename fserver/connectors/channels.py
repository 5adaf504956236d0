"""Micro-batches that the CUDA streams of both sides exchange, so that no CPU waits for a layer.

A channel is a prepared exchange in streams (prepare_streams) with one peer, for one stage and
up to a power of two of rows, with buffers of its own. Both sides make it at its first use:
the FFN side knows the rows of a step from the control message, and the calls of both sides
have the same order.
"""

import collections
import threading
import time

import torch

import fserver_lib as f

# Micro-batches whose receives a CPU queues before the device has done the first. A CPU that waits earlier launches kernels too late. The
# device's queue, which is limited, must hold the kernels of so many layers.
AHEAD = 4


def stream_host(device):
    """Returns an identifier of the host if CUDA streams on this device can exchange with other processes there, else ""."""
    if device.type != "cuda" or not hasattr(f, "prepare_streams"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def capturing(device):
    """Whether a CUDA graph is being captured in the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Channel:
    """Buffers for the rows of one peer, and their exchange."""

    def __init__(self, inputs, output, exchange):
        self.inputs, self.output, self.exchange = inputs, output, exchange
        self._rows, self._views = None, None

    def first(self, rows):
        """Returns views of the first rows of inputs and output. The number of rows seldom changes, and making views takes time."""
        if rows != self._rows:
            self._rows, self._views = rows, ([t[:rows] for t in self.inputs], self.output[:rows])
        return self._views


class Channels:
    """The channels of one rank. width and out_dtype are those of the answers; keys(peer, stage, most, tensors) gives the
    keys of a channel for `most` rows."""

    def __init__(self, device, width, out_dtype, timeout_ms, keys):
        self.device, self.width, self.out_dtype, self.timeout_ms = device, width, out_dtype, timeout_ms
        self.keys = keys
        self._all = {}  # by peer, stage, dtypes and shapes, and rows
        self._captured = set()  # those in CUDA graphs, whose replays use them also after close()
        self.ended = 0  # how often close() has ended the channels
        self._queued = collections.deque()  # (event recorded after a micro-batch's receives, its channels), oldest first
        self._events = []  # for later ones

    def get(self, peer, stage, like, rows):
        """Returns the channel of a peer and a stage for tensors like those, and so many rows. The first call waits until
        the peer makes the same call."""
        most = 1 << max(rows - 1, 0).bit_length()
        name = peer, stage, like, most
        channel = self._all.get(name)
        if channel is None:
            if capturing(self.device):
                raise f.ValueError("stage %d: a CUDA graph is captured with %d rows for rank %d, which were not exchanged before: run the step once, then capture it" % (stage, rows, peer))
            self.settle()  # the driver maps no memory while a stream waits
            keys = self.keys(peer, stage, most, len(like))
            inputs = [torch.empty((most,) + shape, dtype=dtype, device=self.device) for dtype, shape in like]
            output = torch.empty((most, self.width), dtype=self.out_dtype, device=self.device)
            exchange = f.prepare_streams(inputs, keys, [output], keys[:1], peers=[peer], timeout_ms=self.timeout_ms, round_timeout_ms=self.timeout_ms)
            channel = self._all[name] = Channel(inputs, output, exchange)
        return channel

    def receive(self, channels):
        """Queues the receives of a micro-batch. Waits if too many are queued: in the default stream a full queue blocks the
        whole process."""
        for channel in channels:
            channel.exchange.receive()
        if capturing(self.device):
            self._captured.update(channels)
            return
        self._queued.append((self._event(), channels))
        while len(self._queued) > AHEAD:
            self._first()

    def _event(self):
        """Returns an event recorded after the queued work."""
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _first(self):
        """Waits for the first of the queued micro-batches. Raises if an exchange of it has ended."""
        event, channels = self._queued[0]
        begun = time.monotonic()
        while not event.query():
            for channel in channels:
                channel.exchange.check()
            time.sleep(0 if time.monotonic() < begun + 0.001 else 0.0001)
        self._queued.popleft()
        self._events.append(event)

    def settle(self):
        """Waits for all queued receives, and replays. Raises if one of the exchanges has ended: what was received may then be
        wrong. In a capture nothing is waited for."""
        if capturing(self.device):
            return
        if self._captured:
            self._queued.append((self._event(), list(self._all.values())))
        while self._queued:
            self._first()
        self.checker()()

    def checker(self):
        """Returns a function that any thread may call after the device has done what is queued now. It raises if what was
        received may be wrong."""
        ended, channels = self.ended, list(self._all.values())

        def check():
            if self.ended != ended:
                raise f.ConnectionError("the stream exchanges of this step have ended")
            for channel in channels:
                channel.exchange.check()

        return check

    def failed(self):
        """Whether an exchange has ended."""
        try:
            self.checker()()
        except f.Error:
            return True
        return False

    def stale(self):
        """Whether a CUDA graph contains an exchange that close() has ended. Its replays copy nothing and wait for nobody."""
        return not self._captured.issubset(self._all.values())

    def close(self):
        """Ends all exchanges, also for the peers. Each waits for its peer, so all end at the same time."""
        self.ended += 1
        self._queued.clear()
        channels, self._all = self._all, {}
        threads = [threading.Thread(target=_end, args=(channel.exchange,)) for channel in channels.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _end(exchange):
    try:
        exchange.close()
    except f.Error:
        pass  # it had ended before, and its error was raised
