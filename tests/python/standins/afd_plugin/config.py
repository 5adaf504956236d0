"""Configuration: additional_config["afd"] of the engine."""

from dataclasses import dataclass

SUPPORTED_AFD_CONNECTORS = ("P2pNcclAFDConnector", "CAMP2pAFDConnector")


@dataclass(frozen=True)
class AFDConfig:
    connector: str = "P2pNcclAFDConnector"
    async_dp: bool = False
    role: str = "attention"
    port: int = 1239
    host: str = "127.0.0.1"
    num_attention_ranks: int = 1
    num_ffn_ranks: int = 1
    compute_gate_on_attention: bool = False


def parse_afd_config(source):
    raw = dict(source.additional_config["afd"])
    raw.pop("connector_extra_config", None)
    config = AFDConfig(**raw)
    if config.connector not in SUPPORTED_AFD_CONNECTORS:
        raise ValueError("connector %r is not one of %s" % (config.connector, (SUPPORTED_AFD_CONNECTORS,)))
    return config


def connector_extra_config_from_source(source):
    return dict(source.additional_config["afd"].get("connector_extra_config", {}))
