"""PPO: one step against plain float64 code, and what its recipe has of its own: four models, two of them trained."""

import math

import pytest
import torch

from tests.recipes.runs import resume, start
from tests.tiny import read_lines, write_checkpoint, write_lines
from torchtune.rlhf import RewardModel, Rollout
from torchtune.utils import UserError

PPO = "ppo_full_finetune_single_device"
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.3}, "lr_scheduler": None, "shuffle": False}
STOPS = [2, *range(80, 110)]
# A step with clipped ratios and values, penalties of both kinds, and a reference that differs from the policy.
STEP = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
    "lr_scheduler": None,
    "shuffle": False,
    "max_steps_per_epoch": 1,
    "batch_size": 6,
    "ppo_epochs": 3,
    "gamma": 0.9,
    "lmbda": 0.8,
    "kl_coeff": 0.3,
    "temperature": 0.7,
    "reward_penalty": -2.0,
    "min_response_length": 2,
    "stop_token_ids": STOPS,
    "loss": {
        "_component_": "torchtune.rlhf.loss.PPOLoss",
        "epsilon": 0.1,
        "value_clip_range": 0.05,
        "value_coeff": 0.5,
    },
}


def other_reference(folder):
    """A checkpointer of a reference that is not the policy's start."""
    checkpoint = folder / "reference"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, seed=5)
    return {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(checkpoint)}


class PlainPPO:
    """The same step in float64: models of ``transformers``, one answer at a time, loops over tokens."""

    def __init__(self, folder, rollouts):
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        def load(kind, name):
            return kind.from_pretrained(folder / name, dtype=torch.float64).eval()

        self.policy = load(AutoModelForCausalLM, "checkpoint")
        self.reference = load(AutoModelForCausalLM, "reference")
        self.value = load(AutoModelForSequenceClassification, "reward")  # it starts as the reward model
        self.reward = load(AutoModelForSequenceClassification, "reward")
        self.rollouts = rollouts

    def log_probs(self, model, rollout):
        """Log-probs of the tokens of an answer."""
        all_log_probs = (model(rollout.tokens[None]).logits[0] / 0.7).log_softmax(-1)
        positions = range(rollout.prompt_len, len(rollout.tokens))
        return torch.stack([all_log_probs[position - 1, rollout.tokens[position]] for position in positions])

    def values(self, model, rollout):
        """Values before each token of an answer."""
        hidden = model.model(rollout.tokens[None]).last_hidden_state[0]
        return (hidden @ model.score.weight[0])[rollout.prompt_len - 1 : -1]

    def rewards(self, rollout, log_probs):
        """The difference to the reference of each token; the last one has the score, too."""
        last_state = self.reward.model(rollout.tokens[None]).last_hidden_state[0, -1]
        score = (last_state @ self.reward.score.weight[0]).item()
        if len(log_probs) < 2 or int(rollout.tokens[-1]) not in STOPS:
            score = -2.0
        reference = self.log_probs(self.reference, rollout).tolist()
        rewards = []
        for log_prob, reference_log_prob in zip(log_probs, reference, strict=True):
            rewards.append(-0.3 * (log_prob - reference_log_prob))
        rewards[-1] += score
        return rewards

    @torch.no_grad()
    def experience(self):
        """(log-probs, values, advantages, returns) of the tokens of every answer.

        Advantages have a mean of 0 and a variance of 1 over all answers.
        """
        answers = []
        advantages_of_all = []
        for rollout in self.rollouts:
            log_probs = self.log_probs(self.policy, rollout).tolist()
            values = self.values(self.value, rollout).tolist()
            rewards = self.rewards(rollout, log_probs)
            next_values = [*values[1:], 0.0]
            advantages = [0.0] * len(log_probs)
            next_advantage = 0.0
            for t in reversed(range(len(log_probs))):
                error = rewards[t] + 0.9 * next_values[t] - values[t]
                advantages[t] = error + 0.9 * 0.8 * next_advantage
                next_advantage = advantages[t]
            returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
            answers.append((log_probs, values, advantages, returns))
            advantages_of_all += advantages
        mean = sum(advantages_of_all) / len(advantages_of_all)
        variance = sum((advantage - mean) ** 2 for advantage in advantages_of_all) / (len(advantages_of_all) - 1)
        experience = []
        for log_probs, values, advantages, returns in answers:
            whitened = [(advantage - mean) / math.sqrt(variance) for advantage in advantages]
            experience.append((log_probs, values, whitened, returns))
        return experience

    def step(self):
        """The weights after three passes over all answers."""
        experience = self.experience()
        count = sum(len(answer[0]) for answer in experience)
        parameters = [*self.policy.parameters(), *self.value.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)
        self.clipped = 0
        for _ in range(3):
            total = torch.zeros((), dtype=torch.float64)
            for rollout, (old, old_values, advantages, returns) in zip(self.rollouts, experience, strict=True):
                new = self.log_probs(self.policy, rollout)
                values = self.values(self.value, rollout)
                for t in range(len(old)):
                    ratio = (new[t] - old[t]).exp()
                    self.clipped += not 0.9 <= ratio <= 1.1
                    total = total - torch.min(ratio * advantages[t], ratio.clamp(0.9, 1.1) * advantages[t])
                    near_value = old_values[t] + (values[t] - old_values[t]).clamp(-0.05, 0.05)
                    error = torch.max((values[t] - returns[t]) ** 2, (near_value - returns[t]) ** 2)
                    total = total + 0.5 * 0.5 * error
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        for name, parameter in self.value.named_parameters():
            weights[f"value/{name}"] = parameter.detach()
        return weights


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with its models, the weights after a step, and the rewards of its answers."""
    folder = tmp_path_factory.mktemp("ppo")
    recipe = start(PPO, folder, train=False, **STEP, ref_policy_checkpointer=other_reference(folder)).recipe
    scored = recipe.sample(recipe.loader.peek(), 1)
    kinds = {rollout.finished: len(rollout.answer) for rollout in scored.rollouts}
    assert set(kinds) == {True, False}, "some answers end, others do not"
    reference = PlainPPO(folder, scored.rollouts)
    weights = reference.step()
    assert reference.clipped > 5
    return folder, weights, scored.rewards[:, 0].tolist()


@pytest.mark.parametrize(
    "split",
    [
        {},
        {"gradient_accumulation_steps": 3, "forward_batch_size": 2, "ppo_batch_size": 6},
        {"optimizer_in_bwd": True, "enable_activation_checkpointing": True},
    ],
)
def test_a_step_is_that_of_plain_code_however_work_is_split(split, plain):
    from safetensors.torch import load_file

    folder, weights, rewards = plain
    run = start(PPO, folder, **STEP, ref_policy_checkpointer=other_reference(folder), **split)
    lines = read_lines(run.output_dir / "rollouts.jsonl")
    assert [line["reward"] for line in lines] == pytest.approx(rewards, abs=1e-5)
    (saved,) = run.output_dir.glob("epoch_*")
    for prefix in ("", "value/"):  # the policy, and the value model in a folder of its own
        for key, value in load_file(saved / prefix / "model.safetensors").items():
            torch.testing.assert_close(value.double(), weights[f"{prefix}{key}"], atol=2e-5, rtol=0)


def test_a_resumed_run_samples_the_same_answers_and_trains_both_models_to_the_same_bits(tmp_path):
    settings = {"save_every_n_steps": 2, "batch_size": 6, "ppo_epochs": 2, "ppo_batch_size": 4, "dtype": "bf16"}
    uninterrupted = start(PPO, tmp_path, **settings)
    lines = (uninterrupted.output_dir / "rollouts.jsonl").read_text().splitlines(keepends=True)
    killed = {"rollouts.jsonl": "".join(lines[:16]) + lines[-1][:30]}  # in step 3
    output_dir = resume(PPO, tmp_path, uninterrupted, 2, killed, **settings).output_dir
    assert (output_dir / "rollouts.jsonl").read_text() == "".join(lines)
    assert {key.partition(".")[0] for key in uninterrupted.trained} == {"policy", "value"}
    write_checkpoint(tmp_path / "reward", seed=4, is_reward=True)
    (output_dir / "step_4" / ".complete").unlink()
    with pytest.raises(UserError, match=r"whose 'reward' model was .* and the weights in .* differ from it"):
        start(PPO, tmp_path, **settings, output_dir=output_dir, resume_from_checkpoint=True)


def test_scores_rise_and_values_explain_them(tmp_path):
    start(PPO, tmp_path, train=False)
    rows = ({"text": f"the {word} cat"} for word in ("red", "blue", "big", "small"))
    texts = str(write_lines(tmp_path / "texts.jsonl", rows))
    data = {"_component_": "torchtune.datasets.text_completion_dataset", "source": texts, "add_eos": False}
    settings = {"dataset": [data] * 8, "batch_size": 32, "epochs": 14, "penalise_no_eos": False, "ppo_epochs": 2}
    settings |= {"value_checkpointer": {**TEXT_SOURCE, "checkpoint_dir": str(tmp_path / "checkpoint")}}
    settings |= {"dataset_val": data, "run_val_every_n_steps": 14, "clip_grad_norm": 1.0, "max_generated_tokens": 6}
    run = start(PPO, tmp_path, **settings, loss__value_coeff=1.0, optimizer__lr=0.03)
    scores = run.figure("scores")
    explained = run.figure("value/explained_variance")
    assert sum(scores[-4:]) > sum(scores[:4]) + 2.0
    assert explained[-1] > explained[0] + 0.5
    assert max(run.figure("policy/sampler_difference")) < 1e-4
    assert abs(run.figure("kl")[0]) < 1e-3
    assert len(run.figure("val_rewards/total")) == 1
    with pytest.raises(UserError, match=r"prompt of row 0 ends with a token that ends answers: set dataset.add_eos"):
        start(PPO, tmp_path, dataset={**data, "add_eos": True}, train=False)


TEXT_SOURCE = {"_component_": "torchtune.training.FullModelHFCheckpointer"}


def test_a_score_is_read_where_the_reward_model_was_trained(tmp_path):
    """At the last token of the whole conversation, which the chat template puts behind the end of the answer."""
    from torchtune.data import Message

    recipe = start(PPO, tmp_path, train=False).recipe
    messages = [Message(role="user", content="the cat"), Message(role="assistant", content="sees")]
    conversation = torch.as_tensor(recipe.tokenizer({"messages": messages})["tokens"])
    end = int((conversation == 2).nonzero()[-1]) + 1
    assert end == len(conversation) - 1
    scores = {}
    for size in (1, 3):
        reward_model = RewardModel(recipe.reward_model.model, recipe.tokenizer, size)
        rollouts = [Rollout(conversation[: end - cut], end - 3, None, not cut) for cut in (0, 1, 0)]
        scores[size] = reward_model(rollouts)
    torch.testing.assert_close(scores[1], scores[3], atol=1e-6, rtol=0)

    def score_of(tokens):
        with torch.no_grad():
            return reward_model.model(tokens[None].to(recipe.device))[0, -1, 0].double().cpu()

    finished = score_of(conversation)
    cut = score_of(conversation[: end - 1])
    torch.testing.assert_close(scores[3], torch.stack([finished, cut, finished]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward_checkpointer": "checkpoint"}, "has no 'output.weight', which the 'reward' model needs"),
        ({"ref_policy_checkpointer": "larger"}, r"vocabulary|embed"),
        ({"loss__value_coeff": 0.0}, "value model would not be trained, since loss.value_coeff is 0.0"),
        ({"reward_and_value_model__num_classes": 2}, "the model ends in 2 outputs|score.weight"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.GRPOLoss"}}, "GRPOLoss does not train a value model"),
        ({"max_generated_tokens": 5000}, "prompt of row .* that is more than the model's 4096"),
        ({"top_k": 5}, "top_k.*ratios are taken of: set it to null"),
        ({"ppo_batch_size": 3}, "ppo_batch_size.*is 3, but a step has batch_size=2"),
        ({"batch_size": 3, "gradient_accumulation_steps": 2}, "is 2, which must divide ppo_batch_size=3"),
        ({"num_steps": 30}, "30 answers are requested, but the dataset has 24 prompts: set it to null and epochs=2"),
        ({"num_steps": 8, "epochs": 2}, "num_steps.*says how long the run is"),
    ],
)
def test_settings_that_do_not_fit_ppo_are_refused_in_one_sentence(change, words, tmp_path):
    for key, value in change.items():
        if isinstance(value, str):
            if value == "larger":
                write_checkpoint(tmp_path / value, vocab_size=400)
            change = {key: {**TEXT_SOURCE, "checkpoint_dir": str(tmp_path / value)}}
    with pytest.raises(UserError, match=f"(?s){words}"):
        start(PPO, tmp_path, train=False, **change)


def test_two_processes_train_as_one(forker, tmp_path):
    """With as many answers on both, with one more on the first, and with none on the second."""
    settings = {"clip_grad_norm": 1.0, "dataset__split": "train[:17]", "ppo_epochs": 2, "whiten_rewards": True}
    single_process = start(PPO, tmp_path, **settings, batch_size=8)
    run = forker.run_on_two(PPO, tmp_path, **settings, data_parallel_shard_dim=2, batch_size=4)
    assert len(run.losses) == 3
    for name in ("loss", "grad_norm", "scores", "kl", "policy_loss", "value_loss", "num_stop_tokens"):
        assert run.figure(name) == pytest.approx(single_process.figure(name), rel=1e-3, abs=1e-5), name


def test_two_processes_train_in_float16_as_one(forker, tmp_path):
    """Both skip the first update, which overflows, and do the second one with the same scale of the loss.

    One step of two updates: after it, rounding of weights may change a sampled token, and all that follows.
    """
    # Without eps, gradients that are rounding alone would decide the signs of updates.
    adam = {"_component_": "torch.optim.AdamW", "lr": 0.003, "eps": 1e-3}
    settings = {"dtype": "fp16", "optimizer": adam, "lr_scheduler": None, "clip_grad_norm": 1.0, "ppo_epochs": 2}
    settings |= {"max_steps_per_epoch": 1, "loss__value_coeff": 0.5}
    full_batch = start(PPO, tmp_path, **settings, batch_size=8)
    run = forker.run_on_two(PPO, tmp_path, **settings, data_parallel_shard_dim=2, batch_size=4)
    for name in ("loss", "grad_norm", "kl", "policy_loss", "value_loss"):
        assert run.figure(name) == pytest.approx(full_batch.figure(name), rel=2e-3, abs=5e-4), name
    for compared in (run, full_batch):
        (record,) = compared.lines("skipped_steps.jsonl")
        assert "overflows fp16; the loss scale is 32768" in record["reason"]


def test_adapters_of_a_policy_learn_and_all_weights_of_the_value_model(tmp_path):
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8}
    run = start(PPO, tmp_path, model_converters=[lora], batch_size=4, max_steps_per_epoch=3, save_every_n_steps=2)
    names = {name.rpartition(".")[0].rpartition(".")[2] for name in run.trained if name.startswith("policy")}
    assert names == {"lora_a", "lora_b"}
    assert (run.output_dir / "step_2" / "adapter_model.safetensors").is_file()
    assert list((run.output_dir / "step_2" / "value").glob("*.safetensors"))


def test_num_steps_counts_answers(tmp_path):
    assert start(PPO, tmp_path, num_steps=11, batch_size=4).recipe.global_step == 2
