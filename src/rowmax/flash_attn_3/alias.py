"""`import flash_attn_interface` gives `rowmax.flash_attn_3.interface`, for code that cannot be edited."""

import importlib
import sys

# Name there -> module here.
_MODULES = {
    "flash_attn_interface": "rowmax.flash_attn_3.interface",
    "flash_attn_3": "rowmax.flash_attn_3",
    "flash_attn_3.flash_attn_interface": "rowmax.flash_attn_3.interface",
}
_replaced: dict = {}


def install() -> None:
    """From here on `import flash_attn_interface` gives this module's functions. Modules that imported the original before keep
    it, so call this first. Repeated calls change nothing."""
    for name, ours in _MODULES.items():
        module = importlib.import_module(ours)
        if sys.modules.get(name) is not module:
            _replaced[name] = sys.modules.get(name)
            sys.modules[name] = module


def uninstall() -> None:
    """`import flash_attn_interface` gives what it gave before `install`."""
    for name, before in _replaced.items():
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
    _replaced.clear()
