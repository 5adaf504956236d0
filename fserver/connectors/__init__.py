"""Connectors between attention and FFN processes, for inference engines.

    from fserver.connectors import Attention, FFN, join

    join("attention", rank, attention=3, ffn=2, host="10.0.0.1", port=8123)
    side = Attention(rank, 3, 2, width=7168, dtype=torch.bfloat16, max_rows=128, stages=3, device="cuda")
    side.send(0, hidden)
    out = side.recv(0)

Attention and FFN are the two sides, of any engine, and any numbers of them. On these
stand the connectors for vLLM's afd-plugin (fserver.connectors.vllm_afd) and for SGLang
(fserver.connectors.sglang). docs/engines.md tells how to run engines with them.
"""

from .cluster import join, leave
from .layout import servers_of, share, workers_of
from .pair import FFN, Answers, Attention, Batch, Mismatch

__all__ = ["Answers", "Attention", "Batch", "FFN", "Mismatch", "join", "leave", "servers_of", "share", "workers_of"]
