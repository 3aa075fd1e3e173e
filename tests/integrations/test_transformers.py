"""rowmax inside transformers: equal to eager attention wherever it is served, an error everywhere else."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmax import Unsupported

transformers = pytest.importorskip("transformers")
masks = pytest.importorskip("transformers.masking_utils")
integration = pytest.importorskip("rowmax.integrations.transformers")

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,  # so that attention, and a wrong mask, move the logits
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(  # windowed and full layers in one cache
        transformers.Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(  # soft-capped scores, low enough to be felt
        transformers.Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=1.5, query_pre_attn_scalar=16)
    ),
    "llama4": lambda: transformers.Llama4ForCausalLM(  # chunks
        transformers.Llama4TextConfig(
            **SIZES, attention_chunk_size=5, no_rope_layers=[1, 0], num_local_experts=2, intermediate_size_mlp=48
        )
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(  # sinks
        transformers.GptOssConfig(**SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1)
    ),
}
BATCH, LENGTH = 2, 12
IDS = torch.randint(2, 97, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[1, :3], RIGHT[0, -5:] = 0, 0
MASKS = {"none": None, "left": LEFT, "right": RIGHT}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PACKED = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 7), (8, 1, 3))])


@functools.cache
def build(name: str, device: str = "cpu"):
    torch.manual_seed(1)
    return MODELS[name]().eval().to(device)


@pytest.fixture(params=DEVICES)
def data(request):
    """The module's inputs on the device under test."""
    ids, left, right, packed = (tensor.to(request.param) for tensor in (IDS, LEFT, RIGHT, PACKED))
    masks = {"none": None, "left": left, "right": right}
    return SimpleNamespace(device=request.param, ids=ids, left=left, packed=packed, masks=masks)


@pytest.fixture(params=MODELS)
def model(request, data):
    return build(request.param, data.device)


def both(model, function):
    """`function()` with eager attention, then with rowmax."""
    results = []
    for implementation in ("eager", "rowmax"):
        model.set_attn_implementation(implementation)
        results.append(function())
    return results


def assert_equal(model, function, rows=None):
    with torch.no_grad():
        expected, actual = both(model, function)
    assert bool(torch.isfinite(actual).all())
    torch.testing.assert_close(*(x if rows is None else x[rows] for x in (actual, expected)))


# ---- equal to eager ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", MASKS)
def test_prefill(model, data, padding):
    mask = data.masks[padding]
    rows = None if mask is None else mask.bool()
    assert_equal(model, lambda: model(data.ids, attention_mask=mask).logits, rows)


def test_power(model, data):
    """Dropping the padding mask, or the packing, moves the logits by far more than the comparisons above allow."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain, padded = model(data.ids).logits, model(data.ids, attention_mask=data.left).logits
        packed = model(data.ids, position_ids=data.packed, use_cache=False).logits
        unpacked = model(data.ids, position_ids=data.packed, attention_mask=torch.ones_like(data.ids), use_cache=False).logits
    assert (plain - padded)[1, 3:].abs().max() > 0.01
    if model.config.model_type != "gpt_oss":  # which finds no packing in positions
        assert (packed - unpacked).abs().max() > 0.01


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_power_of_what_bends_scores(name):
    """Without the soft-cap, or with other sinks, the logits are others by far more than the comparisons allow."""
    model = build(name)
    model.set_attn_implementation("rowmax")
    with torch.no_grad():
        logits = model(IDS).logits
        layer = model.model.layers[0].self_attn
        if name == "gemma2":
            layer.attn_logit_softcapping, kept = None, layer.attn_logit_softcapping
            other = model(IDS).logits
            layer.attn_logit_softcapping = kept
        else:
            layer.sinks += 1.0
            other = model(IDS).logits
            layer.sinks -= 1.0
    assert (logits - other).abs().max() > 0.01


def test_a_row_of_padding_only(model, data):
    mask = data.left.clone()
    mask[0] = 0
    assert_equal(model, lambda: model(data.ids, attention_mask=mask).logits, mask.bool())


def test_packed_positions(model, data):
    assert_equal(model, lambda: model(data.ids, position_ids=data.packed, use_cache=False).logits)
    assert_equal(model, lambda: model(data.ids[:1], position_ids=data.packed[:1], use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flattening_collator(name):
    """`cu_seq_lens` as the collator gives them: the same as the sequences one by one."""
    model = build(name)
    model.set_attn_implementation("rowmax")
    sequences = [IDS[0, :5], IDS[1, :7], IDS[0, 3:4]]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": ids.tolist()} for ids in sequences]
    )
    batch = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits[0]
        alone = torch.cat([model(ids[None], use_cache=False).logits[0] for ids in sequences])
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=["grow", "static", "beams"])
def test_generate(model, data, padding, options):
    def generate():
        result = model.generate(
            data.ids,
            attention_mask=data.masks[padding],
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        return result.sequences, torch.stack(result.logits)

    (expected, expected_logits), (actual, logits) = both(model, generate)
    assert torch.equal(actual, expected)
    torch.testing.assert_close(logits, expected_logits)


@pytest.mark.parametrize("static", [False, True], ids=["grow", "static"])
@pytest.mark.parametrize("padding", MASKS)
def test_prefill_in_chunks(model, data, padding, static):
    mask = data.masks[padding]

    def forward():
        cache = (
            transformers.StaticCache(config=model.config, max_cache_len=20)
            if static
            else transformers.DynamicCache(config=model.config)
        )
        outs = []
        for start, end in ((0, 5), (5, 9), (9, 12)):
            seen = None if mask is None else mask[:, :end]
            outs.append(model(data.ids[:, start:end], attention_mask=seen, **{CACHE: cache}).logits)
        return torch.cat(outs, 1)

    assert_equal(model, forward, None if mask is None else mask.bool())


@pytest.mark.parametrize("case", ["plain", "left", "right", "packed"])
def test_gradients(model, data, case):
    labels, inputs = data.ids.clone(), {"use_cache": False}
    if case == "packed":
        inputs["position_ids"] = data.packed
    elif case != "plain":
        mask = inputs["attention_mask"] = data.masks[case]
        labels[mask == 0] = -100
        labels[:, 1:][mask[:, :-1] == 0] = -100  # predicted from a padded position

    def gradients():
        model.zero_grad()
        model.train()
        model(data.ids, labels=labels, **inputs).loss.backward()
        model.eval()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected, actual = both(model, gradients)
    assert len(actual) > 10
    torch.testing.assert_close(actual, expected)


def test_encoders():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, initializer_range=0.3)).eval()
    for mask in MASKS.values():
        assert_equal(bert, lambda mask=mask: bert(IDS, attention_mask=mask).last_hidden_state)
    config = transformers.ModernBertConfig(
        **sizes, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1
    )
    modern = transformers.ModernBertModel(config).eval()  # windows to both sides
    for mask in (torch.ones_like(IDS), RIGHT):
        assert_equal(modern, lambda mask=mask: modern(IDS, attention_mask=mask).last_hidden_state, mask.bool())


def test_cross_attention():
    config = transformers.BartConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.3,
    )
    bart = transformers.BartForConditionalGeneration(config).eval()
    assert_equal(bart, lambda: bart(IDS, attention_mask=RIGHT, decoder_input_ids=IDS[:, :7]).logits)


def test_a_decoder_made_bidirectional():
    """The layers still say `is_causal`; the mask knows better."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    model.config.is_causal = False
    assert_equal(model, lambda: model(IDS).logits)


# ---- torch.compile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("inputs", [{}, {"attention_mask": LEFT}, {"position_ids": PACKED}], ids=["plain", "left", "packed"])
def test_compile_without_a_cache(name, inputs):
    model = build(name)
    torch._dynamo.reset()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(IDS, use_cache=False, **inputs).logits
        model.set_attn_implementation("rowmax")
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(IDS, use_cache=False, **inputs).logits
    rows = LEFT.bool() if "attention_mask" in inputs else slice(None)
    torch.testing.assert_close(actual[rows], expected[rows])


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_compile_with_a_static_cache(name, padding):
    model = build(name)
    torch._dynamo.reset()

    def decode(forward):
        cache, mask, outs = transformers.StaticCache(config=model.config, max_cache_len=20), MASKS[padding], []
        model(input_ids=IDS, attention_mask=mask, **{CACHE: cache})
        for step in range(4):
            mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            outs.append(forward(input_ids=IDS[:, step : step + 1], attention_mask=mask, **{CACHE: cache}).logits)
        return torch.cat(outs, 1)

    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = decode(model)
        model.set_attn_implementation("rowmax")
        actual = decode(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(actual, expected)


# ---- the mask, element by element ----------------------------------------------------------------------------------


@st.composite
def mask_calls(draw):
    """Arguments of a mask function as caches make them: growing, windowed and static; padding anywhere but in the middle."""
    batch, q_length, past = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(0, 8))
    window, chunked = draw(st.none() | st.integers(1, 6)), draw(st.booleans())
    function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    call = {"batch_size": batch, "q_length": q_length, "mask_function": function, "kv_offset": 0, "q_offset": past}
    cache = draw(st.sampled_from(["grow", "static"] + ["window"] * (window is not None)))
    if cache == "window":
        call["kv_offset"] = max(past - window + 1, 0)
    call["kv_length"] = past + q_length - call["kv_offset"]
    if cache == "static":
        call["kv_length"] += draw(st.integers(0, 4))
        if past:
            call["q_offset"] = torch.tensor(past)
    if draw(st.booleans()):
        positions = torch.arange(past + q_length)
        ends = [sorted(draw(st.tuples(*[st.integers(0, past + q_length)] * 2))) for _ in range(batch)]
        call["attention_mask"] = torch.stack([(positions >= start) & (positions < end) for start, end in ends])
    if chunked and window is not None:  # chunks begin behind the padding
        padding = torch.zeros(batch, dtype=torch.long)
        if "attention_mask" in call:
            padding = (call["attention_mask"].cumsum(-1) == 0).sum(-1)
        call["mask_function"] = masks.chunked_causal_mask_function(window, padding)
    return call


@pytest.mark.parametrize("stored", ["tokens", "heads"])
@settings(max_examples=150, deadline=None)
@given(call=mask_calls())
def test_exactly_the_keys_of_the_dense_mask(stored, call):
    """Zero queries weigh all visible keys alike, and one-hot values say which they were."""
    assert_dense(call, stored)


def assert_dense(call, stored: str) -> None:
    expected = masks.sdpa_mask(**call, allow_is_causal_skip=False)  # [B, 1, Tq, Tk]
    assert torch.equal(visible(integration.make_mask(**call), call, stored), expected & real_queries(call))


def visible(mask, call, stored: str) -> torch.Tensor:
    """`[B, 1, Tq, Tk]`: which keys `attend` reads; query heads must agree."""
    batch, len_q, len_k = call["batch_size"], call["q_length"], call["kv_length"]
    with torch.device(call.get("device", "cpu")):
        query = torch.zeros(batch, len_q, 4, 8).transpose(1, 2)
        key, value = torch.zeros(batch, len_k, 2, 8), torch.eye(32)[:len_k, None].expand(batch, len_k, 2, 32).contiguous()
    if stored == "heads":  # as a cache does
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    out, weights = integration.attend(torch.nn.Module(), query, key.transpose(1, 2), value.transpose(1, 2), mask, scaling=0.5)
    assert weights is None
    assert out.shape == (batch, len_q, 4, 32)
    seen = out[..., :len_k] > 0
    assert torch.equal(seen, seen[:, :, :1].expand_as(seen))
    return seen[:, :, :1].transpose(1, 2)


def real_queries(call) -> torch.Tensor:
    """`[B, 1, Tq, 1]`: queries that are not padding; the others read nothing."""
    padding, past = call.get("attention_mask"), int(call["q_offset"])
    if padding is None:
        return torch.ones(call["batch_size"], 1, call["q_length"], 1, dtype=torch.bool, device=call.get("device"))
    return padding[:, None, past : past + call["q_length"], None]


@pytest.mark.parametrize("window", [None, 3])
def test_bidirectional_masks(window):
    function = masks.bidirectional_mask_function if window is None else masks.sliding_window_bidirectional_mask_function(window)
    call = {"batch_size": 2, "q_length": 12, "kv_length": 12, "q_offset": 0, "mask_function": function}
    for padding in (None, LEFT.bool(), RIGHT.bool()):
        call["attention_mask"] = padding
        expected = masks.sdpa_mask(**call, allow_is_causal_skip=False)
        if window is not None:  # without a window padded queries read what the others read, as in eager
            expected = expected & real_queries(call)
        assert torch.equal(visible(integration.make_mask(**call), call, "tokens"), expected)


def test_masks_are_small():
    long = {"batch_size": 4, "q_length": 32768, "kv_length": 32768}
    padding = torch.ones(4, 32768, dtype=torch.bool)
    assert integration.make_mask(**long) is None
    assert integration.make_mask(**long, attention_mask=padding) is None
    padding[0, :5] = False
    for function in (masks.causal_mask_function, masks.sliding_window_causal_mask_function(1024)):
        mask = integration.make_mask(**long, mask_function=function, attention_mask=padding)
        assert mask.untyped_storage().nbytes() <= 4 * 10 * 4


def one_of_each(device: str) -> dict[str, dict]:
    """A call for each form that a mask travels in."""
    padding = torch.ones(2, 12, dtype=torch.bool, device=device)
    padding[0, :3] = False
    ids = torch.arange(12, device=device).expand(2, 12) // 5
    packed = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(ids))
    square = {"batch_size": 2, "q_length": 12, "kv_length": 12, "q_offset": 0, "device": device}
    return {
        "plain": square,
        "window": {**square, "mask_function": masks.sliding_window_causal_mask_function(4)},
        "padded": {**square, "attention_mask": padding},
        "packed": {**square, "mask_function": packed},
        "static": {**square, "q_length": 3, "kv_length": 16, "q_offset": torch.tensor(9, device=device)},
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["plain", "window", "padded", "packed", "static"])
@pytest.mark.parametrize("stored", ["tokens", "heads"])
def test_every_form_of_mask(stored, form, device):
    assert_dense(one_of_each(device)[form], stored)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "window", "padded", "packed", "static"])
def test_layers_never_wait_for_the_gpu(form):
    """Nor does the mask, but where there is padding (read once) or packing (counted once), before the layers."""
    call = one_of_each("cuda")[form]
    mask = integration.make_mask(**call)
    visible(mask, call, "heads")  # compiles the kernels
    lengths = ((4, call["q_length"]), (2, call["kv_length"]), (2, call["kv_length"]))
    tensors = [torch.randn(2, heads, length, 8, device="cuda") for heads, length in lengths]
    try:
        torch.cuda.set_sync_debug_mode("error")
        integration.attend(torch.nn.Module(), *tensors, mask)
        if form not in ("padded", "packed"):
            integration.make_mask(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", ["plain", "window", "padded", "packed"])
def test_dropout_drops_some_weights_and_keeps_the_mean(form):
    call = one_of_each("cpu")[form]
    mask = integration.make_mask(**call)
    lengths = ((4, call["q_length"]), (2, call["kv_length"]), (2, call["kv_length"]))
    tensors = [torch.randn(2, heads, length, 8, generator=torch.Generator().manual_seed(0)) for heads, length in lengths]
    torch.manual_seed(0)
    want, _ = integration.attend(torch.nn.Module(), *tensors, mask)
    many = torch.stack([integration.attend(torch.nn.Module(), *tensors, mask, dropout=0.3)[0] for _ in range(200)])
    assert bool(((many.mean(0) - want).abs() <= 6 * many.std(0) / 200**0.5 + 1e-5).all())
    assert float(many.std(0).max()) > 0.01


# ---- refused -------------------------------------------------------------------------------------------------------


def layer(**kwargs):
    tensors = [torch.randn(1, heads, 6, 8) for heads in (4, 2, 2)]
    return integration.attend(torch.nn.Module(), *tensors, kwargs.pop("attention_mask", None), **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position bias"),
        ({"indices": torch.zeros(1, 6, 2, dtype=torch.long)}, "sparse"),
        ({"output_attentions": True}, "eager"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "no dense masks"),
        ({"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}, "no dense masks"),
        ({"attention_mask": torch.ones(1, 4, 6, 10, dtype=torch.int32)}, "no dense masks"),
        ({"attention_mask": torch.ones(1, 6)}, "no dense masks"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_layers_refuse(kwargs, says):
    with pytest.raises(Unsupported, match=says):
        layer(**kwargs)


def test_models_refuse():
    llama = build("llama")
    llama.set_attn_implementation("rowmax")
    with pytest.raises(Unsupported, match="pad on the left"):  # the padding ends up in the middle
        llama.generate(IDS, attention_mask=RIGHT, max_new_tokens=3)
    with pytest.raises(Unsupported, match="no dense masks"):
        llama(IDS, attention_mask=torch.zeros(BATCH, 1, LENGTH, LENGTH))


def test_masks_refuse():
    call = {"batch_size": 1, "q_length": 6, "kv_length": 6}
    other = (
        masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function),
        masks.chunked_overlay(2, torch.zeros(1, dtype=torch.long)),
        masks.and_masks(
            masks.sliding_window_causal_mask_function(3), masks.chunked_overlay(2, torch.zeros(1, dtype=torch.long))
        ),
        masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k % 2 == 0),
        lambda b, h, q, k: q <= k,
        lambda b, h, q, k: (k <= q) | (k == 0),
        lambda b, h, q, k: True,
    )
    for function in other:
        with pytest.raises(Unsupported):
            integration.make_mask(**call, mask_function=function)
    with pytest.raises(Unsupported):  # from the user: not known to be a function of indices
        integration.make_mask(**call, mask_function=masks.causal_mask_function, use_vmap=True)
    holes = torch.tensor([[True, False, True, True, True, True]])
    with pytest.raises(Unsupported, match="contiguous"):
        integration.make_mask(**call, attention_mask=holes)
    with pytest.raises(Unsupported, match="covers"):
        integration.make_mask(**call, attention_mask=torch.ones(1, 4, dtype=torch.bool))


def test_a_layer_and_a_mask_that_disagree():
    mask = integration.make_mask(1, 6, 6, mask_function=masks.sliding_window_causal_mask_function(3))
    assert mask is not None
    layer(attention_mask=mask, sliding_window=3)
    layer(attention_mask=mask)
    with pytest.raises(Unsupported, match="sliding_window=4"):
        layer(attention_mask=mask, sliding_window=4)
    padded = torch.ones(1, 6, dtype=torch.bool)
    padded[0, 0] = False
    mask, cu_seqlens = integration.make_mask(1, 6, 6, attention_mask=padded), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(Unsupported, match="cu_seq_lens"):
        layer(attention_mask=mask, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
