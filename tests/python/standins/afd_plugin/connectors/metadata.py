"""Transferred tensors, and their descriptions."""

import json
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional

import torch


class AFDDPMetadata:
    def __init__(self, num_tokens_across_dp_cpu, max_tokens_across_dp_cpu=None):
        self.num_tokens_across_dp_cpu = torch.as_tensor(num_tokens_across_dp_cpu, dtype=torch.int32)
        self.max_tokens_across_dp_cpu = self.num_tokens_across_dp_cpu.max()


@dataclass
class AFDControlPayload:
    dp_metadata_list: Dict[int, AFDDPMetadata]
    is_graph_capturing: bool
    is_warmup: bool


class AFDTransferState:
    pass


class AFDExpertRoutingSpec(NamedTuple):
    router_logits_width: int
    router_logits_dtype: Any


@dataclass
class AFDTransferMetadata:
    layer_idx: int
    stage_idx: int
    seq_lens: List[int]

    def __post_init__(self):
        if not self.seq_lens or min(self.seq_lens) <= 0:
            raise ValueError("seq_lens is %r, want positive lengths" % (self.seq_lens,))

    @property
    def total_tokens(self):
        return sum(self.seq_lens)

    @classmethod
    def create_attention_metadata(cls, *, layer_idx, stage_idx, seq_len):
        return cls(layer_idx, stage_idx, [seq_len])

    @classmethod
    def create_ffn_metadata(cls, *, layer_idx, stage_idx, seq_lens):
        return cls(layer_idx, stage_idx, list(seq_lens))

    def validate_tensor_shape(self, shape):
        return len(shape) > 0 and shape[0] == self.total_tokens


@dataclass
class AFDTransferContext:
    metadata: AFDTransferMetadata
    states: Optional[AFDTransferState] = None


@dataclass
class AFDA2FTransferPayload:
    hidden_states: torch.Tensor
    context: AFDTransferContext
    router_logits: Optional[torch.Tensor] = None


def encode_control_payload(payload):
    stages = {str(s): m.num_tokens_across_dp_cpu.tolist() for s, m in payload.dp_metadata_list.items()}
    return json.dumps([stages, payload.is_graph_capturing, payload.is_warmup]).encode()


def decode_control_payload(data):
    stages, capturing, warmup = json.loads(data.decode())
    return AFDControlPayload({int(s): AFDDPMetadata(torch.tensor(n)) for s, n in stages.items()}, capturing, warmup)
