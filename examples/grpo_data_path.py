"""The data path of GRPO without a language model: prompts, groups of answers, rewards, advantages per group.

A table of logits stands for the model: it answers a prompt with one of some words, and one of them is right. Each round asks for
several answers to some prompts, and writes them with their rewards and log-probabilities. The learner draws groups of answers to one
prompt each, compares the rewards within a group (Shao et al. 2024, "DeepSeekMath"), and clips the ratio of probabilities, as answers
of earlier rounds are drawn again (Li et al. 2025, "RePO").

    python examples/grpo_data_path.py --rounds 400
"""

import argparse
import logging

import torch
from torch.distributions import Categorical

from engram import LazyTensorStorage, PromptGroupSampler, ReplayBuffer

PROMPTS, WORDS = 64, 16
ASKED, ANSWERS = 8, 16  # prompts of a round, and answers to each
GROUPS, EACH = 8, 8  # of a batch
CLIP = 0.2


def answer(model, prompts):
    """Answers to prompts, and the logarithms of their probabilities."""
    policy = Categorical(logits=model[prompts])
    words = policy.sample()
    return words, policy.log_prob(words)


def advantages(rewards):
    """How much better each answer is than the others to its prompt: ``[groups, each]``."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def loss_of(model, batch):
    """The clipped surrogate of a batch that has one group after another."""
    policy = Categorical(logits=model[batch["prompt"]])
    ratio = (policy.log_prob(batch["answer"]) - batch["log_prob"]).exp()
    better = advantages(batch["reward"].reshape(-1, EACH)).flatten()
    return -torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--strategy", default="recency", choices=("random", "recency", "reward", "variance"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("engram").setLevel("WARNING")
    torch.manual_seed(options.seed)

    right = torch.randint(WORDS, (PROMPTS,))
    model = torch.zeros(PROMPTS, WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([model], lr=0.05)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(PROMPTS * ANSWERS * 2),
        sampler=PromptGroupSampler(
            num_groups=GROUPS, group_key="prompt", strategy=options.strategy, reward_key="reward"
        ),
        batch_size=GROUPS * EACH,
    )
    mixed = 0
    for turn in range(options.rounds):
        with torch.no_grad():
            prompts = torch.randperm(PROMPTS)[:ASKED].repeat_interleave(ANSWERS)
            words, log_prob = answer(model, prompts)
            reward = (words == right[prompts]).float()
        rb.extend({"prompt": prompts, "answer": words, "log_prob": log_prob, "reward": reward})
        batch = rb.sample()
        groups = batch["prompt"].reshape(GROUPS, EACH)
        mixed += int((groups != groups[:, :1]).any())
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if turn in (0, options.rounds - 1):
            chance = Categorical(logits=model.detach()).probs[torch.arange(PROMPTS), right].mean()
            print(f"round {turn + 1}: {rb.sampler.groups} prompts in {len(rb)} rows; right with {100 * chance:.0f} %")
    print(f"batches with a group of several prompts: {mixed}")


if __name__ == "__main__":
    main()
