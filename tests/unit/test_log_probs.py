"""Chunked log-probs and entropy of the trainer against their plainest form."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.algorithm.log_prob import log_probs_and_entropy
from dapo_megatron.trainer.log_probs import token_log_probs

pytestmark = pytest.mark.usefixtures("layout")

TOKENS, HIDDEN, VOCAB = 11, 8, 23
PADDED = 26  # rows of the weight, the last three being padding


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [n, H], weight [padded V, H] and tokens [n]; the padding would dominate if it counted."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight[VOCAB:] = 100.0
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    tokens[0], tokens[1] = 0, VOCAB - 1
    return hidden.requires_grad_(), weight.requires_grad_(), tokens


def compute(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0, chunk: int = 4
) -> tuple[Tensor, Tensor]:
    return token_log_probs(
        hidden, weight, tokens, vocab_size=VOCAB, temperature=temperature, chunk=chunk, group=dist.group.WORLD
    )


def reference(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    return log_probs_and_entropy(hidden @ weight[:VOCAB].T, tokens, temperature)


@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_values_and_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, tokens = inputs(torch.float64)
    found, expected = (
        compute(hidden, weight, tokens, temperature=temperature, chunk=chunk),
        reference(hidden, weight, tokens, temperature),
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    of_log_probs, of_entropy = torch.randn(2, TOKENS, dtype=torch.float64)
    for a, b in ((of_log_probs, None), (None, of_entropy), (of_log_probs, of_entropy)):
        gradients = [loss_gradients(outputs, a, b, (hidden, weight)) for outputs in (found, expected)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def loss_gradients(
    outputs: tuple[Tensor, Tensor], of_log_probs: Tensor | None, of_entropy: Tensor | None, leaves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum of log-probs, of entropies or of both; the graph stays."""
    pairs = zip(outputs, (of_log_probs, of_entropy), strict=True)
    loss = sum((output * weights).sum() for output, weights in pairs if weights is not None)
    assert isinstance(loss, Tensor)
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def test_gradient_is_that_of_finite_differences() -> None:
    hidden, weight, tokens = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: compute(h, w, tokens, temperature=0.7), (hidden, weight))


class Threads:
    """A process group whose ranks are threads: what `token_log_probs` asks of one, and the reduction between them."""

    def __init__(self, size: int) -> None:
        self._size, self._local, self._given = size, threading.local(), dict[int, Tensor]()
        self._barrier = threading.Barrier(size, timeout=30)

    def rank(self) -> int:
        return int(self._local.rank)

    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        self._given[self.rank()] = tensor.clone()
        self._barrier.wait()
        every = torch.stack([self._given[rank] for rank in range(self._size)])
        self._barrier.wait()
        tensor.copy_(every.amax(0) if op == dist.ReduceOp.MAX else every.sum(0))

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What `function(rank)` gives on each rank."""

        def on_rank(rank: int) -> Any:
            self._local.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(on_rank, range(self._size)))


def test_vocabulary_split_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the values; gradients of its rows, and its rows' share of the gradient of the hidden states."""
    hidden, weight, tokens = inputs(torch.float64)
    of_log_probs, of_entropy = torch.randn(2, TOKENS, dtype=torch.float64)
    expected = reference(hidden, weight, tokens, temperature=0.7)
    threads = Threads(2)
    monkeypatch.setattr("dapo_megatron.trainer.log_probs.dist.all_reduce", threads.all_reduce)

    def on_rank(rank: int) -> tuple[Tensor, ...]:
        rows = weight.detach().chunk(2)[rank].requires_grad_()
        own_hidden = hidden.detach().requires_grad_()
        outputs = token_log_probs(
            own_hidden, rows, tokens, vocab_size=VOCAB, temperature=0.7, chunk=4, group=cast(Any, threads)
        )
        return *outputs, *loss_gradients(outputs, of_log_probs, of_entropy, (own_hidden, rows))

    log_probs, entropy, of_hidden, of_rows = zip(*threads.run(on_rank), strict=True)
    for ours in zip(log_probs, entropy, strict=True):
        torch.testing.assert_close(ours, expected)
    whole = loss_gradients(expected, of_log_probs, of_entropy, (hidden, weight))
    torch.testing.assert_close((sum(of_hidden), torch.cat(of_rows)), whole)


def test_padded_rows_are_no_part_of_the_distribution() -> None:
    hidden, weight, tokens = inputs(torch.float32)
    log_probs, entropy = compute(hidden, weight, tokens)
    log_probs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad[VOCAB:].any()
    assert float(entropy.detach().max()) <= math.log(VOCAB)


def test_temperature_divides_the_logits() -> None:
    """Logits [2, 1, 0] at T = 0.5 are log_softmax([4, 2, 0])."""
    logits = torch.tensor([[2.0], [1.0], [0.0]])
    log_probs, entropy = token_log_probs(
        torch.ones(3, 1), logits, torch.arange(3), vocab_size=3, temperature=0.5, chunk=2, group=dist.group.WORLD
    )
    torch.testing.assert_close(log_probs, torch.tensor([-0.142932, -2.142932, -4.142932]), atol=1e-6, rtol=0)
    probabilities = log_probs.exp()
    torch.testing.assert_close(entropy, -(probabilities @ log_probs).expand(3))


def test_without_an_entropy_bonus_its_gradient_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second tensor of a chunk's logits is made, and adding the bonus with weight 0 changes no bit."""
    made: list[int] = []
    exp = Tensor.exp

    def counted(tensor: Tensor) -> Tensor:
        made.append(tensor.numel())
        return exp(tensor)

    monkeypatch.setattr(Tensor, "exp", counted)
    gradients = []
    for with_entropy in (False, True):
        hidden, weight, tokens = inputs(torch.float32)
        log_probs, entropy = compute(hidden, weight, tokens, chunk=TOKENS)
        made.clear()
        loss = log_probs.sum() + (0.0 * entropy.sum() if with_entropy else 0.0)
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
        assert made == ([TOKENS * VOCAB] if with_entropy else [])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_inputs_are_normalised_in_fp32() -> None:
    hidden, weight, tokens = inputs(torch.bfloat16)
    found = compute(hidden, weight, tokens, temperature=0.6)
    logits = (hidden @ weight[:VOCAB].T).float()  # the product itself is rounded to bf16, as in the model
    for ours, theirs in zip(found, log_probs_and_entropy(logits, tokens, 0.6), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(found[0].sum(), (hidden, weight))
    exact = inputs(torch.float64)
    exact_gradients = torch.autograd.grad(reference(*exact, temperature=0.6)[0].sum(), exact[:2])
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(dtype: torch.dtype) -> None:
    hidden, weight, _ = inputs(dtype)
    empty = hidden[:0]
    log_probs, entropy = compute(empty, weight, torch.empty(0, dtype=torch.long))
    assert log_probs.shape == entropy.shape == (0,)
    assert log_probs.dtype == torch.float32
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.999], [-1.0]])
    log_probs, entropy = token_log_probs(
        hidden, weight, torch.tensor([0]), vocab_size=3, temperature=0.1, chunk=8, group=dist.group.WORLD
    )
    torch.testing.assert_close(log_probs, torch.tensor([-math.log1p(math.exp(-10))]), atol=1e-4, rtol=0)
    assert bool(entropy.isfinite().all())
