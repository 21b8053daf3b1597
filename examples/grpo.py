"""GRPO with a tiny language model: generators write answers that grow, a learner draws complete groups, and both are killed on the way.

Each generator asks for several answers to a prompt. An answer grows token by token in the store, and becomes a row when it has its
reward. The learner draws groups of answers to one prompt, each group once, and compares the rewards within a group (Shao et al. 2024,
"DeepSeekMath"). One generator is killed amid an answer, and another one finishes what it left. Then the learner is killed, and goes on.
In the end no answer was lost or trained on twice.

    python examples/grpo.py --updates 60
"""

import argparse
import logging
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import nn

from engram import PromptGroupSampler, Ragged, ReplayBuffer

DIGITS, END, BEGIN = 8, 8, 9  # tokens: digits, the end of an answer, the beginning
LONGEST, ANSWERS, GROUPS = 12, 6, 4  # tokens of an answer, answers to a prompt, groups of a batch
CLIP = 0.2


class Model(nn.Module):
    """A language model of 10 tokens. A prompt is a digit; a good answer repeats it, and ends."""

    def __init__(self):
        super().__init__()
        self.tokens, self.prompts = nn.Embedding(10, 32), nn.Embedding(DIGITS, 32)
        self.gru, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 9)

    def forward(self, prompt, tokens, state=None):
        """Logits of the token behind each of the tokens ``[n, T]``."""
        state = self.prompts(prompt)[None] if state is None else state
        out, state = self.gru(self.tokens(tokens), state)
        return self.head(out), state


def reward_of(prompt, tokens):
    """The share of the answer that repeats the prompt; half of it where the answer does not end."""
    said = [token for token in tokens if token != END]
    right = sum(token == prompt for token in said) / max(len(said), 4)
    return right if tokens and tokens[-1] == END else right / 2


def new_buffer(folder):
    """The rows in a folder, and who draws them. The first process makes it."""
    sampler = PromptGroupSampler(
        samples_per_group=ANSWERS, group_key="group", max_uses=1, strategy=("random", "oldest")
    )
    fields = {"tokens": Ragged(torch.int32, max_length=LONGEST), "log_prob": Ragged(torch.float32, like="tokens")}
    more = {"sampler": sampler, "batch_size": GROUPS * ANSWERS}
    return ReplayBuffer.open_or_create(folder / "store", 40_000, ragged=fields, open_rows=64, layout="padded", **more)


@torch.no_grad()
def grow(row, model, prompt, die_at=None):
    """Continue an answer, from its last token on, until it ends; then seal it with its reward."""
    tokens = row.fields["tokens"].tolist() if row.lengths["tokens"] else []
    while len(tokens) < LONGEST and END not in tokens:
        logits, _ = model(torch.tensor([prompt]), torch.tensor([[BEGIN, *tokens]]))
        policy = torch.distributions.Categorical(logits=logits[0, -1])
        token = policy.sample()
        row.append(tokens=[int(token)], log_prob=[float(policy.log_prob(token))])
        tokens.append(int(token))
        if len(tokens) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    row.seal(reward=reward_of(prompt, tokens))


def generate(folder, seed, die_after=None):
    """Answer prompts with the newest weights, for ever. ``die_after``: groups, and then it is killed amid an answer."""
    torch.set_num_threads(1)  # as there are several processes
    torch.manual_seed(seed)
    model, version, rb, group = Model(), -1, new_buffer(folder), 0
    while not (folder / "over").exists():
        state = torch.load(folder / "weights.pt")
        if state["version"] != version:
            model.load_state_dict(state["model"])
            version = state["version"]
        for row in rb.unsealed():  # what a generator left that died
            if row.is_abandoned:
                prompt = int(row.fields["prompt"])
                print(f"an answer of {row.lengths['tokens']} tokens is finished by another generator", flush=True)
                grow(row.resume(), model, prompt)
        if group >= 4 * (version + 8):  # far ahead of the learner: more answers would be stale
            time.sleep(0.01)
            continue
        prompt, group = int(torch.randint(DIGITS, ())), group + 1
        for answer in range(ANSWERS):
            answer_id = seed * 1_000_000 + group * ANSWERS + answer
            fields = {"group": seed * 1_000_000 + group, "prompt": prompt, "answer": answer_id, "version": version}
            row = rb.open_row(fields, late={"reward": 0.0})
            grow(row, model, prompt, die_at=2 if group == die_after else None)
    rb.close()


def loss_of(model, batch):
    """The clipped surrogate of a batch that has one group after another."""
    tokens, mask = batch["tokens"].values.long(), batch["tokens"].mask
    before = torch.cat([torch.full((len(tokens), 1), BEGIN), tokens[:, :-1]], 1)
    logits, _ = model(batch["prompt"], before)
    now = torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    rewards = batch["reward"].reshape(GROUPS, ANSWERS)
    better = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    better, ratio = better.reshape(-1, 1), (now - batch["log_prob"].values).exp()
    surrogate = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
    return -(surrogate * mask).sum() / mask.sum()


def learn(folder, updates, die_after=None):
    """Train, and write down which answers were used."""
    torch.set_num_threads(1)
    state, rb = torch.load(folder / "weights.pt"), new_buffer(folder)
    model = Model()
    model.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with (folder / "used").open("a") as used:
        while state["version"] < updates:
            batch = rb.sample(timeout=600)
            pairs = zip(batch["answer"].tolist(), batch["reward"].tolist(), strict=True)
            used.write("".join(f"{answer} {reward}\n" for answer, reward in pairs))
            used.flush()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            state = {"version": state["version"] + 1, "model": model.state_dict()}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").rename(folder / "weights.pt")
            if state["version"] == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    (folder / "over").touch()
    rb.close()


def start(target, *args):
    process = mp.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    logging.getLogger("engram").setLevel("ERROR")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"version": 0, "model": Model().state_dict()}, folder / "weights.pt")
        first = start(generate, folder, 1, 5)
        first.join()
        print(f"the first generator was killed: {first.exitcode == -signal.SIGKILL}", flush=True)
        others = [start(generate, folder, seed) for seed in (2, 3)]
        learner = start(learn, folder, options.updates, options.updates // 2)
        learner.join()
        print(f"the learner was killed: {learner.exitcode == -signal.SIGKILL}", flush=True)
        learner = start(learn, folder, options.updates)
        for process in (learner, *others):
            process.join()
        used = [line.split() for line in (folder / "used").read_text().splitlines()]
        rewards = torch.tensor([float(reward) for _, reward in used]).reshape(-1, GROUPS * ANSWERS).mean(1)
        print(f"{len(used)} answers were trained on, {len(used) - len({answer for answer, _ in used})} of them twice")
        rb = new_buffer(folder)
        there = int((rb["answer"] < 2_000_000).sum())
        print(f"of {4 * ANSWERS + 1} answers of the first generator {there} are there")
        print(f"mean reward of the first batches: {rewards[:5].mean():.2f}, of the last: {rewards[-5:].mean():.2f}")


if __name__ == "__main__":
    main()
