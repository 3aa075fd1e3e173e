"""`import flash_attn` gives `rowmax.flash_attn`, for code that cannot be edited."""

import importlib
import importlib.machinery
import sys

PACKAGE = "rowmax.flash_attn"
# Name there -> module here.
_MODULES = {
    "flash_attn": PACKAGE,
    "flash_attn.flash_attn_interface": PACKAGE + ".interface",
    "flash_attn.bert_padding": PACKAGE + ".bert_padding",
    "flash_attn.layers": PACKAGE + ".layers",
    "flash_attn.layers.rotary": PACKAGE + ".layers.rotary",
}
_replaced: dict = {}


def install() -> None:
    """From here on `import flash_attn`, and of its modules `flash_attn_interface`, `bert_padding` and `layers.rotary`, give
    those of rowmax. Modules that imported the original before keep it, so call this first. Repeated calls change nothing."""
    for name, ours in _MODULES.items():
        module = importlib.import_module(ours)
        if sys.modules.get(name) is not module:
            _replaced[name] = sys.modules.get(name)
            sys.modules[name] = module
    # Found as attributes too, under the name they have there.
    top = sys.modules["flash_attn"]
    top.flash_attn_interface = sys.modules["flash_attn.flash_attn_interface"]  # type: ignore[attr-defined]


def uninstall() -> None:
    """`import flash_attn` gives what it gave before `install`."""
    for name, before in _replaced.items():
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
    _replaced.clear()
