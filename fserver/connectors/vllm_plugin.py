"""The entry point for vLLM (group vllm.general_plugins): adds the connector's name to the
names of afd-plugin. Without afd-plugin it does nothing."""

import importlib.util

NAME = "StepMeshAFDConnector"


def register():
    """Makes `"connector": "StepMeshAFDConnector"` valid in afd-plugin's configuration."""
    if importlib.util.find_spec("afd_plugin") is None:
        return
    from afd_plugin import config
    from afd_plugin.connectors import AFDConnectorFactory

    AFDConnectorFactory.register_connector(NAME, "fserver.connectors.vllm_afd", NAME, replace=True)
    # The plugin has the names in a second list.
    if NAME not in config.SUPPORTED_AFD_CONNECTORS:
        config.SUPPORTED_AFD_CONNECTORS = (*config.SUPPORTED_AFD_CONNECTORS, NAME)
