"""What torchrun starts on two ranks: generation and losses of sharded models, against those of one process."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtune import training
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.generation import (
    BatchServer,
    GenerationError,
    Job,
    Sampling,
    follow_batches,
    generate,
    generate_tokens,
)
from torchtune.generation._batch_server import Drawn
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder
from torchtune.modules.loss import LinearCrossEntropyLoss, linear_log_probs, setup_loss
from torchtune.training import ParallelDims
from torchtune.training.parallel import Ranks

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8]]


def load(checkpoint: Path, dims: ParallelDims, **options: object) -> TransformerDecoder:
    with torch.device("meta"):
        model = from_hf_config(checkpoint)
    training.parallelize(model, dims, device=CPU, **options)
    FullModelHFCheckpointer(str(checkpoint)).load_model(model, device=CPU)
    return model


def generates_as_one(model: TransformerDecoder, alone: TransformerDecoder, *, shared: bool) -> None:
    """``shared``: both ranks have the same prompts; otherwise each its own, which end at different steps."""
    prompts = PROMPTS if shared or dist.get_rank() else PROMPTS[:1]
    free = generate_tokens(alone, PROMPTS[:1], max_new_tokens=6, temperature=0.0)
    stop = [free.tokens[0][2].item()]  # rank 0 ends at its third token
    for use_cache in (True, False):
        arguments = {"max_new_tokens": 6, "temperature": 0.0, "stop_tokens": stop, "use_cache": use_cache}
        arguments["tokens_per_check"] = 4 if use_cache else 1
        sharded = generate_tokens(model, prompts, **arguments)
        expected = generate_tokens(alone, prompts, **arguments)
        for tokens, expected_tokens in zip(sharded.tokens, expected.tokens, strict=True):
            assert torch.equal(tokens, expected_tokens), (tokens, expected_tokens)
        for log_probs, expected_log_probs in zip(sharded.log_probs, expected.log_probs, strict=True):
            torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-4)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    sampled = generate_tokens(model, prompts, max_new_tokens=5, num_samples=3)
    if shared:  # ranks have drawn differently, and agreed
        tokens = torch.cat(sampled.tokens)
        first = tokens.clone()
        dist.broadcast(first, 0)
        assert torch.equal(tokens, first)


def generates_with_whole_weights(model: TransformerDecoder, alone: TransformerDecoder) -> None:
    """After a forward pass, whose weights FSDP has not sharded again; so long that weights of one process move."""
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = model(tokens, output="hidden")
    assert type(model.layers[0].mlp.w1.weight) is torch.nn.Parameter
    generated = generate_tokens(model, PROMPTS, max_new_tokens=32, temperature=0.0)
    expected = generate_tokens(alone, PROMPTS, max_new_tokens=32, temperature=0.0)
    for new_tokens, expected_tokens in zip(generated.tokens, expected.tokens, strict=True):
        assert torch.equal(new_tokens, expected_tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens, output="hidden"), before)


def trains_on_logits_as_one(checkpoint: Path, dims: ParallelDims, model: TransformerDecoder) -> None:
    """A loss of logits, whose vocabulary is sharded."""
    rng = torch.Generator().manual_seed(dims.data_rank)
    tokens, labels = torch.randint(250, (2, 1, 16), generator=rng)
    labels[0, :5] = -100
    positions = torch.arange(16)[None]
    reference = load(checkpoint, ParallelDims())
    for trained, loss in ((model, torch.nn.CrossEntropyLoss()), (reference, LinearCrossEntropyLoss())):
        loss_fn = setup_loss(loss, trained)
        total, _ = loss_fn.sum_and_count(trained(tokens, input_pos=positions, output="hidden"), labels, trained.output)
        total.backward()
    losses = [p.grad for p in reference.parameters()]
    for parameter, wanted in zip(model.parameters(), losses, strict=True):
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if dims.data_size > 1:  # gradients are sums over ranks
            wanted = wanted.clone()
            dist.all_reduce(wanted)
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))


def terms_of_the_loss_of_a_sharded_vocabulary(mesh: object) -> None:
    """The sums over the shards give the loss, gradients and metrics of the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(23, 12, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(50, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(50, (23,), generator=generator)
    labels[3] = -100
    full_layer = torch.nn.Linear(12, 50, bias=False, dtype=torch.float64)
    full_layer.weight = torch.nn.Parameter(weight)
    sharded = torch.nn.Linear(12, 50, bias=False, dtype=torch.float64)
    for terms in (
        {},
        {"label_smoothing": 0.1, "z_loss": 0.02},
        {"reweighting": "dft"},
        {"reweighting": "eaft", "eaft_alpha": 2.0, "z_loss": 0.02},
    ):
        loss = LinearCrossEntropyLoss(**terms)
        sharded.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        results = []
        for projection in (sharded, full_layer):
            metrics = {}
            total, _ = loss.sum_and_count(hidden[None], labels[None], projection, metrics=metrics)
            of_hidden, of_weight = torch.autograd.grad(total, [hidden, projection.weight])
            if projection is sharded:
                dist.all_reduce(of_hidden)  # each rank has its summand
                of_weight = of_weight.full_tensor()
            results.append([total, of_hidden, of_weight, *metrics["token_accuracy"], *metrics["entropy"]])
        for value, expected in zip(*results, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-11)


def log_probs_of_a_sharded_vocabulary(mesh: object) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 12, generator=rng, dtype=torch.float64).requires_grad_() for n in (23, 50))
    targets = torch.randint(50, (23,), generator=rng)
    log_p = torch.log_softmax(3.0 * torch.tanh(hidden @ weight.t() / 3.0) / 0.8, -1)
    exact = log_p.gather(1, targets[:, None])[:, 0]
    exact_entropy = -(log_p.exp() * log_p).sum(-1)
    sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    options = {"temperature": 0.8, "softcap": 3.0, "return_entropy": True, "chunk_rows": 6}
    sharded_log_probs, entropy = linear_log_probs(hidden, sharded, targets, **options)
    torch.testing.assert_close(sharded_log_probs, exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, exact_entropy, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 2, 23, dtype=torch.float64)

    def gradients(log_probs: Tensor, entropy: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((log_probs * weights + entropy * weights.flip(0)).sum(), leaves)

    grad_hidden, grad_weight = gradients(sharded_log_probs, entropy, [hidden, sharded])
    dist.all_reduce(grad_hidden)  # each rank has its summand
    wanted = gradients(exact, exact_entropy, [hidden, weight])
    torch.testing.assert_close(grad_hidden, wanted[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(grad_weight.full_tensor(), wanted[1], rtol=0, atol=1e-11)


def serves_as_one(model: TransformerDecoder, alone: TransformerDecoder) -> None:
    """Rank 0 has the jobs; of one, nobody waits any more, and one fails."""
    stop = [generate_tokens(alone, PROMPTS[:1], max_new_tokens=6, temperature=0.0).tokens[0][2].item()]

    def answers(server: BatchServer) -> list[list[Drawn]]:
        jobs = []
        for number, prompt in enumerate(PROMPTS):
            jobs.append(Job("tiny", prompt, 5, Sampling(temperature=number % 2), num_top=number % 3, seed=number))
        jobs[1].is_cancelled = True
        assert server.submit(*jobs)
        return [list(job) for job in jobs]

    ranks = Ranks()
    if ranks.rank > 0:
        follow_batches({"tiny": model}, ranks, max_sequences=2)
        return
    with closing(BatchServer({"tiny": alone}, stop, max_sequences=2)) as batch_server:
        expected = answers(batch_server)
    with closing(BatchServer({"tiny": model}, stop, max_sequences=2, ranks=ranks)) as server:
        drawn = answers(server)
        invalid = Job("tiny", PROMPTS[0], 2, Sampling(logits_processors=[lambda tokens, logits: logits * float("nan")]))
        assert server.submit(invalid)
        with pytest.raises(GenerationError, match="not finite"):
            list(invalid)
        valid = Job("tiny", PROMPTS[0], 2, Sampling(temperature=0.0))
        assert server.submit(valid)
        assert len(list(valid)) == 2  # it goes on
        assert server.failure is None
    assert len(drawn[1]) == 1
    for answer, expected_answer in zip(drawn, expected, strict=True):
        assert [step.token for step in answer] == [step.token for step in expected_answer]
        assert [len(step.top) for step in answer] == [len(step.top) for step in expected_answer]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tp = ParallelDims.start(CPU, dp_shard=1, tp=2)
    log_probs_of_a_sharded_vocabulary(tp.mesh["tp"])
    terms_of_the_loss_of_a_sharded_vocabulary(tp.mesh["tp"])
    fsdp = ParallelDims.start(CPU, dp_shard=2)
    for tied in (True, False):
        checkpoint = folder / f"tied_{tied}"
        alone = load(checkpoint, ParallelDims())
        model = load(checkpoint, tp)
        generates_as_one(model, alone, shared=True)
        prompts = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
        trains_on_logits_as_one(checkpoint, tp, model)
        for apart in (None, ["tok_embeddings", "output"]):
            model = load(checkpoint, fsdp, custom_sharded_layers=apart)
            generates_as_one(model, alone, shared=False)
            generated = generate(model, prompts, max_generated_tokens=4, temperature=0.0)[0]
            assert torch.equal(generated, generate(alone, prompts, max_generated_tokens=4, temperature=0.0)[0])
            trains_on_logits_as_one(checkpoint, fsdp, model)
    for dims in (tp, fsdp):
        serves_as_one(load(checkpoint, dims), alone)
    generates_with_whole_weights(load(checkpoint, fsdp, reshard_after_forward=False), alone)
    cp = load(folder / "tied_True", ParallelDims.start(CPU, dp_shard=1, cp=2))
    with pytest.raises(ValueError, match="set context_parallel_dim to 1"):
        generate_tokens(cp, PROMPTS, max_new_tokens=2)
    dist.barrier()
    dist.destroy_process_group()
