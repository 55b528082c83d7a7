"""The bytes of a push on the wire, and their hashes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.sync.buckets import BLOCK, fill_nan, has_nan, hashes, views
from dapo_megatron.sync.inbox import whole_tensor
from dapo_megatron.sync.pusher import compare_hashes
from dapo_megatron.sync.server_admin import ServerError
from dapo_megatron.sync.wire import ALIGNMENT, ITEM_BYTES, Bucket, Group, Stretch, decode, encode
from tests.models import tiny_model
from tests.pushing import equal, plan_of

GROUP = Group(0, (0,))


@st.composite
def stretches(draw: st.DrawFn) -> Stretch:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim] - 1))
    stop = draw(st.integers(start + 1, shape[dim]))
    return Stretch(draw(st.text("abc", min_size=1)), draw(st.sampled_from(sorted(ITEM_BYTES))), shape, dim, start, stop)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.lists(stretches(), min_size=1, max_size=12))
def test_stretches_of_mixed_dtypes_survive_the_wire(found: list[Stretch]) -> None:
    bucket = Bucket(GROUP, tuple(found))
    assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
    (group,), (received,) = decode(**encode([bucket]))
    assert (group, received) == (GROUP, bucket)
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    sent: list[torch.Tensor] = []
    for stretch, view in views(bucket, buffer):
        assert (str(view.dtype), tuple(view.shape)) == (f"torch.{stretch.dtype}", stretch.size)
        sent.append(random_bytes(stretch.nbytes, len(sent)).view(view.dtype).view(view.shape))
        view.copy_(sent[-1])
    arrived = [view for _, view in views(received, buffer.clone())]
    assert all(map(equal, arrived, sent))
    for backend in ("gloo", "nccl"):
        assert hashes(arrived, backend) == hashes(sent, backend)


def test_groups_travel_once() -> None:
    other = Group(1, (0, 2))
    stretch = Stretch("a", "float32", (4,), 0, 1, 3)
    buckets = [Bucket(group, (stretch,)) for group in (GROUP, other, GROUP)]
    message = encode(buckets)
    assert len(message["groups"]) == 2
    assert decode(**message) == ([GROUP, other], buckets)


# --- hashes ------------------------------------------------------------------------------------------------------


def on_host(tensor: torch.Tensor) -> int:
    (found,) = hashes([tensor], "gloo")
    return found


def on_device(tensor: torch.Tensor) -> int:
    """What a GPU would compute, here on a processor."""
    (found,) = hashes([tensor], "nccl")
    return found


both = pytest.mark.parametrize("tensor_hash", [on_host, on_device])
Hash = Callable[[torch.Tensor], int]
SIZES = [1, 7, 8, 9, 63, 64, 1000, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 8, 8 * BLOCK + 13]


@both
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_flipped_bit_changes_the_hash(tensor_hash: Hash, nbytes: int) -> None:
    tensor = random_bytes(nbytes)
    due = tensor_hash(tensor)
    places = range(8 * nbytes) if nbytes <= 64 else [0, 8 * nbytes - 1, 4 * nbytes + 3, *range(7, 8 * nbytes, nbytes)]
    for place in places:
        tensor[place // 8] ^= 1 << place % 8
        assert tensor_hash(tensor) != due, place
        tensor[place // 8] ^= 1 << place % 8
    assert tensor_hash(tensor) == due


@both
def test_highest_bits_that_flip_together_change_the_hash(tensor_hash: Hash) -> None:
    """Differences of 2^63 vanish with any pair of odd factors alike, but for one bit they are the whole sum."""
    words = torch.zeros(4, dtype=torch.int64)
    due = tensor_hash(words)
    words[2] = -(1 << 63)
    assert tensor_hash(words) != due


@both
@pytest.mark.parametrize("distance", [1, 2, 64, BLOCK - 1, BLOCK, BLOCK + 1])
def test_swapped_words_change_the_hash(tensor_hash: Hash, distance: int) -> None:
    words = random_bytes(16 * BLOCK + 16).view(torch.int64)
    due = tensor_hash(words)
    words[[3, 3 + distance]] = words[[3 + distance, 3]]
    assert tensor_hash(words) != due


@both
@pytest.mark.parametrize("nbytes", [1, 8, 16, 1024, 8 * BLOCK])
def test_truncated_and_padded_tensors_have_other_hashes(tensor_hash: Hash, nbytes: int) -> None:
    zeros = torch.zeros(nbytes + 8, dtype=torch.uint8)
    found = {tensor_hash(zeros[:length]) for length in range(nbytes - 1, nbytes + 9)}
    assert len(found) == 10


@both
def test_hash_is_that_of_the_bytes_in_row_major_order(tensor_hash: Hash) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert tensor_hash(tensor) == tensor_hash(tensor.view(torch.uint8).flatten())
    assert tensor_hash(tensor.t()) == tensor_hash(tensor.t().contiguous()) != tensor_hash(tensor)
    assert tensor_hash(torch.tensor(1.0, requires_grad=True)) == tensor_hash(torch.tensor([1.0]))
    assert tensor_hash(torch.tensor([0.0])) != tensor_hash(torch.tensor([-0.0]))
    shifted = random_bytes(33)[1:]
    assert tensor_hash(shifted) == tensor_hash(shifted.clone())
    assert hashes([], "gloo") == hashes([], "nccl") == []


@pytest.mark.parametrize(("tensor_hash", "due"), [(on_host, 13933062509920428870), (on_device, 7602808864563830870)])
def test_hash_is_the_same_on_every_machine(tensor_hash: Hash, due: int) -> None:
    """Both sides of a push may have different versions of torch."""
    assert tensor_hash(torch.arange(100_003, dtype=torch.int32)) == due


# --- stretches in whole tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_a_worker_does_not_get_is_no_number(dtype: str, dim: int) -> None:
    stretch = Stretch("a", dtype, (6, 5), dim, 1, 3)
    view = torch.ones(stretch.size, dtype=getattr(torch, dtype))
    whole = whole_tensor(stretch, view, watched=True)
    assert whole.shape == (6, 5)
    assert torch.equal(whole.narrow(dim, 1, 2), view)
    assert int(whole.isnan().sum()) == 30 - view.numel()
    assert has_nan(whole)
    assert not has_nan(whole.narrow(dim, 1, 2))
    assert torch.equal(whole_tensor(stretch, view, watched=False).narrow(dim, 1, 2), view)


def test_whole_tensors_are_not_copied() -> None:
    view = torch.ones(4, 3)
    assert whole_tensor(Stretch("a", "float32", (4, 3), 1, 0, 3), view, watched=True) is view


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_of_floats_are_no_numbers_either(dtype: torch.dtype) -> None:
    numbers = torch.ones(4).to(dtype)
    assert not has_nan(numbers)
    assert has_nan(fill_nan(numbers))


# --- comparing -----------------------------------------------------------------------------------------------------


def test_first_differing_stretch_is_named(tmp_path: Path) -> None:
    plan = plan_of(tiny_model(tmp_path / "model", "llama"), bucket_bytes=1 << 30)
    count = [len(bucket.stretches) for bucket in plan.buckets]
    sent = {0: [list(range(n)) for n in count]}
    received = [number for bucket in sent[0] for number in bucket]
    compare_hashes("http://s", plan, sent, [received])
    second = plan.buckets[0].stretches[1].name
    with pytest.raises(
        ServerError, match=f"server http://s, worker 0: tensor {second} arrived with hash 0x63"
    ) as caught:
        compare_hashes("http://s", plan, sent, [[0, 99, 98, *received[3:]]])
    assert caught.value.url == "http://s"
    last = plan.buckets[-1].stretches[-1].name
    with pytest.raises(ServerError, match=f"tensor {last} arrived not at all"):
        compare_hashes("http://s", plan, sent, [received[:-1]])
