"""The wire layout of weights and their hashes."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.sync.buckets import ALIGNMENT, TensorSpec, dtype_name, pack, tensor_hash
from dapo_megatron.sync.sender import compare_hashes
from dapo_megatron.sync.server_admin import ServerError

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=20).map(
    lambda pairs: [TensorSpec(f"tensor.{index}", dtype, shape) for index, (dtype, shape) in enumerate(pairs)]
)


def random_tensor(spec: TensorSpec) -> torch.Tensor:
    return torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8).view(spec.dtype).view(spec.shape)


@given(SPECS, st.integers(1, 3000))
def test_tensors_of_mixed_dtypes_survive_the_wire(specs: list[TensorSpec], limit: int) -> None:
    tensors = {spec.name: random_tensor(spec) for spec in specs}
    received: dict[str, str] = {}
    for bucket in pack(specs, limit):
        assert bucket.nbytes <= limit or len(bucket.specs) == 1
        assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for name, view in bucket.views(buffer):
            view.copy_(tensors[name])
        wire = buffer.clone()
        for (name, view), spec in zip(bucket.views(wire), bucket.specs, strict=True):
            assert (view.dtype, tuple(view.shape)) == (spec.dtype, spec.shape)
            received[name] = tensor_hash(view)
    assert list(received) == [spec.name for spec in specs]
    assert received == {name: tensor_hash(tensor) for name, tensor in tensors.items()}


def test_buckets_are_as_full_as_their_limit_allows() -> None:
    specs = [TensorSpec(str(index), torch.float32, (16,)) for index in range(5)]
    assert [len(bucket.specs) for bucket in pack(specs, 128)] == [2, 2, 1]
    assert [len(bucket.specs) for bucket in pack(specs, 127)] == [1, 1, 1, 1, 1]


def test_large_tensor_has_a_bucket_of_its_own() -> None:
    sizes = [10, 1000, 10, 10]
    specs = [TensorSpec(str(index), torch.uint8, (size,)) for index, size in enumerate(sizes)]
    assert [[spec.name for spec in bucket.specs] for bucket in pack(specs, 100)] == [["0"], ["1"], ["2", "3"]]


def test_hash_is_that_of_the_bytes_in_row_major_order() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert tensor_hash(tensor) == hashlib.sha256(tensor.view(torch.int16).numpy().tobytes()).hexdigest()
    assert tensor_hash(tensor.t()) == tensor_hash(tensor.t().contiguous()) != tensor_hash(tensor)
    assert tensor_hash(torch.tensor(1.0, requires_grad=True)) == tensor_hash(torch.tensor([1.0]))
    assert tensor_hash(torch.tensor([0.0])) != tensor_hash(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_names_lead_back(dtype: torch.dtype) -> None:
    assert getattr(torch, dtype_name(dtype)) is dtype


def test_first_differing_tensor_is_named() -> None:
    sent = {"a": "1", "b": "2", "c": "3"}
    compare_hashes("http://s", sent, [sent, sent])
    with pytest.raises(ServerError, match="server http://s, worker 1: tensor b arrived with hash 5, sent was 2"):
        compare_hashes("http://s", sent, [sent, {"a": "1", "b": "5", "c": "6"}])
    with pytest.raises(ServerError, match="tensor c arrived with hash None"):
        compare_hashes("http://s", sent, [{"a": "1", "b": "2"}])
