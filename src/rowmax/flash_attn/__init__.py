"""`flash_attn` without the build: the functions of FlashAttention 2.8.4, on any GPU that Triton knows and on a CPU.

    from rowmax.flash_attn import flash_attn_func       instead of      from flash_attn import flash_attn_func
    rowmax.flash_attn.install()                          for code that cannot be edited: `import flash_attn` gives this package

Layouts, alignment of masks, scale and returned values are that library's (`interface`). What differs, on purpose:

    dtypes                fp32 works too, and fp64 on the CPU
    gradient of the LSE   honoured; there it is dropped
    ALiBi                 the returned LSE is that of the documented formula; that library may leave out a constant a row
    window, below -1      an error; there any negative number is no limit
    pages                 of any size; there multiples of 256. With ALiBi, a soft-cap or left padding they are copied first
    dropout               by a generator of its own (`rowmax.reference.dropout`); not over pages
"""

from rowmax.flash_attn.alias import install, uninstall
from rowmax.flash_attn.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from rowmax.flash_attn.kvcache import flash_attn_with_kvcache

__version__ = "2.8.4"
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
