"""Scores bent by a function of the caller's own: a pair of Triton functions for GPUs, a torch function for the CPU.

    x_ij = f(s_ij, sequence, head, i + len_k - len_q, j, *numbers),    dx_ij/ds_ij = f'(the same)

s_ij is the score after the scale and the soft-cap. `problem` spells a mod by its key, `mod(name)`, as operators take it; `find`
gives it back. The CPU path, the kernels' launcher and the plan ask here. Imports no Triton: what is jitted arrives jitted.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

import torch

from rowmax.errors import ProblemError

KEY = r"[A-Za-z_]\w*(?:#\d+)?"  # the second mod of a name is `name#2`
GIVEN = ("score", "batch", "head", "row", "col")  # what every function takes first
MOST = 1000  # mods of one process: more are made in a loop, and every one would compile kernels of its own

_made: dict[str, "ScoreMod"] = {}  # by key, for as long as the process: graphs of autograd and compiled code hold keys


class ScoreMod:
    """A function of scores, made once, best at the top of a module, and given to `attention(..., score_mod=...)`.

        distance = rowmax.ScoreMod(forward, backward, name="distance", reference=in_torch)
        rowmax.attention(q, k, v, score_mod=distance(0.5))  # numbers of its own: distance(...), none: distance

    Args:
        forward: `@triton.jit`, takes `(score, batch, head, row, col, *numbers)` and gives the new score. `score` is a tile in
            fp32, natural units, `row` and `col` are int32 indices that broadcast to it, the others scalars. Element by element:
            each result depends on its own score and indices alone. `row` counts as keys do, `i + Tk - Tq` for query i, so that
            `row - col` is the distance from the diagonal; `col` is the key's number, `head` the query head's, `batch` the
            sequence's, packed or not.
        backward: `@triton.jit`, takes the same and gives the derivative of `forward` by the score. None: no gradients on a GPU.
        name: an identifier: how `rowmax.plan`, errors and the log spell it.
        reference: the same function in torch, for the CPU, `rowmax.reference` and derivatives of second order: on tensors that
            broadcast to the score. None: refused there. With `forward` None it is the whole mod, for the CPU alone.
        derivative: that of `reference` by the score; None: by autograd.

    Scores that nobody sees pass through the functions too, and what comes out has no effect. -inf as a new score is a weight
    of 0. Gradients flow through the scores to q and k, and none to numbers.

    Raises:
        ProblemError: the functions take different arguments, or are none.
    """

    def __init__(
        self,
        forward: Any = None,
        backward: Any = None,
        *,
        name: str,
        reference: Optional[Callable] = None,
        derivative: Optional[Callable] = None,
    ):
        if not isinstance(name, str) or not name.isidentifier():
            raise ProblemError(f"a score_mod's name must be an identifier, like 'distance'; got {name!r}.")
        if forward is None and reference is None:
            raise ProblemError(f"score_mod '{name}' needs forward (a @triton.jit function), reference (in torch), or both.")
        if (backward is not None and forward is None) or (derivative is not None and reference is None):
            raise ProblemError(f"score_mod '{name}' has a derivative of a function that it has not: give that function too.")
        for what, function in (("forward", forward), ("backward", backward)):
            if function is not None and not (hasattr(function, "arg_names") and hasattr(function, "fn")):
                raise ProblemError(
                    f"{what} of score_mod '{name}' must be a function decorated with @triton.jit; got "
                    f"{type(function).__name__}. A torch function is passed as reference."
                )
        for what, function in (("reference", reference), ("derivative", derivative)):
            if function is not None and (not callable(function) or hasattr(function, "arg_names")):
                raise ProblemError(f"{what} of score_mod '{name}' must be a function of torch tensors; got {function!r}.")
        if backward is not None and forward is not backward and _place(forward) == _place(backward):
            raise ProblemError(
                f"forward and backward of score_mod '{name}' are both '{_place(forward)[1]}' of one module, which Triton "
                "cannot tell apart: give them different names."
            )
        self.forward, self.backward, self.reference, self.derivative = forward, backward, reference, derivative
        self.name, self.numbers = name, _numbers_of(name, forward, backward, reference, derivative)
        self.key = self._registered()

    def __call__(self, *numbers: Union[float, torch.Tensor]) -> "Bound":
        """The mod with its numbers: each a Python number, or a floating point tensor `[Hq]`, one for each query head."""
        return Bound(self, numbers)

    def __repr__(self) -> str:
        return f"<score_mod {self.key}({', '.join(self.numbers)})>"

    def __deepcopy__(self, memo) -> "ScoreMod":
        """Itself: copies of a module that holds one share it, as they share functions."""
        return self

    def __reduce__(self):
        raise TypeError(f"score_mod '{self.name}' cannot be pickled: make it where its functions are, in each process")

    def _registered(self) -> str:
        """The key of these functions; the same functions once more get the same."""
        mine = (self.forward, self.backward, self.reference, self.derivative)
        number = 1
        while (key := self.name if number == 1 else f"{self.name}#{number}") in _made:
            other = _made[key]
            theirs = (other.forward, other.backward, other.reference, other.derivative)
            if all(a is b for a, b in zip(mine, theirs, strict=True)):
                return key
            number += 1
        if len(_made) >= MOST:
            raise ProblemError(
                f"{MOST} score_mods are too many for one process: make each once, outside of loops and of functions that are "
                f"called again, and pass what changes as numbers; this one is '{self.name}'."
            )
        _made[key] = self
        return key

    # ---- in torch --------------------------------------------------------------------------------------------------

    def bend(self, score: torch.Tensor, *where) -> torch.Tensor:
        """The new scores, by `reference`. `where`: batch, head, row, col and the numbers, tensors that broadcast to `score`."""
        return self._checked("reference", self.reference(score, *where), score)  # type: ignore[misc]

    def slope(self, score: torch.Tensor, *where) -> torch.Tensor:
        """The derivative of `bend` by the score."""
        if self.derivative is not None:
            return self._checked("derivative", self.derivative(score, *where), score)
        return self.slopes(score, *where, order=1)[0]

    def slopes(self, score: torch.Tensor, *where, order: int) -> list[torch.Tensor]:
        """The first derivatives, as many as `order`, by autograd, which operators switch off and this switches on again."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = score.detach().clone().requires_grad_()
            last, found = self.bend(leaf, *where), []
            for n in range(order):
                if not last.requires_grad:  # a constant
                    last = torch.zeros_like(leaf)
                else:
                    (last,) = torch.autograd.grad(
                        last, leaf, torch.ones_like(last), create_graph=n + 1 < order, allow_unused=True, materialize_grads=True
                    )
                found.append(last.detach())
        return found

    def _checked(self, what: str, found, score: torch.Tensor) -> torch.Tensor:
        if not isinstance(found, torch.Tensor):
            raise ProblemError(f"{what} of score_mod '{self.name}' must give a tensor; got {type(found).__name__}.")
        try:
            return found.to(score.dtype).expand(score.shape)
        except RuntimeError:
            raise ProblemError(
                f"{what} of score_mod '{self.name}' must give one number for each score, {list(score.shape)}; got "
                f"{list(found.shape)}."
            ) from None


class Bound(NamedTuple):
    """A mod and its numbers, as a call takes them."""

    mod: ScoreMod
    numbers: tuple[Union[float, torch.Tensor], ...] = ()

    def operand(self, q: torch.Tensor) -> torch.Tensor:
        """`[len(numbers), Hq]` in the LSE's type on q's device.

        Raises:
            ProblemError: too many or too few, or of another kind or shape.
        """
        mod, heads = self.mod, q.shape[-2]
        if len(self.numbers) != len(mod.numbers):
            wanted = f"{len(mod.numbers)} ({', '.join(mod.numbers)})" if mod.numbers else "none"
            raise ProblemError(
                f"score_mod '{mod.name}' takes {wanted} behind {', '.join(GIVEN)}; got {len(self.numbers)} numbers. "
                f"Pass them as score_mod={mod.name}({', '.join(mod.numbers)})."
            )
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows = []
        for name, number in zip(mod.numbers, self.numbers, strict=True):
            if isinstance(number, torch.Tensor):
                if not number.is_floating_point() or tuple(number.shape) not in ((), (heads,)):
                    raise ProblemError(
                        f"{name} of score_mod '{mod.name}' must be a number or a floating point tensor [Hq], here [{heads}]; "
                        f"got {list(number.shape)} of {number.dtype}. What differs between queries and keys is a bias."
                    )
                if number.device != q.device:
                    raise ProblemError(
                        f"{name} of score_mod '{mod.name}' is on {number.device} and q on {q.device}; move it with "
                        ".to(q.device)."
                    )
                if torch.is_grad_enabled() and number.requires_grad:
                    raise NotImplementedError(
                        f"a gradient of {name}, a number of score_mod '{mod.name}', is not implemented: pass {name}.detach(), "
                        "or what is to be learned as a bias."
                    )
                rows.append(number.to(wide).expand(heads))
            elif isinstance(number, (int, float)) and not isinstance(number, bool):
                rows.append(torch.full((heads,), float(number), dtype=wide, device=q.device))
            else:
                raise ProblemError(
                    f"{name} of score_mod '{mod.name}' must be a number or a tensor [Hq]; got {type(number).__name__}."
                )
        return torch.stack(rows) if rows else q.new_empty((0, heads), dtype=wide)


def bound(given) -> Bound:
    """What a caller passes as `score_mod`, with its numbers.

    Raises:
        ProblemError: it is no mod.
    """
    if isinstance(given, Bound):
        return given
    if isinstance(given, ScoreMod):
        return Bound(given)
    hint = " Make one of it: rowmax.ScoreMod(forward, backward, name=..., reference=...)." if callable(given) else ""
    raise ProblemError(f"score_mod must be a rowmax.ScoreMod, or one with its numbers; got {type(given).__name__}.{hint}")


def known(key: str) -> Optional[ScoreMod]:
    """The mod of a key; None where this process has made none."""
    return _made.get(key)


def lacks(key: str, part: str) -> Optional[str]:
    """Why a mod is not computed where its `part` is needed: "forward", "backward" on a GPU, "reference" in torch; or None."""
    if not key:
        return None
    mod = _made.get(key)
    if mod is None:
        return f"no score_mod '{key}' was made in this process"
    if getattr(mod, part) is not None:
        return None
    needs = {"forward": "kernels call", "backward": "its gradients need", "reference": "the CPU calls"}[part]
    return f"score_mod '{key}' was made without {part}=, the function that {needs}"


def find(key: str) -> ScoreMod:
    """The mod of a key.

    Raises:
        ProblemError: this process has made none.
    """
    mod = _made.get(key)
    if mod is None:
        here = ", ".join(_made) or "none"
        raise ProblemError(f"no score_mod '{key}' was made in this process, only {here}: import the module that makes it.")
    return mod


def _place(function) -> tuple[str, str]:
    return function.fn.__module__, function.fn.__qualname__


def _numbers_of(name: str, *functions) -> tuple[str, ...]:
    """Names of the parameters behind the given ones, which all functions must have in common in number."""
    found: Optional[tuple[str, ...]] = None
    for function in functions:
        if function is None:
            continue
        parameters = list(inspect.signature(getattr(function, "fn", function)).parameters.values())
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters) or len(parameters) < len(GIVEN):
            raise ProblemError(
                f"functions of score_mod '{name}' take ({', '.join(GIVEN)}) and then each number by a name of its own; got "
                f"({', '.join(map(str, parameters))})."
            )
        own = tuple(p.name for p in parameters[len(GIVEN) :])
        if found is not None and len(own) != len(found):
            raise ProblemError(
                f"functions of score_mod '{name}' must take the same numbers; got ({', '.join(found)}) and ({', '.join(own)})."
            )
        found = own if found is None else found
    return found or ()
