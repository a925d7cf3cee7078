"""Inputs split over a group: equal gradients, exact bytes, the same order in every process."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, make_units
from ds_ckpt.activation.fingerprints import checksum
from ds_ckpt.activation.inputs import CheckpointedInputs
from ds_ckpt.activation.offload import Copies, InputStore, Wait, storage_bytes
from ds_ckpt.activation.partition import Partition, shard_bytes, shard_of
from ds_ckpt.activation.policies import Policy, make_policy
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.lab.validate.virtual import VirtualWorld
from tests.unit.offload_models import CPU, Boom, LateCopies, device_bytes, equal, grads, host_bytes


class _Gathered:
    """A gather whose result is written when somebody waits, and not before."""

    def __init__(self, parts: list[Tensor], joined: Tensor) -> None:
        self._parts: list[Tensor] | None = parts
        self._joined = joined
        joined.fill_(0xA5)

    def __call__(self) -> None:
        if self._parts is not None:
            self._joined.copy_(torch.cat(self._parts))
            self._parts = None


class ThreadGroup:
    """One thread's end. `gathered` logs bytes by gather, to compare the order over threads."""

    def __init__(self, virtual: VirtualWorld, index: int) -> None:
        self._virtual, self.index = virtual, index
        self.processes = tuple(range(10, 10 + virtual.world))
        self.gathered: list[int] = []
        self.exchanges = 0

    def _of_all(self, mine: Tensor) -> list[Tensor]:
        seen = list(self._virtual.transports[self.index]._post(mine.clone()))
        self._virtual.synchronize()
        assert len({one.numel() for one in seen}) == 1, "a real backend would hang or mix them up"
        return seen

    def gather(self, part: Tensor, joined: Tensor) -> Wait:
        self.gathered.append(part.numel())
        return _Gathered(self._of_all(part), joined)

    def exchange(self, mine: Tensor) -> Tensor:
        self.exchanges += 1
        return torch.stack(self._of_all(mine))


def in_threads(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Results of `work` in every thread of a new group; raises the first error."""
    virtual = VirtualWorld(size, timeout_s=20.0)
    return virtual.run(lambda index: work(ThreadGroup(virtual, index)))


class Block(nn.Module):
    """A tuple, a keyword argument that needs a gradient, whole numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, both, *, order: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x, mask = both
        y = self.down(torch.relu(self.up(x[order]))) * scale
        return x + torch.where(mask, y, 0.5 * y), mask


class Model(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[-1]) % 3 > 0
        order = torch.arange(x.shape[0] - 1, -1, -1)
        scale = 2 * self.scale
        for block in self.blocks:
            x, mask = block((x, mask), order=order, scale=scale)
        return x.square().mean()


class On:
    """A model whose blocks are checkpointed, with what they are given split over the group."""

    def __init__(self, model, group, *, offload=False, policy=None, late=True, **how) -> None:
        self.group, how = group, {"min_bytes": 0, "every": 100, "ahead": 1, **how}
        copies, owned = LateCopies() if late else Copies(), [*model.parameters(), *model.buffers()]
        own = {"offload": offload, "min_bytes": 0, "prefetch": 2 * how["ahead"], "owned": owned}
        self.store = InputStore(CPU, copies, **own)
        self.partition = Partition(group, self.store, CPU, **how)
        policy = policy or Policy(modules=("Block",))
        units = make_units(model, policy)
        inputs = CheckpointedInputs(self.store, partition=self.partition, units=units)
        self.blocks = CheckpointedBlocks(model, policy=policy, units=units, around=inputs.around)

    def nothing_left(self) -> bool:
        here = device_bytes(self.store), host_bytes(self.store)
        return here == (0, 0) and not self.partition._here and not self.partition._shards


def _input(rows: int = 6, width: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@given(
    width=st.integers(1, 9),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 5),
    size=st.integers(2, 5),
    how=st.fixed_dictionaries(
        {
            "offload": st.booleans(),
            "ahead": st.integers(1, 3),
            "every": st.integers(1, 3),
            "late": st.booleans(),
        }
    ),
    kind=st.sampled_from(["block", "segments", "every_n", "selective"]),
)
def test_gradients_are_bitwise_those_of_no_checkpointing(
    width, rows, blocks, size, how, kind
) -> None:
    x = _input(rows, width)
    plain = grads(Model(width, blocks), x)

    def work(group: ThreadGroup) -> On:
        model = Model(width, blocks)
        on = On(model, group, policy=Policy(make_policy(kind), modules=("Block",)), **how)
        for _ in range(3):
            assert equal(plain, grads(model, x))
            assert on.nothing_left()
        return on

    for on in in_threads(size, work):
        counters = on.partition.counters
        assert counters.kept_bytes
        if kind != "block":
            continue
        # one shard for every block's input, and one each for the mask, the order and the scale
        assert counters.gathers == 3 * (blocks + 3)
        assert on.group.exchanges == 3


@pytest.mark.parametrize(("size", "offload"), [(2, False), (4, False), (2, True)])
def test_each_rank_keeps_exactly_its_share(size: int, offload: bool) -> None:
    part = 64 * 8 * 4 // size
    others = 8 * 1 + 64 * 8 + 8 * 4  # mask, order and scale: once, whole

    def work(group: ThreadGroup) -> On:
        model = Model(blocks=5)
        on = On(model, group, offload=offload, min_bytes=1024)
        loss = model(_input(64))
        assert on.partition.counters.kept_bytes == {f"blocks.{i}": part for i in range(5)}
        # the small ones belong to the last call too, and stay with it
        here = (1 if offload else 5) * part + others
        assert (device_bytes(on.store), host_bytes(on.store)) == (here, 4 * part * offload)
        loss.backward()
        assert on.nothing_left()
        return on

    for on in in_threads(size, work):
        assert on.store.counters.out == on.store.counters.back
        # all but the last call's were gathered before their recompute
        assert (on.partition.counters.late, on.partition.counters.gathers) == (1, 5)


def test_several_forwards_before_a_backward_and_a_retained_graph() -> None:
    first, second = _input(seed=1), _input(seed=2)
    reference = Model()
    reference.zero_grad()
    one, two = reference(first), reference(second)
    for loss in (one, two, two):
        loss.backward(retain_graph=True)
    plain = [p.grad.clone() for p in reference.parameters()]

    def work(group: ThreadGroup) -> On:
        model = Model()
        on = On(model, group, offload=group.processes == (10, 11))
        one, two = model(first), model(second)
        one.backward()
        two.backward(retain_graph=True)
        two.backward()
        assert equal(plain, [p.grad for p in model.parameters()])
        del one, two
        assert on.nothing_left()
        return on

    for size in (2, 3):
        answers = in_threads(size, work)
        assert all(on.group.gathered == answers[0].group.gathered for on in answers)


def test_results_of_operators_may_differ_over_the_group() -> None:
    """Tensor parallelism shards them: selective keeps them whole."""

    class Sharded(Block):
        share = 1.0

        def forward(self, both: Any, *, order: Tensor, scale: Tensor) -> Any:
            x, mask = both
            inner = self.up(x) * self.share
            return x + (inner - inner.detach())[:, : x.shape[1]], mask

    def work(group: ThreadGroup) -> On:
        model = Model()
        for block in model.blocks:
            block.__class__, block.share = Sharded, 1.0 + group.index
        x = _input()
        plain = grads(model, x)
        settings = make_policy("selective", save_ops=("matmuls",))
        on = On(model, group, policy=Policy(settings, modules=("Sharded",)))
        assert equal(plain, grads(model, x))
        return on

    for on in in_threads(2, work):
        assert on.partition.counters.gathers > 0


def _one_bit(model: nn.Module, x: Tensor) -> Tensor:
    x.view(torch.int32)[3, 3] ^= 1
    return x


def _fewer_blocks(model: nn.Module, x: Tensor) -> Tensor:
    model.blocks = model.blocks[:2]
    return x


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model, x: _input(seed=2), "values"),
        (_one_bit, "values"),
        (lambda model, x: _input(9), "numbers, shapes"),
        (lambda model, x: _input(1), "numbers, shapes"),
        (_fewer_blocks, "numbers, shapes"),
    ],
)
def test_ranks_that_differ_all_raise(change: Any, what: str) -> None:
    def work(group: ThreadGroup) -> None:
        model, x = Model(blocks=3), _input()
        On(model, group, min_bytes=64)
        if group.index == 1:
            x = change(model, x)
        with pytest.raises(UnsupportedError, match=f"other {what}.* ranks 10, 11"):
            model(x).backward()
        with pytest.raises(UnsupportedError, match="partition_activations"):
            model(x)

    in_threads(2, work)


@pytest.mark.parametrize(
    ("at", "every", "found"), [(0, 3, True), (3, 3, True), (4, 3, False), (5, 1, True)]
)
def test_values_are_compared_every_so_many_calls(at: int, every: int, found: bool) -> None:
    def work(group: ThreadGroup) -> bool:
        model = Model(blocks=3)
        On(model, group, every=every)
        for step in range(7):
            try:
                model(_input(seed=2 if step == at and group.index else 1)).backward()
            except UnsupportedError:
                return True
        return False

    assert in_threads(2, work) == [found] * 2


def test_garbage_that_one_process_has_not_collected_stops_nobody() -> None:
    """Gathers ahead follow from what all processes know, not from what is alive in one of them."""
    x = _input()
    plain = grads(Model(), x)

    def work(group: ThreadGroup) -> On:
        model = Model()
        on = On(model, group)
        loss = model(_input(seed=5))
        if group.index == 0:
            loop: list[Any] = [loss]
            loop.append(loop)
            del loop
        del loss
        for _ in range(2):
            assert equal(plain, grads(model, x))
        return on

    gc.disable()
    try:
        one, two = in_threads(2, work)
    finally:
        gc.enable()
    assert one.group.gathered == two.group.gathered


def test_a_dropped_loss_and_errors_leave_nothing() -> None:
    def work(group: ThreadGroup) -> None:
        model = Model()
        on = On(model, group, offload=True)
        model(_input())
        assert on.nothing_left()

        handle = model.blocks[1].register_forward_hook(
            lambda module, args, output: (Boom.apply(output[0]), output[1])
        )
        with pytest.raises(OSError, match="boom"):
            model(_input()).backward()
        handle.remove()
        gc.collect()  # the error's traceback
        model(_input())
        assert on.nothing_left()
        model(_input()).backward()
        assert on.nothing_left()

    in_threads(2, work)


def test_changing_the_original_later_changes_nothing() -> None:
    """The part is a copy: no error, and the values from before."""

    class Changing(Model):
        changes = True

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.0
            order, scale = torch.arange(x.shape[0]), 2 * self.scale
            mask = torch.arange(x.shape[-1]) % 3 > 0
            y, _ = self.blocks[0]((x, mask), order=order, scale=scale)
            with torch.no_grad():
                x.mul_(0 if self.changes else 1)
            return y.square().mean()

    def work(group: ThreadGroup) -> list[Tensor]:
        model = Changing()
        model.changes = group.index == 1
        On(model, group)
        return grads(model, _input())

    assert equal(*in_threads(2, work))


_NAMES = "float32 float64 bfloat16 float16 int64 int32 uint8 bool complex64 float8_e4m3fn"
DTYPES = [getattr(torch, name) for name in _NAMES.split()]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any shape and dtype; also views: transposed, a stretch of a larger one, expanded."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    tensor = _tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["plain", "transposed", "rows", "expanded"]))
    if kind == "transposed" and len(shape) > 1:
        return tensor.transpose(0, -1)
    if kind == "rows" and shape and shape[0] > 1:
        return tensor[draw(st.integers(0, shape[0] - 1)) :]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    return tensor


@given(tensor=tensors(), parts=st.integers(1, 9))
def test_parts_are_equal_and_make_the_whole(tensor: Tensor, parts: int) -> None:
    flat = storage_bytes(tensor)
    split_up = [shard_of(flat, parts, index) for index in range(parts)]
    sizes = {part.numel() for part in split_up}
    assert sizes == {shard_bytes(flat.numel(), parts)}
    (size,) = sizes
    # exactly 1/t where it divides, the next whole byte where it does not
    assert size * parts - flat.numel() in range(parts)
    assert torch.equal(torch.cat(split_up)[: flat.numel()], flat)
    # a part owns no more memory than itself, and is no window on the original
    assert all(part.untyped_storage().nbytes() == size for part in split_up)
    assert all(p.untyped_storage().data_ptr() != flat.data_ptr() for p in split_up)


@given(tensor=tensors(), data=st.data())
def test_every_bit_counts(tensor: Tensor, data: Any) -> None:
    before = int(checksum(tensor))
    plain = tensor[0] if tensor.dim() and tensor.stride(0) == 0 else tensor  # expanded
    raw = plain.contiguous().view(-1).view(torch.uint8).clone()
    again = raw.clone().view(tensor.dtype).view(plain.shape)
    assert int(checksum(again)) == int(checksum(plain))
    index = data.draw(st.integers(0, raw.numel() - 1))
    raw[index] ^= 1 if tensor.dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    other = raw.view(tensor.dtype).view(plain.shape)
    assert int(checksum(other)) != int(checksum(plain))
    assert int(checksum(tensor)) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_places_count(dtype: torch.dtype) -> None:
    tensor = _tensor((64, 33), dtype)
    seen = {int(checksum(tensor))}
    seen |= {int(checksum(tensor.flip(dim))) for dim in (0, 1)}
    seen |= {int(checksum(torch.roll(tensor, n, dim))) for n in range(1, 33) for dim in (0, 1)}
    assert len(seen) == 1 + 2 + 64
