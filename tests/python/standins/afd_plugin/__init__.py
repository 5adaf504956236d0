"""A stand-in for vllm-project/afd-plugin, where that is not installed: the names, arguments
and checks that a connector meets, and nothing else. test_connectors_vllm.py runs on the
plugin itself where it can be imported."""
