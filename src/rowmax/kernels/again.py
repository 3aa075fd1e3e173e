"""Calls of one form once more, for other tensors: everything but the addresses was worked out for the first.

Finding out anew what to launch (descriptors above all) takes the host longer than the GPU takes for short sequences.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from rowmax.kernels.direct import Launcher


class Again:
    """Launches whose arguments are found in a list of tensors, on the device that was current when they were built.

    It keeps none of the tensors.
    """

    def __init__(self, calls: Sequence[Any], builds: Sequence[Launcher], tensors: Sequence[Optional[torch.Tensor]]):
        """`tensors`: every tensor of the calls, or one that it is part of, in the order in which `__call__` takes them."""
        self._launches = [
            (build, _places(call, build, tensors), call.numbers) for call, build in zip(calls, builds, strict=True)
        ]

    def arguments(self, *tensors: Optional[torch.Tensor]) -> list[tuple[Launcher, list]]:
        """Each launcher, and what it is called with."""
        at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        made = []
        for build, places, numbers in self._launches:
            given: list = []
            for place in places:
                if place is None:
                    given.append(None)
                elif place[2] is None:
                    given.append(at[place[0]] + place[1])
                else:
                    given += place[2][at[place[0]] + place[1]]
            made.append((build, [*given, *numbers]))
        return made

    def __call__(self, *tensors: Optional[torch.Tensor]) -> None:
        stream = self._launches[0][0].stream()
        for build, given in self.arguments(*tensors):
            build.enqueue(stream, *given)


def form(tensor: Optional[torch.Tensor]) -> Any:
    """What else a launch depends on of a tensor, beside its address."""
    return None if tensor is None else (tensor.dtype, tensor.stride(), tensor.data_ptr() % 16)


def _places(call, build: Launcher, tensors: Sequence[Optional[torch.Tensor]]) -> list:
    """For each argument `(which tensor, bytes behind its beginning, descriptors by address or None)`, or None for None."""
    described = [argument for argument in call.tensors if argument is not None and not isinstance(argument, torch.Tensor)]
    kept = iter(build.descriptors(tuple(described)))
    places: list = []
    for argument in call.tensors:
        if argument is None:
            places.append(None)
        elif isinstance(argument, torch.Tensor):
            places.append((*_place(argument, tensors), None))
        else:
            places.append((*_place(argument.base, tensors), next(kept)))
    return places


def _place(argument: torch.Tensor, tensors: Sequence[Optional[torch.Tensor]]) -> tuple[int, int]:
    for i, tensor in enumerate(tensors):
        if tensor is argument:
            return i, 0
    storage = argument.untyped_storage().data_ptr()
    for i, tensor in enumerate(tensors):
        if tensor is not None and tensor.untyped_storage().data_ptr() == storage:
            return i, argument.data_ptr() - tensor.data_ptr()
    raise LookupError(f"an argument {tuple(argument.shape)} of {argument.dtype} is part of none of the tensors given")
