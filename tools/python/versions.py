"""Prints the versions of this Python and of what it has of the tensor libraries."""

import importlib
import platform

found = ["Python " + platform.python_version()]
for name in ("torch", "numpy", "jax"):
    try:
        found.append("%s %s" % (name, importlib.import_module(name).__version__))
    except ImportError:
        found.append("no " + name)
print(", ".join(found))
