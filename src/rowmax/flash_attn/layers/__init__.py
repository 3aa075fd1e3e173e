"""`flash_attn.layers`: the rotary embedding, which caches need."""
