"""What a call may bring beside q, k and v to bend its scores or to hide them: checks, for `problem`.

    x_ij = bent(scale q_i.k_j) + bias_ij  where mask_ij, else -inf

A bias and a mask are `[B, H, Tq, Tk]`, where any size may be 1 instead: which ones are not is spelled in letters of "bhqk".
"""

from itertools import combinations

import torch

from rowmax.errors import ProblemError
from rowmax.score_mod import find

GIVEN_FOR = ("", "1", *("".join(some) for n in range(1, 5) for some in combinations("bhqk", n)))


def check_scores(operands, batch) -> None:
    q, heads = operands.q, operands.q.shape[-2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, tensor, shapes in (
        ("alibi_slopes", operands.slopes, ((heads,), (batch, heads))),
        ("sink", operands.sink, ((heads,),)),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) not in shapes:
            wanted = "[H] or [B, H]" if len(shapes) > 1 else "[H]"
            raise ProblemError(
                f"{name} must have shape {wanted}, here {' or '.join(str(list(shape)) for shape in shapes)}: a number for each "
                f"query head; got {list(tensor.shape)}."
            )
        if tensor.dtype != wide:
            raise ProblemError(f"{name} must be {wide}, the type of the LSE; got {tensor.dtype}. Convert it with .to({wide}).")
        if tensor.device != q.device:
            raise ProblemError(f"{name} is on {tensor.device} and q on {q.device}; move it with .to(q.device).")


def given_for(name: str, operands, packed: bool) -> str:
    """The letters of `Problem.bias` or `Problem.mask`; checks the tensor."""
    tensor, q = getattr(operands, name), operands.q
    if tensor is None:
        return ""
    if packed:
        raise ProblemError(f"a {name} belongs to dense tensors [B, T, H, D]; got packed ones. Pad them and call attention.")
    types = (torch.bool,) if name == "mask" else (q.dtype, *((torch.float32,) if q.dtype.itemsize < 4 else ()))
    if tensor.dtype not in types:
        wanted = " or ".join(map(str, types))
        hint = " Booleans (True: visible) are passed as mask." if name == "bias" and tensor.dtype == torch.bool else ""
        raise ProblemError(f"{name} must be {wanted} where q is {q.dtype}; got {tensor.dtype}.{hint}")
    if tensor.device != q.device:
        raise ProblemError(f"{name} is on {tensor.device} and q on {q.device}; move it with .to(q.device).")
    sizes = (q.shape[0], q.shape[2], q.shape[1], operands.k.shape[1])
    if tensor.dim() != 4 or any(size != 1 and size != full for size, full in zip(tensor.shape, sizes, strict=True)):
        raise ProblemError(
            f"{name} must have shape [B|1, H|1, Tq|1, Tk|1], here sizes 1 or {list(sizes)}; got {list(tensor.shape)}. "
            "For a matrix of queries and keys pass it with [None, None], for padding of keys [B, Tk] with [:, None, None]."
        )
    letters = "".join(letter for letter, size in zip("bhqk", tensor.shape, strict=True) if size != 1) or "1"
    return letters + (",fp32" if name == "bias" and tensor.dtype != q.dtype else "")


def check_seed(operands, dropout) -> None:
    seed, q = operands.seed, operands.q
    if seed is None:
        raise ProblemError(f"dropout_p={dropout} needs a seed, an int64 tensor [1] on q's device.")
    if seed.dtype != torch.int64 or tuple(seed.shape) != (1,):
        raise ProblemError(f"seed must be an int64 tensor of shape [1]; got {seed.dtype}, shape {list(seed.shape)}.")
    if seed.device != q.device:
        raise ProblemError(f"seed is on {seed.device} and q on {q.device}; move it with .to(q.device).")


def check_numbers(operands, score_mod: str) -> None:
    numbers, q = operands.numbers, operands.q
    if not score_mod:
        raise ProblemError("numbers came without the score_mod that they belong to.")
    mod, heads = find(score_mod), q.shape[-2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    want = (len(mod.numbers), heads)
    if numbers is None:
        raise ProblemError(f"score_mod '{score_mod}' came without numbers, a {wide} tensor {list(want)}.")
    if tuple(numbers.shape) != want or numbers.dtype != wide or not numbers.is_contiguous():
        raise ProblemError(
            f"numbers of score_mod '{score_mod}' must be a contiguous {wide} tensor {list(want)}, a row for each of "
            f"({', '.join(mod.numbers)}) and a column for each query head; got {numbers.dtype}, {list(numbers.shape)}."
        )
    if numbers.device != q.device:
        raise ProblemError(f"numbers of score_mod '{score_mod}' are on {numbers.device} and q on {q.device}.")
