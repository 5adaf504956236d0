"""The entry point for vLLM (group vllm.general_plugins): adds the connector's name to the
names of afd-plugin. Without afd-plugin it does nothing."""

import importlib.util
import sys

NAME = "StepMeshAFDConnector"

# afd-plugin imports this module at each layer, to find out whether it runs on Ascend devices. Without torch_npu the import fails
# each time, after Python has loaded the module and begun to run it.
ASCEND = "afd_plugin.v1.worker.npu.ubatching"


def register():
    """Makes `"connector": "StepMeshAFDConnector"` valid in afd-plugin's configuration. Without torch_npu, lets the import of ASCEND fail at once."""
    if importlib.util.find_spec("afd_plugin") is None:
        return
    from afd_plugin import config
    from afd_plugin.connectors import AFDConnectorFactory

    AFDConnectorFactory.register_connector(NAME, "fserver.connectors.vllm_afd", NAME, replace=True)
    # The plugin has the names in a second list.
    if NAME not in config.SUPPORTED_AFD_CONNECTORS:
        config.SUPPORTED_AFD_CONNECTORS = (*config.SUPPORTED_AFD_CONNECTORS, NAME)
    if importlib.util.find_spec("torch_npu") is None:
        sys.modules.setdefault(ASCEND, None)  # an import of it fails at once
