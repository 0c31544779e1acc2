"""The name under which users import `focus.formats.hf`: the same module."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("focus.formats.hf")
