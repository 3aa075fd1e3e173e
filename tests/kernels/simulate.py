"""A Hopper kernel in Gluon, run on the CPU as Python: barriers and arithmetic, without a GPU.

The source of the kernel and of its helpers is executed with a small model of Gluon. Each partition of a block is a thread, of
which one runs at a time; at every wait, arrival, load and product the next one is drawn from those that can go on, by a
seeded generator, so that a run can be repeated exactly, and a deadlock is found when nobody can go on. Some partitions are
drawn far more often than others, which lag behind as far as the barriers let them. Modelled are:

* mbarriers with phases, arrivals and bytes; more arrivals than a phase expects are an error, and so are loads nobody awaits.
* TMA loads: the buffer holds NaN from the issue on, and the rows at some later moment. Stores: read at the latest moment,
  `store_wait` of their own partition; one that nobody awaits is an error, and so is one of what was written without a fence.
* Where threads have read, TMA writes only after they have passed a fence, stored, or awaited a product issued since.
* asynchronous products: computed when they are issued or, `late`, only when they are awaited; no use of them before.
* named barriers, and memory through pointers, where an access outside is an error.

Layouts, registers and the order of memory between threads are not.
"""

import ast
import functools
import importlib
import inspect
import random
import re
import threading
import types
from typing import Any, Optional

import simulate_scores
import torch

from rowmax.kernels import address, hopper_forward, launch, tile_ops
from rowmax.plan.hopper import HopperTile
from rowmax.problem import Operands, Problem

WARPGROUP = 128  # threads that arrive at a named barrier for one partition
# Modules that belong to a kernel's.
PARTS = {
    "forward": ("build", "dropout", "given", "producer"),
    "backward": ("backward_walk", "backward_scores", "backward_dropout", "dq_order"),
    "backward_wide_queries": ("backward_wide_scores",),
}


class Wrong(Exception):
    """What the hardware would leave undefined, or hang on."""


class _Stop(Exception):
    """Another partition failed."""


class Machine:
    """The partitions of one block."""

    def __init__(self, seed: int, late: bool):
        self.random, self.late = random.Random(seed), late
        self.condition = threading.Condition()
        self.ready: dict = {}  # partition -> (may it go on?, what it waits for)
        self.current: Optional[int] = None
        self.loads: list = []  # on their way
        self.unfenced: dict = {}  # address of a buffer -> the partition that wrote it
        self.read: dict = {}  # likewise -> the partition whose threads read it, and may not have it yet
        self.named: dict = {}
        self.failure: Optional[BaseException] = None
        self.local = threading.local()

    def run(self, partitions) -> None:
        self.ready = {i: ((lambda: True), "start") for i in range(len(partitions))}
        self.eagerness = [30.0**i for i in range(len(partitions))]
        ahead = self.eagerness.pop() if self.late else None  # of the producer, the last partition
        self.random.shuffle(self.eagerness)
        if ahead:
            self.eagerness.append(ahead)
        threads = [threading.Thread(target=self._body, args=pair, daemon=True) for pair in enumerate(partitions)]
        for thread in threads:
            thread.start()
        with self.condition:
            self._hand_on()
        for thread in threads:
            thread.join()
        if self.failure is None and self.loads:
            self.failure = Wrong(f"{len(self.loads)} loads that nobody awaited")
        if self.failure is not None:
            raise self.failure

    def _body(self, index: int, function) -> None:
        self.local.index, self.local.products, self.local.stores = index, [], []
        try:
            with self.condition:
                self._await(index)
            function()
            if self.local.products:
                raise Wrong("a product that nobody awaited")
            if self.local.stores:
                raise Wrong("a store that nobody awaited")
        except _Stop:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        with self.condition:
            del self.ready[index]
            self._hand_on()

    def pause(self, ready=lambda: True, what: str = "") -> None:
        """Let others go on; come back when `ready()`."""
        with self.condition:
            self.ready[self.local.index] = (ready, what)
            self._hand_on()
            self._await(self.local.index)

    def _await(self, index: int) -> None:
        while self.current != index and self.failure is None:
            self.condition.wait()
        if self.failure is not None:
            raise _Stop

    def _hand_on(self) -> None:
        self.current = self._next() if self.failure is None else None
        self.condition.notify_all()

    def _next(self) -> Optional[int]:
        while self.ready:
            able = [index for index, (ready, _) in self.ready.items() if ready()]
            if self.loads and (not able or (not self.late and self.random.random() < 0.5)):
                self.loads.pop(self.random.randrange(len(self.loads)))()
            elif able:
                return self.random.choices(able, [self.eagerness[index] for index in able])[0]
            else:
                self.failure = Wrong(f"deadlock: {[what for _, what in self.ready.values()]}")
                return None
        return None  # all have come to their end; loads that are left nobody has awaited


class Barrier:
    """An mbarrier."""

    def __init__(self, machine: Machine):
        self.machine, self.count, self.pending, self.bytes, self.phase = machine, 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def change(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        if self.pending < 0:
            raise Wrong("more arrivals than this phase of a barrier expects")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    def __init__(self, machine: Machine, count: int):
        self.all = [Barrier(machine) for _ in range(count)]

    def index(self, i):
        return self.all[int(i)]


class Shared:
    """A view of shared memory."""

    def __init__(self, machine: Machine, tensor: torch.Tensor):
        self.machine, self.tensor = machine, tensor

    @property
    def dtype(self):
        return self.tensor.dtype

    def index(self, i):
        return Shared(self.machine, self.tensor[int(i)])

    def reshape(self, shape):
        return Shared(self.machine, self.tensor.view(*map(int, shape)))

    def permute(self, order):
        return Shared(self.machine, self.tensor.permute(*order))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.machine, self.tensor.view(dtype).view(*map(int, shape)))

    def store(self, value):
        machine = self.machine
        machine.unfenced[self.tensor.data_ptr()] = machine.local.index
        machine.read = {place: owner for place, owner in machine.read.items() if owner != machine.local.index}
        self.tensor.copy_(value)

    def load(self, layout=None):
        self.machine.read[self.tensor.data_ptr()] = self.machine.local.index
        return self.tensor.clone()


class Descriptor:
    """A host descriptor, from its own shape and strides. `once`: no element is stored twice."""

    def __init__(self, host, once: bool):
        self.tensor = host.base.as_strided(host.shape, host.strides)
        self.box, self.dtype, self.layout = list(host.block_shape), host.base.dtype, None
        size = torch.Size(self.box).numel() * host.base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=size)
        self.stored = torch.zeros(self.tensor.shape, dtype=torch.bool) if once else None

    def _overlap(self, place):
        inside, within = [], []
        for start, size, length in zip(map(int, place), self.box, self.tensor.shape, strict=True):
            low = min(max(start, 0), length)
            high = max(min(start + size, length), low)
            inside.append(slice(low, high))
            within.append(slice(low - start, high - start) if high > low else slice(0, 0))
        return tuple(inside), tuple(within)

    def load(self, place) -> torch.Tensor:
        box = torch.zeros(self.box, dtype=self.dtype)
        inside, within = self._overlap(place)
        box[within] = self.tensor[inside]
        return box

    def store(self, place, box) -> None:
        inside, within = self._overlap(place)
        if self.stored is not None:
            if bool(self.stored[inside].any()):
                raise Wrong("an element stored twice")
            self.stored[inside] = True
        self.tensor[inside] = box.reshape(self.box)[within]


class Pointer:
    def __init__(self, tensor: torch.Tensor, offset: Any = 0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, other):
        return Pointer(self.tensor, self.offset + other)

    def _places(self, mask):
        places = torch.as_tensor(self.offset).long()
        places = places if mask is None else places[torch.broadcast_to(mask, places.shape)]
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < self.tensor.numel():
            raise Wrong("an access outside of a tensor")
        return places

    def load(self, mask=None, other=0):
        found = self.tensor.view(-1)[self._places(mask)]
        if mask is None:
            return found
        whole = torch.full(torch.as_tensor(self.offset).shape, other, dtype=self.tensor.dtype)
        return whole.masked_scatter(torch.broadcast_to(mask, whole.shape), found)

    def store(self, value, mask=None):
        value = torch.as_tensor(value)
        shape = torch.as_tensor(self.offset).shape
        value = torch.broadcast_to(value, shape) if mask is None else value.expand(shape)[torch.broadcast_to(mask, shape)]
        self.tensor.view(-1)[self._places(mask)] = value.to(self.tensor.dtype)


class Product:
    """A product on its way; whoever uses it before it is awaited finds no tensor. `behind`: what was read in front of it."""

    def __init__(self, compute, late: bool, behind: set):
        self.compute, self.value, self.behind = compute, None if late else compute(), behind

    def finish(self):
        if self.value is None:
            self.value = self.compute()
        return self.value

    def _early(self, *_):
        raise Wrong("a product used before it was awaited")

    __getattr__ = __add__ = __radd__ = __mul__ = __rmul__ = __torch_function__ = _early


def _either(function, plain):
    def call(a, b):
        if torch.is_tensor(a) or torch.is_tensor(b):
            return function(torch.as_tensor(a), torch.as_tensor(b))
        return plain(a, b)

    return call


def _where(condition, a, b):
    condition, a, b = torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b)
    kind = a.dtype if b.dim() == 0 else b.dtype
    return torch.where(condition, a.to(kind), b.to(kind))


def language(machine: Machine, program: int, programs: int) -> dict:
    """The names that the kernel's source uses."""
    gl = types.SimpleNamespace(
        constexpr=lambda value: value,
        **{name: getattr(torch, name) for name in ("float32", "int64", "int32", "int16", "int8", "log2", "abs")},
        exp2=simulate_scores.exp2,
        static_range=range,
        program_id=lambda axis: torch.tensor(program),
        num_programs=lambda axis: programs,
        num_warps=lambda: 4,
        cdiv=lambda a, b: -(-int(a) // int(b)),
        minimum=_either(torch.minimum, min),
        maximum=_either(torch.maximum, max),
        max=lambda x, axis: x.max(axis).values,
        min=lambda x, axis: x.min(axis).values,
        sum=lambda x, axis: x.sum(axis),
        split=lambda x: x.unbind(-1),
        SliceLayout=lambda axis, layout: None,
        where=_where,
        broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        convert_layout=lambda x, layout: x,
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        arange=lambda start, end, layout=None: torch.arange(start, end),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        store=lambda pointer, value, mask=None: pointer.store(value, mask),
        warp_specialize=lambda parts, warps, registers: machine.run(
            [lambda function=function, given=given: function(*given) for function, given in parts]
        ),
    )

    def allocate(dtype, shape, layout):
        if layout == "barrier":
            return Barriers(machine, shape[0])
        fill = float("nan") if dtype.is_floating_point else 77
        return Shared(machine, torch.full([int(size) for size in shape], fill, dtype=dtype))

    def atomic_add(pointer, value, sem):
        before = pointer.load().clone()
        pointer.store(before + value)
        return before

    def wait(barrier, phase, pred=True):
        if pred:
            machine.pause(lambda: barrier.phase != int(phase), f"phase {int(phase)} of a barrier")

    def arrive(barrier, count=1):
        barrier.change(count, 0)
        machine.pause()

    def tma_load(source, place, barrier, target):
        target.tensor.fill_(float("nan") if target.dtype.is_floating_point else 77)

        where = [int(x) for x in place]
        if where[-1] * target.tensor.element_size() % 16:  # found on an H200
            raise Wrong(f"a TMA load from {where}: in a row it starts at multiples of 16 bytes, or is an illegal instruction")

        if target.tensor.storage_offset() * target.tensor.element_size() % 128:
            raise Wrong("a TMA load to shared memory that is no multiple of 128 bytes")

        begin = target.tensor.data_ptr()
        if any(begin <= place < begin + source.block_type.nbytes for place in machine.read):  # found on an H200
            raise Wrong("a TMA load to shared memory that threads read without a fence since")

        def complete():
            target.tensor.copy_(source.load(where).view(target.tensor.shape))
            barrier.change(0, -source.block_type.nbytes)

        machine.loads.append(complete)
        machine.pause()

    def tma_store(target, place, source):
        if source.tensor.data_ptr() in machine.unfenced:
            raise Wrong("a TMA store of shared memory that was written without a fence")
        machine.local.stores.append(lambda: target.store(place, source.tensor))

    def store_wait(pending):
        machine.pause()
        while machine.local.stores:
            machine.local.stores.pop(0)()

    def fence():
        mine = getattr(machine.local, "index", None)  # None: before the warps part
        machine.unfenced = {place: owner for place, owner in machine.unfenced.items() if owner != mine}
        machine.read = {place: owner for place, owner in machine.read.items() if owner != mine}

    def multiply(a, b, acc, use_acc=True, is_async=False):
        def compute():
            product = (a.tensor if isinstance(a, Shared) else a).float() @ b.tensor.float()
            if not use_acc:
                return product
            return product + (acc.finish() if isinstance(acc, Product) else acc)  # products may add to one on its way

        mine = machine.local.index
        product = Product(compute, machine.late, {place for place, owner in machine.read.items() if owner == mine})
        machine.local.products.append(product)
        machine.pause()
        return product if is_async else multiply_wait(0, [product])

    def multiply_wait(outstanding, deps):
        machine.pause()
        products = machine.local.products
        done, machine.local.products = products[: len(products) - outstanding], products[len(products) - outstanding :]
        for product in done:
            product.finish()
            machine.read = {place: owner for place, owner in machine.read.items() if place not in product.behind}
        values = [value if value in machine.local.products else value.value for value in deps]
        return values[0] if len(values) == 1 else values

    def named_barrier(op, number, threads):
        barrier = machine.named.setdefault(int(number), [0, 0])
        barrier[0] += WARPGROUP
        if barrier[0] > threads:
            raise Wrong(f"named barrier {number} has more arrivals than it expects")
        if barrier[0] == threads:
            barrier[:] = [0, barrier[1] + 1]
        elif op == "bar.sync":
            turn = barrier[1]
            machine.pause(lambda: barrier[1] != turn, f"named barrier {number}")

    gl.allocate_shared_memory, gl.atomic_add = allocate, atomic_add
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, size: barrier.change(1, size),
        wait=wait,
        arrive=arrive,
    )
    names = (
        "score",
        "out",
        "weight",
        "row",
        "column",
        "axis",
        "number",
        "slot",
        "given",
        "pair",
        "last",
        "keep",
        "kept",
        "thread",
    )
    return {
        "gl": gl,
        "tl": gl,
        "mbarrier": mbarrier,
        "range": lambda *bounds: map(torch.tensor, range(*map(int, bounds))),
        "tma_load": tma_load,
        "tma_store": tma_store,
        "store_wait": store_wait,
        "named_barrier": named_barrier,
        "opaque": lambda x: x,
        "scale_unless_one": lambda acc, factor, count: acc * factor,
        **simulate_scores.NAMES,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": multiply_wait,
        "fence_async_shared": fence,
        **{f"{name}_layout": (lambda *_: None) for name in names},
    }


class _Plain(ast.NodeTransformer):
    """Decorators and `x.type.layout` are left out."""

    def visit_FunctionDef(self, node):
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "layout" and isinstance(node.value, ast.Attribute) and node.value.attr == "type":
            return ast.Constant(None)
        return node


def sources(*mutants: tuple[str, str], kernel: str = "forward", lender: str = "") -> list:
    """Functions and constants of the kernel and its helpers as code, after replacements of text that is there once.

    `lender`: another kernel, whose functions this one takes as they are.
    """
    mask = importlib.import_module("rowmax.mask")
    lent = (*PARTS.get(lender, ()), lender) if lender else ()
    own = [
        importlib.import_module(f"rowmax.kernels.gluon.{name}")
        for name in ("index", "ring", "scores", "softmax", *lent, *PARTS.get(kernel, ()), kernel)
    ]
    modules = (mask, tile_ops, address, *own)
    texts = [_text(module) for module in modules]
    replaced = [i for i, module in enumerate(modules) if module.__name__.rsplit(".", 1)[-1] not in lent]
    for old, new in mutants:
        count = sum(texts[i].count(old) for i in replaced)
        if count != 1:
            raise ValueError(f"the text to replace is there {count} times: {old}")
        for i in replaced:
            texts[i] = texts[i].replace(old, new)
    return [_code(module.__name__, text) for module, text in zip(modules, texts, strict=True)]


@functools.lru_cache(maxsize=64)  # of 20 files, and the mutants of a few
def _code(name: str, text: str):
    tree = _Plain().visit(ast.parse("from __future__ import annotations\n" + text))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) or _constant(node)]
    tree.body.insert(0, ast.parse("from __future__ import annotations").body[0])
    return compile(ast.fix_missing_locations(tree), name, "exec")


@functools.cache
def _text(module) -> str:
    return inspect.getsource(module)


def _constant(node) -> bool:
    """`NAME = gl.constexpr(number)`, or with tl, or several names counted from 0."""
    form = r"[gt]l\.constexpr\(\d+\)|map\(gl\.constexpr, range\(\d+\)\)"
    return isinstance(node, ast.Assign) and re.fullmatch(form, ast.unparse(node.value)) is not None


def forward(
    problem: Problem, operands: Operands, tile: HopperTile, *, need_lse=True, blocks=2, seed=0, late=False, mutants=(),
    repair=True,
):  # fmt: skip
    """`(out, lse, suspect)` of the launcher's two kernels; the second one in Triton's interpreter, where a tile is suspect.

    `blocks`: how many, where the schedule leaves it open. `mutants`: replacements of text in the source. `repair`: run the
    second kernel. `suspect`: 1 where one of 64 rows is, else 0. The counter and the flags must be left at 0.
    """
    out_shape, lse_shape = problem.outputs()
    out = torch.full(out_shape, torch.nan, dtype=problem.dtype)
    lse = torch.full(lse_shape, torch.nan) if need_lse else None
    if problem.packed:
        launch._launch(out.device, launch.outside_call(operands.cu_seqlens_q, out, lse=lse))
    *before, call, guard = hopper_forward.hopper_calls(problem, operands, tile, out, lse)
    for order in before:
        launch._launch(out.device, order)
    arguments = [_argument(x, not problem.packed) for x in call.tensors] + list(call.numbers)
    build = types.SimpleNamespace(**{name: getattr(value, "value", value) for name, value in vars(call.numbers[-1]).items()})
    suspect, counter = call.tensors[8:10]
    code = sources(*mutants)
    programs = min(blocks, call.programs)
    for program in range(programs):
        names = language(Machine(seed + program, late), program, programs)
        for part in code:
            exec(part, names)
        names["forward_kernel"](*arguments[:-1], build)
    if counter is not None and int(counter):
        raise Wrong(f"the next call finds {int(counter)} in the counter")
    marked = suspect.clone()
    if repair and bool(marked.any()):
        launch._launch(out.device, guard)
        if bool(suspect.any()):
            raise Wrong("the next call finds flags that are set")
    return out, lse, marked


def _argument(x, once: bool):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return None if x is None else Descriptor(x, once)
