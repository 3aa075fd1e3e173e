"""`flash_attn_interface`, the module of FlashAttention 3, without the build: on any GPU that Triton knows and on a CPU.

    from rowmax.flash_attn_3 import flash_attn_func      instead of      from flash_attn_interface import flash_attn_func
    rowmax.flash_attn_3.install()                         for code that cannot be edited

Arguments, their order and defaults, and returned values are those of that module. They are not FlashAttention 2's: no dropout,
no ALiBi, `page_table` for `block_table`, an LSE of -inf where a query sees nothing. What differs from it, on purpose:

    dtypes                fp32 works too, and fp64 on the CPU; 8-bit tensors are `Unsupported`
    gradients             of the LSE and of `qv` too; there both are dropped
    attention_chunk       `Unsupported`
    num_splits, pack_gqa, sm_margin, scheduler_metadata
                          hints for speed there; here the plan decides, and `num_splits` counts for caches alone
"""

from rowmax.flash_attn_3.alias import install, uninstall
from rowmax.flash_attn_3.interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
    "uninstall",
]
