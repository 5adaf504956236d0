"""Connectors between attention and FFN processes, for inference engines.

    from fserver.connectors import Attention, FFN, join

    join("attention", rank, attention=3, ffn=2, host="10.0.0.1", port=8123)
    side = Attention(rank, 3, 2, width=7168, dtype=torch.bfloat16, max_rows=128, stages=3, device="cuda")
    side.send(0, hidden)
    out = side.recv(0)

Attention and FFN are the two sides, for any engine and any number of ranks. The connectors
for vLLM's afd-plugin (fserver.connectors.vllm_afd) and for SGLang
(fserver.connectors.sglang) use them. docs/engines.md explains how to run engines with them.

An import of this package, or of a connector, does not import fserver_lib, so an engine may
import it before it forks. The first use of the library imports fserver_lib.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import join, leave
    from .layout import servers_of, share, workers_of
    from .pair import FFN, Answers, Attention, Batch, Mismatch

__all__ = ["Answers", "Attention", "Batch", "FFN", "Mismatch", "join", "leave", "servers_of", "share", "workers_of"]

_MODULES = {
    "join": "cluster", "leave": "cluster", "servers_of": "layout", "share": "layout", "workers_of": "layout",
    "Answers": "pair", "Attention": "pair", "Batch": "pair", "FFN": "pair", "Mismatch": "pair",
}


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError("module %r has no attribute %r" % (__name__, name))
    value = getattr(importlib.import_module("." + _MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
