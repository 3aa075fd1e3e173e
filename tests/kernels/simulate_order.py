"""Blocks of one launch side by side, for `simulate_backward.py`: who waits for another block's sums, and what arrives when.

To the machine of `simulate.py` are added:

* Blocks: a few run at a time, begin in any order, and what they wait for may be done by a partition of another block.
* TMA's additions are on their way when the buffer has been read, and arrive in any order until somebody waits for that.
  Into one box they must arrive in the order of the blocks' numbers: any other is an error, whatever the sums.
* Counters in global memory, which are waited for and raised by one.
"""

import random
import threading
from typing import Any, Optional

from simulate import Machine, Wrong, _Stop


class Together:
    """What may go on, of all blocks. One thread runs at a time."""

    def __init__(self, seed: int, late: bool, running: int, any_order: bool = False):
        self.random, self.late, self.running = random.Random(seed), late, running
        self.any_order = any_order  # of sums: that is no error
        self.ready: dict = {}  # (block or place, partition) -> (may it go on?, what it waits for)
        self.gates: dict = {}
        self.eagerness: dict = {}
        self.current: Any = None
        self.blocks: list = []
        self.sums: list = []  # on their way: (block and partition, addition)
        self.newest: dict = {}  # box -> number of the last block whose sum arrived in it
        self.programs, self.drawn = 0, set()  # numbers that blocks have drawn
        self.failure: Optional[BaseException] = None

    def run(self, programs: int, program) -> None:
        """`program(number, block)` for all numbers, `running` at a time, in any order."""
        self.programs = programs
        left = self.random.sample(range(programs), programs)

        def place() -> None:
            while left:
                number = left.pop()
                program(number, Block(self, number))

        threads = self.spawn([((f"place {i}", 0), place) for i in range(min(self.running, programs))])
        self._hand_on()
        for thread in threads:
            thread.join()
        if self.failure is None and self.sums:
            self.failure = Wrong(f"{len(self.sums)} sums that nobody awaited")
        if self.failure is not None:
            raise self.failure

    def spawn(self, bodies) -> list:
        for key, _ in bodies:
            self.ready[key] = (lambda: True), "start"
            self.gates[key] = threading.Semaphore(0)
            self.eagerness[key] = 30.0 ** self.random.randrange(3)
        threads = [threading.Thread(target=self._body, args=pair, daemon=True) for pair in bodies]
        for thread in threads:
            thread.start()
        return threads

    def _body(self, key, function) -> None:
        try:
            self._await(key)
            function()
        except _Stop:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        del self.ready[key]
        self._hand_on()

    def pause(self, key, ready=lambda: True, what: str = "") -> None:
        self.ready[key] = ready, what
        self._hand_on()
        self._await(key)

    def _await(self, key) -> None:
        self.gates[key].acquire()
        if self.failure is not None:
            raise _Stop

    def _hand_on(self) -> None:
        self.current = self._next() if self.failure is None else None
        for key in [*self.ready] if self.failure is not None else [self.current] if self.current else []:
            self.gates[key].release()

    def _next(self):
        while True:
            able = [key for key, (ready, _) in self.ready.items() if ready()]
            loads = [block.loads for block in self.blocks if block.loads]
            if self.sums and (not able or (not self.late and self.random.random() < 0.3)):
                self.sums.pop(self.random.randrange(len(self.sums)))[1]()
                if self.failure is not None:
                    return None
            elif loads and (not able or (not self.late and self.random.random() < 0.5)):
                of_one = self.random.choice(loads)
                of_one.pop(self.random.randrange(len(of_one)))()
            elif able:
                return self.random.choices(able, [self.eagerness[key] for key in able])[0]
            else:
                if self.ready:
                    self.failure = Wrong(f"deadlock: {[what for _, what in self.ready.values()]}")
                return None


class Block(Machine):
    """One of the blocks; `number` is what it drew, `program` its place in the grid."""

    def __init__(self, together: Together, program: int):
        super().__init__(program, together.late)
        self.together, self.program, self.number = together, program, -1
        self.place = together.current  # whose thread runs what stands before the partitions

    def run(self, partitions) -> None:
        self.together.blocks.append(self)
        running = [(self.program, i) for i in range(len(partitions))]
        self.together.spawn([(key, self._partition(*pair)) for key, pair in zip(running, enumerate(partitions), strict=True)])
        ready = self.together.ready
        self.together.pause(self.place, lambda: not any(key in ready for key in running), "the end of a block")
        self.together.blocks.remove(self)
        if self.loads:
            raise Wrong(f"{len(self.loads)} loads that nobody awaited")

    def _partition(self, index: int, function):
        def body() -> None:
            self.local.index, self.local.products, self.local.stores = index, [], []
            function()
            if self.local.products:
                raise Wrong("a product that nobody awaited")
            if self.local.stores:
                raise Wrong("a store that nobody awaited")

        return body

    def pause(self, ready=lambda: True, what: str = "") -> None:
        self.together.pause((self.program, self.local.index), ready, what)


def language(block: Block, names: dict) -> dict:
    """`names` of `simulate_backward.language`, with what belongs to an order of blocks."""
    gl, tma_add, atomic_add = names["gl"], names["tma_add"], names["gl"].atomic_add
    together = block.together

    def draw(pointer, value, sem):
        block.number = int(atomic_add(pointer, value, sem))
        if block.number in together.drawn or block.number >= together.programs:
            raise Wrong(f"a block drew the number {block.number}, of {together.programs} each once")
        together.drawn.add(block.number)
        return block.number

    def add(target, place, source):
        tma_add(target, place, source)  # its checks
        block.local.stores.pop()
        box, owner = (id(target), *map(int, place)), (block.program, block.local.index)

        def arrive(value):
            if together.newest.get(box, -1) > block.number and not together.any_order:
                together.failure = together.failure or Wrong(f"a sum of block {block.number} behind {together.newest[box]}")
            together.newest[box] = block.number
            target.add(list(map(int, place)), value)

        def read():
            value = source.tensor.clone()
            together.sums.append((owner, lambda: arrive(value)))

        block.local.stores.append(read)

    def wait_count(pointer, least):
        block.pause(lambda: int(pointer.load()) >= int(least), f"a count of {int(least)}")

    def wait_sums():
        names["store_wait"](0)
        mine = block.program, block.local.index
        block.pause(lambda: all(owner != mine for owner, _ in together.sums), "sums on their way")

    def count_up(pointer):
        pointer.store(pointer.load() + 1)
        block.pause()

    gl.atomic_add = draw
    return {**names, "tma_add": add, "wait_count": wait_count, "wait_sums": wait_sums, "count_up": count_up}
