"""Second order: a backward through the backward, forward mode, and their mixtures, against fp64 and by finite differences."""

import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rowmax
import score_mods
from rowmax import Problem, Unsupported, ops, ops_second, reference, second_order, testing
from rowmax.numerics import UNIT_ROUNDOFF
from rowmax.plan.tile import Tile

DENSE = {
    "full": "b1 h2/1 q5 k7 d3/2 fp64",
    "causal": "b2 h4/2 q6 k9 d3 fp64 causal scale=0.7",
    "rows that see nothing": "b1 h2 q9 k5 d4 fp64 causal",
    "window": "b1 h2/1 q8 k8 d3 fp64 window(2,1)",
    "no keys": "b2 h2 q3 k0 d4 fp64",
}
PACKED = {"packed": "b4 h2/1 q11 k13 d3 fp64 packed causal", "rows of no sequence": "b2 h2 q9 k9 d3 fp64 packed window(1,1)"}
PROBLEMS = {**DENSE, **PACKED}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a few rows and keys are several tiles."""
    monkeypatch.setitem(second_order.TILES, "cpu", Tile(4, 8))


def make(text, seed=0):
    """`(problem, ours, definition, inputs, direction)`: both functions of (q, k, v) give (out, lse)."""
    problem = Problem.parse(text)
    lengths = ((4, 4), (3, 2)) if text == PACKED["rows of no sequence"] else None
    operands = testing.operands(problem, seed=seed, lengths=lengths)
    cu = operands[3:5]
    options = {"left": problem.band.left, "right": problem.band.right, "scale": problem.scale}

    def finite(out, lse):  # rows that see nothing have no derivatives
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    def ours(q, k, v):
        return finite(*testing.attend(problem, operands._replace(q=q, k=k, v=v)))

    def definition(q, k, v):
        if cu[0] is None:
            return finite(*reference.attention(q, k, v, **options))
        return finite(*reference.attention_varlen(q, k, v, *cu, **options))

    generator = torch.Generator().manual_seed(seed + 7)
    direction = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in operands[:3])
    return problem, ours, definition, tuple(operands[:3]), direction


def curved(results):
    """A number that depends on the output and the LSE, not linearly."""
    return sum(((t * 1.3).sin() * torch.linspace(0.5, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in results)


def backward_through_backward(attend, inputs, direction):
    leaves = [t.detach().requires_grad_() for t in inputs]
    unused = {"allow_unused": True, "materialize_grads": True}  # the LSE does not depend on v
    grads = torch.autograd.grad(curved(attend(*leaves)), leaves, create_graph=True, **unused)
    along = sum((grad * t).sum() for grad, t in zip(grads, direction, strict=True))
    return torch.autograd.grad(along, leaves, **unused)


def forward_mode(attend, inputs, direction):
    return torch.func.jvp(attend, inputs, direction)[1]


def forward_mode_of_gradient(attend, inputs, direction):
    gradient = torch.func.grad(lambda *x: curved(attend(*x)), tuple(range(len(inputs))))
    return torch.func.jvp(gradient, inputs, direction)[1]


def gradient_of_forward_mode(attend, inputs, direction):
    """As a loss on how fast a model's result changes."""
    every = tuple(range(len(inputs)))
    return torch.func.grad(lambda *x: curved(torch.func.jvp(attend, x, direction)[1]), every)(*inputs)


def mean_flow(attend, inputs, direction):
    """The loss of mean flows: a prediction against a target made of how the prediction changes; weights outside of `jvp`."""
    weights = [torch.full((), 1.5, dtype=t.dtype, requires_grad=True) for t in inputs]

    def model(*x):
        return attend(*(t * weight for t, weight in zip(x, weights, strict=True)))

    (out, lse), (t_out, t_lse) = torch.func.jvp(model, inputs, direction)
    loss = (out - 0.3 * t_out.detach()).square().sum() + (lse * t_lse).sum()
    return torch.autograd.grad(loss, weights)


MIXTURES = (forward_mode, forward_mode_of_gradient, gradient_of_forward_mode, backward_through_backward, mean_flow)


def close(results, wanted, what):
    for got, want in zip(results, wanted, strict=True):
        error, size = (got - want).abs().max() if want.numel() else 0.0, want.abs().max() if want.numel() else 0.0
        assert error <= 1e-11 * (1 + size), f"{what}: off by {float(error):.1e} of {float(size):.1e}"


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("text", PROBLEMS.values(), ids=PROBLEMS)
def test_fp64_is_the_definition(text, mixture):
    """Autograd through the dense definition; several tiles."""
    _, ours, definition, inputs, direction = make(text)
    close(mixture(ours, inputs, direction), mixture(definition, inputs, direction), text)


@pytest.mark.parametrize("text", ["b1 h2/1 q4 k6 d2 fp64 causal", PACKED["rows of no sequence"]])
def test_finite_differences_of_the_gradients(text):
    _, ours, _, inputs, _ = make(text)
    leaves = tuple(t.requires_grad_() for t in inputs)
    assert torch.autograd.gradgradcheck(ours, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, fast_mode=True)


def test_plain_forward_mode_without_torch_func():
    """`torch.autograd.forward_ad`: gradients of primals and tangents together, and gradients that carry tangents."""
    _, ours, definition, inputs, direction = make(DENSE["causal"])
    leaves = [t.requires_grad_() for t in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, along) for t, along in zip(leaves, direction, strict=True)]
        pairs = [forward_ad.unpack_dual(t) for t in ours(*duals)]
        both = torch.autograd.grad(sum(curved(list(pair)) for pair in pairs), leaves, retain_graph=True)
        grads = torch.autograd.grad(curved(ours(*duals)), leaves)
        tangents = [forward_ad.unpack_dual(grad).tangent for grad in grads]

    def together(*x):
        results, changes = torch.func.jvp(definition, x, direction)
        return sum(curved([one, other]) for one, other in zip(results, changes, strict=True))

    plain = tuple(t.detach() for t in inputs)
    close(both, torch.func.grad(together, (0, 1, 2))(*plain), "both")
    close(tangents, forward_mode_of_gradient(definition, plain, direction), "tangents of gradients")


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (0, 2)])
def test_a_direction_may_belong_to_some_inputs_only(subset):
    _, ours, definition, inputs, direction = make(DENSE["window"])

    def some(attend):
        def of(*chosen):
            every = list(inputs)
            for i, t in zip(subset, chosen, strict=True):
                every[i] = t
            return attend(*every)

        return of

    chosen, along = ([t[i] for i in subset] for t in (inputs, direction))
    for mixture in (forward_mode, backward_through_backward):
        results = mixture(some(ours), tuple(chosen), tuple(along))
        close(results, mixture(some(definition), tuple(chosen), tuple(along)), subset)


def test_the_output_alone_and_the_lse_alone():
    _, ours, definition, inputs, direction = make(DENSE["causal"])
    for part in (0, 1):
        for mixture in (forward_mode_of_gradient, gradient_of_forward_mode, backward_through_backward):

            def one(attend, part=part):
                return lambda *x: (attend(*x)[part],)

            close(mixture(one(ours), inputs, direction), mixture(one(definition), inputs, direction), part)


@pytest.mark.parametrize(
    "text", ["b1 h4/2 q40 k56 d16 bf16 causal", "b1 h2 q40 k40 d32 fp16 window(9,3)", "b2 h2 q30 k30 d8 fp32"]
)
def test_other_types_err_no_more_than_the_dense_computation_in_them(text):
    """At most twice as far from fp64 as dense attention in the same type and rounding; in fp32 the rule's 16 units."""
    problem, ours, definition, inputs, direction = make(text)
    wide = [tuple(t.double() for t in some) for some in (inputs, direction)]
    for mixture in (forward_mode, backward_through_backward):
        exact = mixture(definition, *wide)
        found, same = (mixture(attend, inputs, direction) for attend in (ours, definition))
        for got, dense, want in zip(found, same, exact, strict=True):
            error, allowed = (got.double() - want).abs().max(), (dense.double() - want).abs().max()
            units = 16 if problem.dtype_name == "fp32" else 1
            rounding = units * UNIT_ROUNDOFF[problem.dtype_name] * want.abs().max()
            assert error <= 2 * allowed + rounding, f"{mixture.__name__}: {float(error):.1e}, dense {float(allowed):.1e}"


def test_large_tiles_give_what_small_ones_give(monkeypatch):
    _, ours, _, inputs, direction = make("b2 h4/2 q33 k40 d8 fp64 window(20,3)")
    small = [mixture(ours, inputs, direction) for mixture in MIXTURES]
    monkeypatch.setitem(second_order.TILES, "cpu", Tile(256, 4096))
    for mixture, want in zip(MIXTURES, small, strict=True):
        close(mixture(ours, inputs, direction), want, mixture.__name__)


class _Memory(TorchDispatchMode):
    """The most bytes that tensors made inside take at one time."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self._seen = 0, 0, set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self._seen:
                storage = t.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._seen.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key, size):
        self._seen.discard(key)
        self.now -= size


def test_memory_is_linear_in_the_length(monkeypatch):
    """Of all three computations, tensor by tensor: twice the length takes twice as much, and less than one score matrix."""
    monkeypatch.setitem(second_order.TILES, "cpu", Tile(64, 1024))
    most = {}
    for length in (1024, 2048):
        problem = Problem.parse(f"b1 h2 q{length} k{length} d16 fp32 causal")
        operands = testing.operands(problem)
        out, lse = testing.attend(problem, operands)
        given = (*testing.cotangents(problem), out, lse)
        direction = second_order.Direction(*operands[:3], None)
        runs = {
            "forward mode": lambda *a: second_order.forward_mode(*a[:2], *a[2][2:], a[3]),
            "derivatives": lambda *a: second_order.derivatives(*a[:2], *a[2], a[3], (True, True, True, False)),
            "backward mode": lambda *a: second_order.backward_mode(*a[:2], a[2], a[2], a[3]),
        }
        for name, run in runs.items():
            with _Memory() as memory:
                run(problem, operands, given, direction)
            most[name, length] = memory.most
            assert memory.most < 4 * 2 * length**2, f"{name}: {memory.most} bytes"
    for name in runs:
        assert most[name, 2048] <= 2.05 * most[name, 1024], f"{name}: {most}"


def test_hidden_values_have_no_effect():
    """NaN in keys that nobody sees, and in queries that see nothing."""
    for text, names, hidden in (("b1 h2 q4 k20 d4 fp64 window(3,0)", "kv", 10), ("b1 h2 q9 k4 d4 fp64 causal", "q", 5)):
        _, ours, _, inputs, direction = make(text)
        dirty = [t.clone() for t in inputs]
        for name in names:
            dirty["qkv".index(name)][:, :hidden] = torch.nan
        for mixture in (forward_mode, backward_through_backward, forward_mode_of_gradient):
            close(mixture(ours, tuple(dirty), direction), mixture(ours, inputs, direction), text)


def test_third_order_and_nested_forward_mode_say_that_they_are_missing():
    _, ours, _, inputs, direction = make(DENSE["full"])
    leaves = [t.detach().requires_grad_() for t in inputs]
    grads = torch.autograd.grad(curved(ours(*leaves)), leaves, create_graph=True)
    again = torch.autograd.grad(curved(grads), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="third-order"):
        torch.autograd.grad(curved(again), leaves)
    with pytest.raises(NotImplementedError, match="forward mode within forward mode"):
        forward_mode(lambda *x: forward_mode(ours, x, direction), inputs, direction)
    with pytest.raises(NotImplementedError, match="third-order"):
        forward_mode(lambda *x: backward_through_backward_func(ours, x, direction), inputs, direction)


def backward_through_backward_func(attend, inputs, direction):
    gradient = torch.func.grad(lambda *x: curved(attend(*x)), (0, 1, 2))
    return torch.func.vjp(gradient, *inputs)[1](direction)


def test_vmap_keeps_gradients():
    """Also when what is mapped over needs a gradient outside."""
    _, _, definition, (q, k, v), _ = make("b3 h2 q5 k5 d4 fp64")
    attend = torch.func.vmap(lambda *x: rowmax.attention(*(t.unsqueeze(0) for t in x)).squeeze(0))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
    close(grads, torch.autograd.grad(definition(*leaves)[0].sin().sum(), leaves), "vmap")


def test_compiled_forward_mode():
    """In one graph, with gradients of the primals."""
    *_, inputs, direction = make("b1 h2 q6 k6 d8 fp32 causal")

    def step(*x):
        out, t_out = torch.func.jvp(lambda *y: rowmax.attention(*y, causal=True), x, direction)
        return (out - t_out.detach()).square().sum()

    leaves = [t.requires_grad_() for t in inputs]
    torch._dynamo.reset()
    grads = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    for got, want in zip(grads, torch.autograd.grad(step(*leaves), leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_operators_pass_the_library_s_checks():
    problem = Problem.parse("b1 h2/1 q5 k6 d4 fp32 causal")
    operands = testing.operands(problem)
    out, lse = testing.attend(problem, operands)
    given = (*testing.cotangents(problem), out, lse)
    call = (*operands[:3], *(None,) * 12, 0, False, "", 0.0, 0.0, "", None, None, None)
    along = (*operands[:3], None, None)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops_second.FORWARD_MODE, (out, lse, *along, *call), test_utils=utils)
    torch.library.opcheck(ops_second.DERIVATIVES, ((True, False, True, False), *given, *along, *call), test_utils=utils)
    torch.library.opcheck(ops_second.BACKWARD_MODE, (*given, *given, *along, *call), test_utils=utils)


def test_the_first_order_does_not_come_here(monkeypatch):
    def never():
        raise AssertionError("the second order's module was asked for")

    monkeypatch.setattr(ops, "second", never)
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    rowmax.attention(q, q, q).sum().backward()
    with torch.no_grad():
        rowmax.attention(q, q, q)


def test_precision_flags_are_put_back(monkeypatch):
    """fp32 on a GPU: no TF32 inside, and afterwards what was allowed before."""
    matmul = torch.backends.cuda.matmul
    problem, *_ = make("b1 h1 q2 k2 d2 fp32")

    class On:
        type = "cuda"

    class Somewhere:
        device = On

    operands = testing.operands(problem)._replace(q=Somewhere)
    before = matmul.allow_tf32
    try:
        for allowed in (True, False):
            matmul.allow_tf32 = allowed
            with second_order._ieee_products(problem, operands):
                assert matmul.fp32_precision != "tf32"
            assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before


# ---- soft-cap, ALiBi, sinks ----------------------------------------------------------------------------------------

BENT = {
    "soft-cap": "b2 h4/2 q6 k9 d3 fp64 causal softcap=1.5",
    "alibi": "b1 h2 q8 k8 d3 fp64 window(3,1) alibi",
    "sink": "b2 h2 q9 k5 d3 fp64 causal sink",
    "all, packed": "b3 h4/2 q12 k10 d3 fp64 packed causal softcap=2.0 alibi(batch) sink",
    "no keys": "b2 h2 q3 k0 d3 fp64 sink",
}


@pytest.mark.parametrize("text", BENT.values(), ids=BENT)
def test_bent_scores(text):
    """With the results of the first order put together as autograd would: all of q, k, v and the sink."""
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    cu, options = operands[3:5], {"softcap": problem.softcap, "slopes": operands.slopes}
    leaves = [t.clone() for t in (*operands[:3], *([operands.sink] if problem.sink else []))]
    generator = torch.Generator().manual_seed(3)
    direction = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in leaves)
    grads = testing.cotangents(problem)

    def definition(q, k, v, sink=None):
        given = {"left": problem.band.left, "right": problem.band.right, "scale": problem.scale, "sink": sink, **options}
        found = reference.attention(q, k, v, **given) if cu[0] is None else reference.attention_varlen(q, k, v, *cu, **given)
        return found[0], torch.where(torch.isneginf(found[1]), 0.0, found[1])

    def along(*x):
        return sum((a * b).sum() for a, b in zip(definition(*x), grads, strict=True))

    out, lse = testing.attend(problem, operands)
    given, moved = (*grads, out, lse), second_order.Direction(*direction[:3], direction[3] if problem.sink else None)
    t_given = second_order.forward_mode(problem, operands, out, lse, moved)
    finite = (t_given[0], torch.where(torch.isneginf(lse), 0.0, t_given[1]))
    close(finite, torch.func.jvp(definition, tuple(leaves), direction)[1], "forward mode")

    every = tuple(range(len(leaves)))
    wanted = torch.func.jvp(torch.func.grad(along, every), tuple(leaves), direction)[1]
    nothing = (torch.zeros_like(out), torch.zeros_like(lse))
    found = second_order.backward_mode(problem, operands, given, (*nothing, *t_given), moved)
    close(found[: len(leaves)], wanted, "backward mode")

    by = second_order.derivatives(problem, operands, *given, moved, (True, True, True, False))
    close((by[0], torch.where(torch.isneginf(lse), 0.0, by[1])), finite, "by the gradients of the results")
    numbers = (problem.max_len_q, problem.max_len_k, problem.scale, *problem.band, False, "", problem.softcap)
    tensors = (*operands[:5], operands.slopes, operands.sink)
    through = torch.ops.rowmax.backward_scored([True, True, True, problem.sink], by[2], by[3], out, lse, *tensors, *numbers)
    close([a + b for a, b in zip(by[4:8], through, strict=True)][: len(leaves)], wanted, "derivatives")


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("text", BENT.values(), ids=BENT)
def test_bent_scores_by_the_public_calls(text, mixture):
    """Of q, k, v; the sink stays."""
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    given = {"left": problem.band.left, "right": problem.band.right, "scale": problem.scale, "softcap": problem.softcap}
    given |= {"slopes": operands.slopes, "sink": operands.sink}

    def finite(out, lse):
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    def ours(q, k, v):
        return finite(*testing.attend(problem, operands._replace(q=q, k=k, v=v)))

    def definition(q, k, v):
        if not problem.packed:
            return finite(*reference.attention(q, k, v, **given))
        return finite(*reference.attention_varlen(q, k, v, *operands[3:5], **given))

    generator = torch.Generator().manual_seed(3)
    direction = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in operands[:3])
    results = mixture(ours, tuple(operands[:3]), direction)
    close(results, mixture(definition, tuple(operands[:3]), direction), text)


def test_a_sink_gets_its_gradients_of_second_order():
    problem = Problem.parse("b1 h2 q4 k5 d3 fp64 causal softcap=1.5 sink")
    operands = testing.operands(problem)
    leaves = tuple(t.detach().clone().requires_grad_() for t in (*operands[:3], operands.sink))

    def ours(q, k, v, sink):
        return testing.attend(problem, operands._replace(q=q, k=k, v=v, sink=sink))

    assert torch.autograd.gradgradcheck(ours, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_a_sink_of_minus_infinity_is_none():
    """Of one head, also where its rows see nothing; the other heads keep theirs."""
    problem = Problem.parse("b1 h2 q9 k5 d3 fp64 causal sink")
    operands = testing.operands(problem)
    operands = operands._replace(sink=torch.tensor([-torch.inf, 0.5], dtype=torch.float64))
    direction = second_order.Direction(*(torch.ones_like(t) for t in operands[:3]), torch.ones(2, dtype=torch.float64))
    found = []
    for sink in (operands.sink, None):
        one, given = problem.with_(sink=sink is not None), operands._replace(sink=sink)
        out, lse = testing.attend(one, given)
        moved = second_order.forward_mode(
            one, given, out, lse, direction._replace(sink=None if sink is None else direction.sink)
        )
        found.append((moved[0][:, :, 0], moved[1][:, 0]))
    close(found[0], found[1], "head 0")


def test_huge_scores_stay_finite():
    """Scores of 1e11, whose rounding alone exceeds the range of the exponential."""
    _, ours, _, inputs, _ = make("b1 h2 q40 k70 d64 fp32 causal")
    inputs = tuple(torch.full_like(t, 133120.0) for t in inputs)
    along = tuple(torch.ones_like(t) for t in inputs)
    for t in (*forward_mode(ours, inputs, along), *backward_through_backward(ours, inputs, along)):
        assert bool(torch.isfinite(t).all())


# ---- biases, masks, dropout, score_mod -----------------------------------------------------------------------------

PAIRED = {
    "bias": "b2 h4/2 q6 k9 d3 fp64 causal softcap=1.5 bias(hqk)",
    "broadcast bias and sink": "b2 h2 q7 k9 d3 fp64 sink bias(bk)",
    "mask": "b2 h2/1 q9 k6 d3/2 fp64 mask(bqk)",
    "both": "b2 h4/2 q8 k8 d3 fp64 window(5,2) alibi bias(q) mask(hqk)",
    "dropout": "b2 h4/2 q6 k9 d3 fp64 causal bias(1) dropout=0.3",
    "mod": "b2 h4/2 q6 k9 d3 fp64 causal softcap=1.5 bias(qk) mask(k) mod(everything)",
    "a mod alone": "b1 h2 q9 k6 d3 fp64 causal mod(everything)",
    "packed": "b2 h4/2 q12 k10 d3 fp64 packed causal dropout=0.2 mod(everything)",
    "sink tokens": "b1 h2 q9 k12 d3 fp64 window(2,0) sink_tokens=2",
}


def paired(text, seed=0):
    """As `make`, also of the bias, which is finite here: products of -inf are no derivatives."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, seed=seed)
    generator = torch.Generator().manual_seed(seed + 5)
    inputs = list(operands[:3])
    if operands.bias is not None:
        inputs.append(torch.randn(operands.bias.shape, generator=generator, dtype=torch.float64))
        operands = operands._replace(bias=inputs[3])
    sequences = testing.pieces.split(problem, operands)[0]

    def finite(out, lse):
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    def ours(*x):
        return finite(*testing.attend(problem, operands._replace(**dict(zip(("q", "k", "v", "bias"), x, strict=False)))))

    def definition(q, k, v, bias=None):
        """Sequence by sequence, as the acceptance rule has it."""
        outs, lses = [], []
        for sequence in sequences:
            for piece in sequence.pieces:
                lead = () if problem.packed else piece.where[0]
                added = None if operands.slopes is None else reference.alibi(operands.slopes, problem.len_q, problem.len_k)
                if bias is not None:
                    own = bias[lead if bias.shape[0] > 1 else 0]
                    added = own if added is None else added + own
                seen = piece.seen
                if operands.mask is not None:
                    seen = reference.visible(problem.len_q, problem.len_k, *problem.band)
                    seen = seen & operands.mask[lead if operands.mask.shape[0] > 1 else 0]
                out, lse = reference.attention(
                    *(t[where][None] for t, where in ((q, piece.where), (k, sequence.keys), (v, sequence.keys))),
                    scale=problem.scale,
                    seen=seen,
                    softcap=problem.softcap,
                    bias=added,
                    sink=operands.sink,
                    kept=piece.kept,
                    dropout_p=problem.dropout,
                    score_mod=None if piece.mod is None else piece.mod.bend,
                )
                outs.append(out[0])
                lses.append(lse[0])
        if problem.packed:
            return finite(torch.cat(outs), torch.cat(lses, 1))
        return finite(torch.stack(outs), torch.stack(lses))

    direction = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in inputs)
    return problem, ours, definition, tuple(inputs), direction


@pytest.mark.parametrize("text", PAIRED.values(), ids=PAIRED)
def test_what_hides_adds_drops_and_bends(text):
    """All mixtures, with the bias among what they differentiate by."""
    _, ours, definition, inputs, direction = paired(text)
    for mixture in MIXTURES:
        close(mixture(ours, inputs, direction), mixture(definition, inputs, direction), f"{mixture.__name__} of '{text}'")


@pytest.mark.parametrize("text", ["b1 h2/1 q3 k4 d2 fp64 causal bias(hqk) mask(k) dropout=0.3", "b1 h2 q3 k3 d2 fp64 bias(k)"])
def test_finite_differences_with_a_bias(text):
    _, ours, _, inputs, _ = paired(text)
    leaves = tuple(t.requires_grad_() for t in inputs)
    assert torch.autograd.gradgradcheck(ours, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, fast_mode=True)


def test_hidden_pairs_have_no_effect_to_second_order():
    """NaN in what a mask hides from all; a bias of -inf hides alike."""
    mask = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 3:5] = mask[:, :, 4] = False
    _, _, _, inputs, direction = make("b2 h4/2 q9 k12 d3 fp64")
    dirty = [t.clone() for t in inputs]
    dirty[1][:, 3:5] = dirty[2][:, 3:5] = torch.nan
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)

    def attend(**options):
        def of(*x):
            out, lse = rowmax.attention(*x, return_lse=True, **options)
            return out, torch.where(torch.isneginf(lse), 0.0, lse)

        return of

    for mixture in (forward_mode, backward_through_backward, forward_mode_of_gradient, gradient_of_forward_mode):
        wanted = mixture(attend(mask=mask), inputs, direction)
        for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "score_mod": score_mods.EVERYTHING(0.0, 0.0)}):
            if "score_mod" in options:  # it scales each sequence's scores
                wanted = mixture(attend(**options), inputs, direction)
            close(mixture(attend(**options), tuple(dirty), direction), wanted, f"{mixture.__name__} {list(options)}")


def test_a_mod_for_kernels_alone_has_no_second_order():
    alone = rowmax.ScoreMod(score_mods.distance, score_mods.one, name="alone")
    problem = Problem.parse(f"b1 h2 q3 k4 d3 fp32 mod({alone.key})")
    operands = testing.operands(problem)
    out, lse = torch.zeros(1, 3, 2, 3), torch.zeros(1, 2, 3)
    with pytest.raises(Unsupported, match="without reference="):
        second_order.forward_mode(problem, operands, out, lse, second_order.Direction(*operands[:3]))
