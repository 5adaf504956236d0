"""The two sides of an exchange between attention and FFN processes.

An attention rank sends the hidden states of a micro-batch, any number of rows, and further
tensors with the same number of rows (routing, scales). It receives the same number of rows.
Each micro-batch ("stage") has buffers of its own, for the largest batch, and prepared
exchanges of these buffers, so a round needs no setup. Keys contain rank, stage and layer of
a tensor, so no header is sent, and nothing is read back from a device: shapes give the rows.

At first both sides exchange a handshake with their configurations. A difference is an error
that names both.

With streams=True on both sides, and all ranks of an FFN rank on GPUs of one host, CUDA streams
exchange the micro-batches (see channels.py): send, recv and respond only queue work, and the
FFN side needs the rows of each step (expect). If a rank is lost, the step fails.
"""

import collections
import ctypes
import json
import logging
import os
import socket
import time

import torch

import fserver_lib as f

from . import channels, layout

VERSION = 5  # of the protocol between the two sides
DATA, CONTROL, HELLO, CANCEL, QUEUED = 1, 2, 3, 4, 5
TEXT = 2048  # bytes of the answer to a handshake
STAGES, LAYERS, FORMS, TENSORS = 256, 1 << 16, 16, 16


class Mismatch(f.ValueError):
    """The configurations or the counts of the two sides differ."""


def _key(kind, rank, stage=0, layer=0, index=0):
    return kind << 48 | rank << 32 | layer << 16 | stage << 8 | index


def _parse(key):
    """Returns kind, rank, stage and layer of a key."""
    return key >> 48, key >> 32 & 0xFFFF, key >> 8 & 0xFF, key >> 16 & 0xFFFF


def _count(name, value, most):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("%s is %r, want an int" % (name, value))
    if not 1 <= value <= most:
        raise ValueError("%s is %d, want 1 to %d" % (name, value, most))
    return value


def _raw(t):
    """Returns t, or a view of its bytes if PyTorch cannot copy or join the dtype (fp8, packed)."""
    if t.element_size() == 1 and t.dtype not in (torch.uint8, torch.int8, torch.bool):
        return t.view(torch.uint8)
    return t


def _bytes(t):
    """Returns the contents of a tensor of bytes."""
    t = t.cpu().contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel())


def _of_bytes(data):
    """Returns a tensor of bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _dtype_name(dtype):
    return str(dtype).replace("torch.", "")


def _left(end):
    return None if end is None else max(int((end - time.monotonic()) * 1000), 1)


class _Side:
    """The common part of both sides: identity, and the configuration that both must agree on."""

    def __init__(self, role, rank, attention, ffn, width, dtype, out_dtype, stages, layers, device, timeout_ms, streams):
        peers = layout.servers_of if role == "attention" else layout.workers_of
        self.peers = peers(rank, attention, ffn)
        self.role, self.rank, self.attention, self.ffn = role, rank, attention, ffn
        self.width = _count("width", width, 1 << 31)
        self.stages = _count("stages", stages, STAGES)
        self.layers = _count("layers", layers, LAYERS)
        self.dtype, self.out_dtype = dtype, dtype if out_dtype is None else out_dtype
        for name, value in (("dtype", self.dtype), ("out_dtype", self.out_dtype)):
            if not isinstance(value, torch.dtype):
                raise TypeError("%s is %r, want a torch.dtype" % (name, value))
        self.device = torch.device(device)
        self.timeout_ms = timeout_ms if timeout_ms is None else _count("timeout_ms", timeout_ms, 1 << 40)
        self.stream_host = channels.stream_host(self.device) if streams else ""
        self.no_streams = "" if self.stream_host else "%s: %s" % (self, "its tensors are on %s, which cannot exchange in streams" % self.device if streams else "streams is off")
        self.path = ""  # how micro-batches are exchanged, once the ranks have agreed: streams, or messages and why not streams
        self._channels = channels.Channels(self.device, self.width, self.out_dtype, timeout_ms, self._keys)

    def _keys(self, peer, stage, most, tensors):
        rank = self.rank if self.role == "attention" else peer
        return [_key(QUEUED, rank, stage, most.bit_length(), (tensors - 1) * TENSORS + i) for i in range(tensors)]

    def __str__(self):
        return "%s %d" % (self.role, self.rank)

    def _agreed(self, no_streams):
        self.path = "messages, not streams: " + no_streams if no_streams else "streams"
        logging.getLogger(__name__).info("%s: micro-batches go in %s", self, self.path)

    def _hello(self):
        return {
            "version": VERSION, "attention": self.attention, "ffn": self.ffn, "width": self.width,
            "dtype": _dtype_name(self.dtype), "out_dtype": _dtype_name(self.out_dtype),
            "stages": self.stages, "layers": self.layers,
        }

    def _index(self, name, value, count):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError("%s: %s is %r, want an int" % (self, name, value))
        if not 0 <= value < count:
            raise ValueError("%s: there is no %s %d, want 0 to %d" % (self, name, value, count - 1))

    def _stage(self, stage):
        self._index("stage", stage, self.stages)


class _Form:
    """Buffers of a stage for tensors of certain shapes, and their exchanges."""

    def __init__(self, index, inputs, outputs):
        self.index = index
        self.inputs, self.outputs = inputs, outputs  # inputs and one output for each server
        self.exchanges = {}  # by layer: one for each server


class _Round:
    """A micro-batch under way."""

    def __init__(self, form, layer, rows, exchanges):
        self.form, self.layer, self.rows, self.exchanges = form, layer, rows, exchanges
        self.started = [False] * len(exchanges)


class _Queued:
    """A micro-batch under way in streams: channels, and the rows of each."""

    def __init__(self, layer, parts):
        self.layer, self.parts = layer, parts
        self.rows = [rows for _, rows in parts]


class Attention(_Side):
    """The attention side: sends a micro-batch, and receives the result of the FFN side.

    Rank `rank` of `attention` ranks exchanges with self.peers, some of `ffn` ranks. width and
    dtype are those of the hidden states, out_dtype is that of the answer (the same by
    default), max_rows is the largest batch. layers is for engines whose FFN side needs the
    layer (Batch.layer); other engines leave it at 1.

    If an FFN rank is lost, its round is sent again to a replacement process that joins within
    replace_ms; with 0, recv raises ConnectionError. The default is 30000 with layers above 1.
    With layers=1 a round is not sent again, since the new process does not know its layer:
    recv raises ConnectionError, and the engine begins a new step.
    """

    def __init__(self, rank, attention, ffn, *, width, dtype, max_rows, stages=1, layers=1, out_dtype=None, device="cpu", timeout_ms=15000, replace_ms=None, streams=False):
        super().__init__("attention", rank, attention, ffn, width, dtype, out_dtype, stages, layers, device, timeout_ms, streams)
        self.max_rows = _count("max_rows", max_rows, 1 << 31)
        self.replace_ms = (30000 if self.layers > 1 else 0) if replace_ms is None else replace_ms
        self._forms = {}  # by stage, then by the further tensors
        self._rounds = {}  # by stage: the round under way
        self._control = []  # indices of self.peers and handlers of the latest control message
        self._latest = None  # its bytes, which a replacement gets with the handshake
        self._canceled = {}  # by stage whose round failed: {index of peer: handler of CANCEL}
        self._lost = set()  # indices of peers that need another handshake before they get a round
        self._greeted = False
        self.streams = False  # whether CUDA streams exchange the micro-batches; the FFN side decides
        self.deferred = False  # the engine calls checker for each step, so recv of the last layer need not wait for the device
        self._done = {}  # with streams: the last layer that each stage has received in this step
        self._greet()

    # The handshake.

    def _who(self, again):
        text = dict(self._hello(), who="%s at %s, pid %d" % (self, socket.gethostname(), os.getpid()), again=again, stream_host=self.stream_host, no_streams=self.no_streams)
        if again and self._latest is not None and not self.streams:  # with streams a replacement begins with a new step
            text["control"] = self._latest.decode("latin-1")
        return _of_bytes(json.dumps(text).encode())

    def _greet(self):
        self._replies = [torch.zeros(TEXT, dtype=torch.uint8) for _ in self.peers]
        key = _key(HELLO, self.rank)
        self._greeting = f.push_pull([self._who(False)], [key], self._replies, [key] * len(self.peers), servers=self.peers)

    def check(self, timeout_ms=None):
        """Waits for the handshake with the FFN ranks. Raises Mismatch if configurations differ.
        The first send calls it, too."""
        if self._greeted:
            return
        end = time.monotonic() + self.replace_ms / 1000
        while True:
            old = self._greeting is not None  # its limit counts from its start
            try:
                if not old:
                    self._greet()
                f.wait(self._greeting, timeout_ms=self.timeout_ms if timeout_ms is None else timeout_ms)
                break
            except f.ConnectionError:
                self._greeting = None
                if time.monotonic() >= end:
                    raise
                time.sleep(0.05)  # a message about the replacement may be in flight
            except f.TimeoutError:
                self._greeting = None
                if not old:
                    raise
            except BaseException:
                self._greeting = None  # there are no replies
                raise
        reasons = [_compared(reply) for reply in self._replies]
        answers = [not reason for reason in reasons]
        if any(answers) != all(answers):
            raise Mismatch("%s: some of ffn %s are on its host, others are not: set streams=False on all sides" % (self, _list(self.peers)))
        self.streams, self._greeted = all(answers), True
        self._agreed(reasons[0])

    def _compare(self, i, timeout_ms):
        """Repeats the handshake with the replacement of a lost peer."""
        if i not in self._lost:
            return
        reply, key = torch.zeros(TEXT, dtype=torch.uint8), _key(HELLO, self.rank)
        f.wait(f.push_pull([self._who(True)], [key], [reply], [key], servers=[self.peers[i]]), timeout_ms=timeout_ms)
        if bool(_compared(reply)) == self.streams:
            raise Mismatch("%s: the replacement of ffn %d and the former process do not both exchange in streams: set the same streams on all sides" % (self, self.peers[i]))
        self._lost.discard(i)

    # A micro-batch.

    def _tensors(self, tensors):
        """Checks the arguments of send. Returns the tensors as a list, and the rows."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not 1 <= len(tensors) <= TENSORS:
            raise ValueError("%s: %d tensors to send, want 1 to %d" % (self, len(tensors), TENSORS))
        for i, t in enumerate(tensors):
            if not isinstance(t, torch.Tensor) or t.dim() == 0:
                raise TypeError("%s: tensor %d is %s, want a torch.Tensor with a row for each token" % (self, i, type(t).__name__))
            if t.device.type != self.device.type or None not in (t.device.index, self.device.index) and t.device != self.device:
                raise ValueError("%s: tensor %d is on %s, want %s, the device of this side" % (self, i, t.device, self.device))
            if t.shape[0] != tensors[0].shape[0]:
                raise ValueError("%s: tensor %d has %d rows, tensor 0 has %d, want the same" % (self, i, t.shape[0], tensors[0].shape[0]))
        x, rows = tensors[0], tensors[0].shape[0]
        if x.dim() != 2 or x.shape[1] != self.width or x.dtype != self.dtype:
            raise ValueError("%s: the hidden states are %s of shape %s, want %s and %d columns" % (
                self, _dtype_name(x.dtype), tuple(x.shape), _dtype_name(self.dtype), self.width))
        if rows > self.max_rows:
            raise ValueError("%s: %d rows, want at most max_rows, %d" % (self, rows, self.max_rows))
        return tensors, rows

    def _form(self, stage, tensors):
        like = tuple((t.dtype, tuple(t.shape[1:])) for t in tensors)
        forms = self._forms.setdefault(stage, {})
        form = forms.get(like)
        if form is None:
            if len(forms) == FORMS:
                raise ValueError("%s: stage %d: more than %d combinations of dtypes and shapes" % (self, stage, FORMS))
            most = -(-self.max_rows // len(self.peers))  # most rows of one server
            make = lambda dtype, shape: torch.empty((most,) + shape, dtype=dtype, device=self.device)
            form = forms[like] = _Form(len(forms), [[make(*one) for one in like] for _ in self.peers],
                                       [make(self.out_dtype, (self.width,)) for _ in self.peers])
        return form

    def _exchanges(self, form, stage, layer):
        made = form.exchanges.get(layer)
        if made is None:
            made = []
            for server, inputs, output in zip(self.peers, form.inputs, form.outputs):
                keys = [_key(DATA, self.rank, stage, layer, form.index * TENSORS + i) for i in range(len(inputs))]
                made.append(f.prepare(inputs, keys, [output], keys[:1], servers=[server]))
            form.exchanges[layer] = made  # after an error in the loop, the next call makes all of them
        return made

    def send(self, stage, tensors, layer=0):
        """Sends a micro-batch: the hidden states, or a list of them and of further tensors
        with the same number of rows; 0 rows are allowed. The tensors are copied on the
        current stream, so the caller may change them. Then call recv."""
        self._stage(stage)
        self._index("layer", layer, self.layers)
        if stage in self._rounds:
            raise ValueError("%s: stage %d is under way (layer %d), want recv(%d) first" % (self, stage, self._rounds[stage].layer, stage))
        tensors, rows = self._tensors(tensors)
        self.check()
        if self.streams:
            return self._queue(stage, tensors, rows, layer)
        self._await_cancel(stage)
        form = self._form(stage, tensors)
        round_ = _Round(form, layer, [b - a for a, b in self._parts(rows)], self._exchanges(form, stage, layer))
        for inputs, (begin, end) in zip(form.inputs, self._parts(rows)):
            if begin < end:
                for buffer, t in zip(inputs, tensors):
                    _raw(buffer[:end - begin]).copy_(_raw(t[begin:end]))
        self._rounds[stage] = round_
        try:
            for i in range(len(self.peers)):
                try:
                    if i not in self._lost:  # for a lost peer recv repeats the handshake first
                        self._start(round_, i)
                except f.ConnectionError:
                    self._lost.add(i)  # recv starts it again, or raises the error
        except BaseException:
            del self._rounds[stage]
            self._cancel(stage, round_)
            raise

    def under_way(self, stage):
        """Whether the stage has a round whose answer recv has not returned."""
        return stage in self._rounds

    def _queue(self, stage, tensors, rows, layer):
        """Queues a send in the current stream."""
        try:
            if self._lost:
                raise f.ConnectionError("%s: stage %d, layer %d: ffn %s failed in this step" % (self, stage, layer, _list(self.peers[i] for i in sorted(self._lost))))
            like, parts = tuple((t.dtype, tuple(t.shape[1:])) for t in tensors), []
            for peer, (begin, end) in zip(self.peers, self._parts(rows)):
                channel = self._channels.get(peer, stage, like, end - begin)
                for buffer, t in zip(channel.first(end - begin)[0], tensors):
                    _raw(buffer).copy_(_raw(t if end - begin == rows else t[begin:end]))
                channel.exchange.send()
                parts.append((channel, end - begin))
            self._rounds[stage] = _Queued(layer, parts)
        except BaseException:
            self._end_step()
            raise

    def _queued(self, stage, round_, out):
        """Queues a receive in the current stream. After the last layer of a step it waits, so its values are right, unless
        the engine calls checker."""
        try:
            self._channels.receive([channel for channel, _ in round_.parts])
            answer = self._answer([channel.first(rows)[1] for channel, rows in round_.parts], out)
            del self._rounds[stage]
            self._done[stage] = round_.layer
            if round_.layer == self.layers - 1 and not self.deferred:
                self._channels.settle()
            return answer
        except BaseException:
            self._end_step()
            raise

    def checker(self):
        """With streams: returns a function that raises ConnectionError or TimeoutError if answers received so far may be
        wrong. Call it, from any thread, after the device has done the queued work, and before the results are used."""
        return self._channels.checker()

    def _end_step(self):
        """Ends the exchanges of a failed or abandoned step. The next one begins with a handshake with each FFN rank."""
        self._channels.close()
        self._rounds.clear()
        self._done.clear()
        self._lost.update(range(len(self.peers)))

    def _handshake_again(self):
        """Repeats the handshake with the FFN ranks, or with their replacements, after a step that has failed."""
        end = time.monotonic() + self.replace_ms / 1000
        for i in sorted(self._lost):
            while i in self._lost:
                try:
                    self._compare(i, self.timeout_ms)
                except f.ConnectionError:
                    if time.monotonic() >= end:
                        raise
                    time.sleep(0.05)

    def _parts(self, rows):
        return [layout.share(rows, i, len(self.peers)) for i in range(len(self.peers))]

    @staticmethod
    def _start(round_, i):
        round_.started[i] = True  # before start(): KeyboardInterrupt may be raised after the round has begun
        try:
            round_.exchanges[i].start(rows=round_.rows[i])
        except f.Error:
            round_.started[i] = False
            raise

    def recv(self, stage, out=None, timeout_ms=None):
        """Returns the answer to the last send of this stage: a tensor with the same number of
        rows. It is the stage's buffer, which may be overwritten from the next send on. If `out` is given,
        it is filled and returned instead. With streams the device waits, and timeout_ms has no effect."""
        self._stage(stage)
        round_ = self._rounds.get(stage)
        if round_ is None:
            raise ValueError("%s: stage %d is not under way, want send(%d, ...) first" % (self, stage, stage))
        if out is not None:
            self._check_out(out, sum(round_.rows))
        if self.streams:
            return self._queued(stage, round_, out)
        try:
            for i in range(len(self.peers)):
                self._finish(stage, round_, i, self.timeout_ms if timeout_ms is None else timeout_ms)
        except BaseException:
            self._cancel(stage, round_)
            raise
        finally:
            del self._rounds[stage]
        return self._answer([t[:n] for t, n in zip(round_.form.outputs, round_.rows)], out)

    def _check_out(self, out, rows):
        if not isinstance(out, torch.Tensor):
            raise TypeError("%s: out is %s, want a torch.Tensor" % (self, type(out).__name__))
        if tuple(out.shape) != (rows, self.width) or out.dtype != self.out_dtype:
            raise ValueError("%s: out is %s of shape %s, want %s of shape %s" % (
                self, _dtype_name(out.dtype), tuple(out.shape), _dtype_name(self.out_dtype), (rows, self.width)))

    def _answer(self, parts, out):
        """Joins the rows of the FFN ranks, in out unless that is None."""
        if out is None:
            return parts[0][:] if len(parts) == 1 else torch.cat([_raw(t) for t in parts]).view(self.out_dtype)
        rows, begin = len(out), 0
        for t in parts:
            _raw(out if len(t) == rows else out[begin:begin + len(t)]).copy_(_raw(t))
            begin += len(t)
        return out

    def _finish(self, stage, round_, i, timeout_ms):
        """Waits for one server's answer; after a loss, for the answer of the replacement."""
        end = None
        while True:
            try:
                if not round_.started[i]:
                    self._compare(i, timeout_ms)
                    self._start(round_, i)
                round_.exchanges[i].wait(timeout_ms=timeout_ms)
                round_.started[i] = False
                return
            except (f.ConnectionError, f.TimeoutError) as e:
                round_.started[i] = False
                if isinstance(e, f.ConnectionError):
                    self._lost.add(i)
                end = time.monotonic() + self.replace_ms / 1000 if end is None else end
                if isinstance(e, f.TimeoutError) or time.monotonic() >= end:
                    raise type(e)("%s: stage %d, layer %d, ffn %d: %s" % (self, stage, round_.layer, self.peers[i], e)) from e
            except Mismatch:
                raise
            except f.Error as e:  # the FFN rank is leaving, or timeout_ms is invalid and the round is still in flight
                raise type(e)("%s: stage %d, layer %d, ffn %d: %s" % (self, stage, round_.layer, self.peers[i], e)) from e
            time.sleep(0.05)  # a message about the replacement may be in flight

    def _cancel(self, stage, round_):
        """Cancels the exchanges of a failed round that are still under way, and tells the FFN
        ranks, so that its rows do not become part of a later batch."""
        # If an exception ends this method, the next send sends what is missing.
        self._canceled[stage] = dict.fromkeys(range(len(self.peers)))
        if self.layers == 1:  # the FFN side ignores the rest of the old step: it waits for a handshake
            self._lost.update(range(len(self.peers)))
        for exchange in round_.exchanges:
            try:
                exchange.wait(timeout_ms=1)
            except f.Error:
                pass  # it was not started, or failed: the first error is being raised
        for i in range(len(self.peers)):
            self._canceled[stage][i] = self._send_cancel(stage, i)

    def _send_cancel(self, stage, i):
        key = _key(CANCEL, self.rank, stage)
        try:
            return f.push_pull([torch.ones(1, dtype=torch.uint8)], [key], [torch.zeros(1, dtype=torch.uint8)], [key], servers=[self.peers[i]])
        except f.Error:
            return None  # the next send repeats it

    def _await_cancel(self, stage):
        """Waits until the FFN ranks have dropped the last round of this stage, if it failed."""
        asked = self._canceled.get(stage, {})
        for i in list(asked):
            for last in (False, True):  # the first limit counts from the failure of the round
                try:
                    if asked[i] is None:
                        asked[i] = self._send_cancel(stage, i)
                    if asked[i] is not None:
                        f.wait(asked[i], timeout_ms=self.timeout_ms)
                    break
                except f.ConnectionError:
                    asked[i] = None  # its rows are lost with it
                    break
                except f.TimeoutError as e:
                    asked[i] = None
                    if last:
                        raise f.TimeoutError("%s: stage %d: ffn %d has not dropped the failed round: %s" % (self, stage, self.peers[i], e)) from e
            if asked.pop(i) is None:
                self._lost.add(i)
        self._canceled.pop(stage, None)

    # Control messages.

    def send_control(self, data):
        """Sends bytes to the FFN ranks, which receive them with recv_control. Does not wait for
        them; the next call waits until this message was received. The replacement of a lost
        rank gets the latest message before the rounds that are sent again."""
        if not isinstance(data, (bytes, bytearray)) or not data:
            raise TypeError("%s: the control message is %s, want bytes, at least one" % (self, type(data).__name__ if data != b"" else "empty"))
        self.check()
        if self.streams and (self._rounds or any(layer != self.layers - 1 for layer in self._done.values()) or self._channels.failed()):
            self._end_step()  # the last step has failed, or the engine has given it up: the FFN side must not go on with it
        self._done.clear()
        if self._channels.stale():
            raise f.ConnectionError("%s: an exchange in this process's CUDA graphs has ended, and a replay would give old values: start the attention ranks again" % self)
        if self.streams:
            self._handshake_again()
        wrong, control, self._control, self._latest = None, self._control, [], bytes(data)
        for i, handler in control:
            try:
                f.wait(handler, timeout_ms=self.timeout_ms)
            except f.ConnectionError:
                self._lost.add(i)  # a replacement gets this message
            except f.Error as e:
                wrong = wrong or e  # the other ranks still get the message
        text, key = _of_bytes(data), _key(CONTROL, self.rank)
        for i, peer in enumerate(self.peers):
            try:
                self._control.append((i, f.push_pull([text], [key], [torch.zeros(1, dtype=torch.uint8)], [key], servers=[peer])))
            except f.ConnectionError as e:
                self._lost.add(i)
                wrong = wrong if self.replace_ms else wrong or e
            except f.Error as e:
                wrong = wrong or e
        if wrong:
            raise wrong


class Answers:
    """The result of Batch.respond: it tells when the tensor may be changed."""

    def __init__(self, answers):
        self._answers = answers

    def done(self):
        """Whether all parts are sent."""
        return all(a.done() for a in self._answers)

    def wait(self, timeout_ms=None):
        """Waits until all parts are sent."""
        wrong = None
        for a in self._answers:
            try:
                a.wait(timeout_ms)
            except f.Error as e:
                wrong = wrong or e  # the others may still be being sent
        if wrong:
            raise wrong


class Batch:
    """The result of FFN.recv: a micro-batch of one or several attention ranks.

    tensors are the hidden states and the further tensors: the rows of `ranks` one after the
    other. rows has the number of rows of each rank. respond answers with the same rows.
    """

    def __init__(self, side, stage, items):
        self.stage, self.layer = stage, items[0].layer
        self.ranks, self.rows = [i.rank for i in items], [len(i.tensors[0]) for i in items]
        if len(items) == 1:
            self.tensors = items[0].tensors
        else:
            self.tensors = [torch.cat([_raw(t) for t in ts]).view(ts[0].dtype) for ts in zip(*(i.tensors for i in items))]
        self._side, self._handlers = side, [i.handler for i in items]

    def respond(self, out):
        """Sends the rows of `out` to their ranks. Do not change out until the result is done(),
        or recv has returned the next batch of this stage."""
        self._check(out)
        side = self._side
        out, handlers, self._handlers = out.contiguous(), self._handlers, None
        answers, begin, wrong = [], 0, None
        for handler, rows in zip(handlers, self.rows):
            try:
                answers.append(f.respond([out[begin:begin + rows]], handler, True))
            except f.Error as e:
                wrong = wrong or e  # the other ranks still get their rows
            begin += rows
        side._answers[self.stage, tuple(self.ranks)] = answers = Answers(answers)
        if wrong:
            raise wrong
        return answers

    def _check(self, out):
        """Raises ValueError if respond would refuse out."""
        side = self._side
        if self._handlers is None:
            raise ValueError("%s: stage %d, layer %d is answered already" % (side, self.stage, self.layer))
        want = (sum(self.rows), side.width)
        if tuple(out.shape) != want or out.dtype != side.out_dtype:
            raise ValueError("%s: stage %d, layer %d: the answer is %s of shape %s, want %s of shape %s, for attention %s" % (
                side, self.stage, self.layer, _dtype_name(out.dtype), tuple(out.shape), _dtype_name(side.out_dtype), want, _list(self.ranks)))


class QueuedBatch:
    """A Batch whose rows the current stream receives. The layer is unknown: it is None."""

    layer = None

    def __init__(self, side, stage, parts):
        self.stage, self.ranks, self.rows = stage, [rank for rank, _, _ in parts], [rows for _, _, rows in parts]
        self.tensors = [t[:] for t in parts[0][1].first(parts[0][2])[0]]
        if len(parts) > 1:
            self.tensors = [torch.cat([_raw(channel.first(rows)[0][i]) for _, channel, rows in parts]).view(t.dtype) for i, t in enumerate(self.tensors)]
        self._side, self._parts = side, parts

    def respond(self, out):
        """Queues the sending of the rows of `out`. You may change out in the same stream afterwards."""
        side, want = self._side, (sum(self.rows), self._side.width)
        if self._parts is None:
            raise ValueError("%s: stage %d is answered already" % (side, self.stage))
        if tuple(out.shape) != want or out.dtype != side.out_dtype:
            raise ValueError("%s: stage %d: the answer is %s of shape %s, want %s of shape %s, for attention %s" % (
                side, self.stage, _dtype_name(out.dtype), tuple(out.shape), _dtype_name(side.out_dtype), want, _list(self.ranks)))
        begin, parts, self._parts = 0, self._parts, None
        try:
            for _, channel, rows in parts:
                _raw(channel.first(rows)[1]).copy_(_raw(out if rows == want[0] else out[begin:begin + rows]))
                channel.exchange.send()
                begin += rows
        except BaseException:
            side._channels.close()  # the other ranks must not wait for their rows
            raise
        return Answers([])


def _list(ranks):
    return ", ".join(map(str, ranks))


_Item = collections.namedtuple("_Item", "order rank layer handler tensors since")


class FFN(_Side):
    """The FFN side: receives micro-batches, and answers them.

    Rank `rank` of `ffn` ranks serves self.peers, some of `attention` ranks. The other
    arguments are those of the attention side. With together=True (the default) recv waits
    until every rank of self.peers has sent this stage, and returns all as one batch, so that
    their rows share a matrix product. After the first rank the others have timeout_ms; then
    recv raises TimeoutError, and another call waits for the same time again. With
    together=False it returns each rank's batch separately, in the order of arrival.

    With layers=1 a round does not name its layer. If a rank has canceled a round, or is
    another process, recv therefore raises Mismatch, once, and the engine begins a new step.
    The other ranks get no answers of the old step, and begin a new step, too.
    """

    def __init__(self, rank, attention, ffn, *, width, dtype, stages=1, layers=1, out_dtype=None, device="cpu", together=True, timeout_ms=30000, streams=False):
        super().__init__("ffn", rank, attention, ffn, width, dtype, out_dtype, stages, layers, device, timeout_ms, streams and together)
        _count("timeout_ms", timeout_ms, 1 << 40)  # not None, since the rest of a batch has a limit
        self.together = together
        self.streams = None if self.stream_host else False  # whether CUDA streams exchange the micro-batches; None until all ranks have sent their handshake
        self._no_streams = {}  # by rank with a handshake: why it and this rank cannot exchange in streams
        self._unanswered = []  # handlers of handshakes that wait until streams is decided
        self._slots = {}  # (stage, rank): the waiting batch
        self._controls = {r: collections.deque() for r in self.peers}
        self._informed = set()  # ranks with a control message
        self.resumes = False  # a handshake had a control message: this process has replaced a lost one in the middle of a step
        self._expected = {}
        self._answers = {}
        self._seen = set()  # ranks that have sent a batch
        self._arrived = collections.deque()  # batches that are received and not yet examined
        self._wrong = collections.deque()  # errors that recv will raise
        self._known = set()  # ranks with a handshake; with layers=1 since the last error
        self._order = 0

    def recv(self, stage=None, timeout_ms=None, more=()):
        """Returns the next Batch of this stage, or the oldest of any stage. Waits for the first
        rank without a limit unless timeout_ms is given. With streams the device waits: timeout_ms
        has no effect, the stage is required, and `more` has dtype and shape of a row of each
        further tensor."""
        if stage is not None:
            self._stage(stage)
        end = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            if self.streams:  # decided by a handshake, perhaps in this loop
                if stage is None:
                    raise ValueError("%s: recv without a stage, which streams need" % self)
                return self._queued(stage, ((self.dtype, (self.width,)),) + tuple(more))
            if channels.capturing(self.device):
                raise f.ValueError("%s: a CUDA graph is being captured, which cannot contain rounds by messages: let streams exchange the micro-batches, or capture nothing" % self)
            self._tell()
            stage_, items, late, missing = self._take(stage)
            if items:
                return self._batch(stage_, items)
            self._pump(end, late, missing)

    def _queued(self, stage, like):
        parts = []
        try:
            for rank in self.peers:
                rows = self._expected.get((stage, rank))
                if rows is None:
                    raise Mismatch("%s: stage %d: the rows of attention %d are not known, which streams need: set streams=False on both sides" % (self, stage, rank))
                parts.append((rank, self._channels.get(rank, stage, like, rows), rows))
            self._channels.receive([channel for _, channel, _ in parts])
            self._seen.update(self.peers)
            return QueuedBatch(self, stage, parts)
        except BaseException:
            self._channels.close()
            raise

    def recv_control(self, timeout_ms=None):
        """Returns the next control message of each rank of self.peers, as a dict of bytes."""
        end = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        late = None
        self._tell()
        while not all(self._controls.values()):
            if late is None and any(self._controls.values()):
                late = time.monotonic() + self.timeout_ms / 1000
            self._pump(end, late, "a control message of attention %s has arrived, none of attention %s" % (
                _list(r for r in self.peers if self._controls[r]), _list(r for r in self.peers if not self._controls[r])))
        return {r: c.popleft() for r, c in self._controls.items()}

    def expect(self, rows):
        """Sets the expected rows: {stage: {rank: rows}}. recv raises Mismatch for a batch with
        another number. Replaces the previous expectation; {} accepts any number."""
        self._expected = {(s, r): n for s, ranks in rows.items() for r, n in ranks.items()}

    # Received batches.

    def _take(self, stage):
        """Returns stage and items of the oldest complete batch. If there is none: None, None,
        the time until which the rest of a batch must arrive, and the missing part."""
        best, late, missing = None, None, ""
        for s in range(self.stages) if stage is None else [stage]:
            items = [self._slots[s, r] for r in self.peers if (s, r) in self._slots]
            if not items:
                continue
            if not self.together:
                items = [min(items, key=lambda i: i.order)]
            newest, oldest = max(i.since for i in items), min(i.since for i in items)
            limit, why = None, ""
            if self.together and len(items) < len(self.peers):
                limit = oldest + self.timeout_ms / 1000
                why = "stage %d, layer %d of attention %s has arrived, none of attention %s" % (
                    s, items[0].layer, _list(i.rank for i in items), _list(r for r in self.peers if (s, r) not in self._slots))
            elif any(i.layer != items[0].layer for i in items) and time.monotonic() < newest + self.timeout_ms / 1000:
                limit = newest + self.timeout_ms / 1000  # one may be from a lost rank; a handshake of its replacement will tell
            if limit is not None:
                late, missing = (limit, why) if late is None or limit < late else (late, missing)
            elif best is None or max(i.order for i in items) < best[0]:
                best = max(i.order for i in items), s, items
        if best is None:
            return None, None, late, missing
        return best[1], best[2], None, ""

    def _batch(self, stage, items):
        for key in [k for k in self._answers if k[0] == stage]:
            self._answers[key].wait(self.timeout_ms)  # the ranks have received its rows, so this waits at most briefly
            del self._answers[key]
        for i in items:
            del self._slots[stage, i.rank]
        first = items[0]
        for i in items:  # a mismatch stays unanswered, so that no rank takes a wrong answer
            want = self._expected.get((stage, i.rank))
            if want is not None and want != len(i.tensors[0]):
                raise Mismatch("stage %d, layer %d: attention %d sent %d rows, %s expects %d" % (stage, i.layer, i.rank, len(i.tensors[0]), self, want))
            if i.layer != first.layer:
                raise Mismatch("%s: stage %d: attention %d sent layer %d, attention %d layer %d" % (self, stage, first.rank, first.layer, i.rank, i.layer))
            if [(t.dtype, t.shape[1:]) for t in i.tensors] != [(t.dtype, t.shape[1:]) for t in first.tensors]:
                raise Mismatch("%s: stage %d, layer %d: attention %d sent %s, attention %d %s" % (
                    self, stage, first.layer, first.rank, _shapes(first.tensors), i.rank, _shapes(i.tensors)))
        try:
            return Batch(self, stage, items)
        except BaseException:  # without memory for the joined rows, the next call returns them
            for i in items:
                self._slots.setdefault((stage, i.rank), i)
            raise

    def _pump(self, end, late, missing):
        """Receives and examines batches. After an exception that is no Mismatch, the next call continues with the rest of them."""
        if not self._arrived:
            self._await(end, late, missing)
        while self._arrived:
            handler, tensors, keys = self._arrived[0]
            try:
                self._receive(handler, tensors, keys)
            except Mismatch as e:
                self._wrong.append(e)  # the other batches are kept
            except BaseException:
                if not keys or _parse(keys[0])[0] != DATA or any(i.handler == handler for i in self._slots.values()):
                    self._arrived.popleft()  # the batch was stored or answered
                raise
            self._arrived.popleft()
        self._tell()

    def _await(self, end, late, missing):
        """Waits for batches. end is the caller's limit; the missing part must arrive until late."""
        over = bool(missing) and late is not None and time.monotonic() >= late
        first = min((t for t in (end, late) if t is not None), default=None)
        try:
            self._arrived.extend(f.get_batch(any=True, timeout_ms=1 if over else _left(first)))
        except f.Finished as e:  # a SystemExit, which a thread of an engine would not report
            raise f.ConnectionError("%s: all attention ranks have left: %s" % (self, e)) from e
        except f.TimeoutError:
            if over:  # and the missing part is not queued either, such as the handshake of a replacement
                self._slots = {k: i._replace(since=time.monotonic()) for k, i in self._slots.items()}  # the next recv waits for the same time
                raise f.TimeoutError("%s: %s: timed out (limit %d ms)" % (self, missing, self.timeout_ms)) from None
            if end is not None and time.monotonic() >= end:
                raise

    def _tell(self):
        """Raises the errors of received batches, one at a time, before a batch is returned."""
        if self._wrong:
            raise self._wrong.popleft()

    def _receive(self, handler, tensors, keys):
        kind, rank, stage, layer = _parse(keys[0]) if keys else (0, 0, 0, 0)
        if kind not in (DATA, CONTROL, HELLO, CANCEL):
            raise Mismatch("%s: a batch with keys %s was not sent by an Attention: does the worker use the same connector?" % (self, list(keys)))
        if rank not in self._controls:
            text = "attention %d sent to %s, which serves attention %s of %d (with %d ffn ranks)" % (rank, self, _list(self.peers), self.attention, self.ffn)
            if kind == HELLO:
                f.respond([_text("-" + text)], handler)
            raise Mismatch(text)
        if kind == HELLO:
            self._welcome(handler, rank, _bytes(tensors[0]))
        elif kind == CONTROL:
            self._controls[rank].append(_bytes(tensors[0]))
            self._informed.add(rank)
            f.respond([torch.ones(1, dtype=torch.uint8)], handler)
        elif kind == CANCEL:
            self._drop(self._slots.pop((stage, rank), None))
            f.respond([torch.ones(1, dtype=torch.uint8)], handler)
            if rank in self._known:
                self._new_step(rank, "has canceled stage %d" % stage)
        elif self.layers == 1 and rank not in self._known:
            return  # part of an unknown step: its rank gets no answer, and repeats the handshake
        else:
            self._order += 1  # tensors without elements are received on the host
            item = _Item(self._order, rank, layer, handler, [t if t.numel() else t.to(self.device) for t in tensors], time.monotonic())
            x = tensors[0]
            if x.dim() != 2 or x.shape[1] != self.width or x.dtype != self.dtype:
                raise Mismatch("attention %d sent %s, %s wants %s and %d columns" % (rank, _shapes(tensors[:1]), self, _dtype_name(self.dtype), self.width))
            if stage >= self.stages or layer >= self.layers:
                raise Mismatch("attention %d sent stage %d, layer %d; %s has %d stages and %d layers" % (rank, stage, layer, self, self.stages, self.layers))
            self._seen.add(rank)
            self._drop(self._slots.pop((stage, rank), None))  # its rank has canceled the earlier batch
            self._slots[stage, rank] = item

    def _welcome(self, handler, rank, text):
        """Answers a handshake. Drops everything that an earlier process of that rank has sent."""
        other, own = json.loads(text.decode()), self._hello()
        if not other.get("again"):  # a repeated handshake keeps the rounds of other stages
            for s in range(self.stages):
                self._drop(self._slots.pop((s, rank), None))
            self._controls[rank].clear()
        elif rank not in self._informed and isinstance(other.get("control"), str):
            self._controls[rank].append(other["control"].encode("latin-1"))
            self._informed.add(rank)
            self.resumes = True
        wrong = ["%s: %s has %s, %s at %s, pid %d has %s" % (k, other["who"], other.get(k), self, socket.gethostname(), os.getpid(), v)
                 for k, v in own.items() if other.get(k) != v]
        same = other.get("stream_host") == self.stream_host
        if self.streams and not same:
            wrong.append("stream_host: %s cannot exchange in streams with %s, as the process before it did: streams is False there, or it is on another host or a CPU" % (other["who"], self))
        if self.streams:
            self._channels.close()  # a step has failed
        self._no_streams[rank] = self.no_streams or str(other.get("no_streams") or "") or ("" if same else "attention %d and %s are on different hosts" % (rank, self))
        if wrong:
            self._reply(handler, "-" + "; ".join(wrong))
        else:
            self._unanswered.append(handler)
        if not self.path and (self.no_streams or len(self._no_streams) == len(self.peers)):
            self._agreed(next(filter(None, self._no_streams.values()), ""))
            self.streams = self.path == "streams"
        while self._unanswered and self.path:
            self._reply(self._unanswered.pop(0), "+" if self.streams else "=" + self.path.partition(": ")[2])
        if wrong and rank not in self._seen:
            raise Mismatch("; ".join(wrong))  # a replacement with a mismatch is refused, but does not stop this side
        if wrong:
            self._known.discard(rank)
            return
        known = rank in self._known
        self._known.add(rank)
        if known and rank in self._seen and not other.get("again"):
            self._new_step(rank, "is another process, or has created its side again")

    @staticmethod
    def _reply(handler, text):
        """Answers a handshake, unless its rank has canceled it."""
        try:
            f.respond([_text(text)], handler)
        except f.Error:
            pass

    def _new_step(self, rank, why):
        """With layers=1 this side counts layers, and cannot continue in the middle of a step. The
        step's batches stay unanswered, as do batches before the next handshake."""
        if self.layers > 1:
            return
        self._slots.clear()
        self._known = {rank}
        raise Mismatch("%s: attention %d %s, and with layers=1 the next layer is unknown: begin a new step" % (self, rank, why))

    def _drop(self, item):
        """Releases a batch that its rank has canceled. The answer is dropped."""
        if item is None:
            return
        try:
            f.respond([torch.zeros(len(item.tensors[0]), self.width, dtype=torch.uint8).to(self.out_dtype)], item.handler)
        except f.Error:
            pass


def _compared(reply):
    """Returns why the micro-batches are not exchanged in streams, or "". Raises the error in an answer to a handshake."""
    text = _bytes(reply).rstrip(b"\0").decode(errors="replace")
    if text[:1] not in ("+", "="):
        raise Mismatch(text[1:])
    return text[1:]


def _text(text):
    """Encodes an answer to a handshake."""
    return _of_bytes(text.encode()[:TEXT].ljust(TEXT, b"\0"))


def _shapes(tensors):
    return ", ".join("%s%s" % (_dtype_name(t.dtype), list(t.shape)) for t in tensors)
