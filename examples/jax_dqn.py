"""DQN in JAX, whose batches come from a replay buffer by DLPack, without a copy: CartPole.

Double DQN with returns of three steps (van Hasselt et al., 2016). JAX is all that it needs beside engram and Gymnasium; the optimizer is
Adam in four lines. With a folder, the replay goes on with the steps of the last start.
"""

import argparse
from itertools import pairwise

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from engram import LazyTensorStorage, NStep, RandomSampler, ReplayBuffer

SIZES = 4, 64, 64, 2
LEARNING_RATE, BATCH, GAMMA, N = 1e-3, 64, 0.98, 3


def network(seed):
    """Weights and biases of each layer."""
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    shapes = [*pairwise(SIZES)]
    return [
        (jax.random.normal(key, s) * (2 / s[0]) ** 0.5, jnp.zeros(s[1])) for key, s in zip(keys, shapes, strict=True)
    ]


def values(layers, observed):
    """What actions are worth."""
    *hidden, (weights, bias) = layers
    for w, b in hidden:
        observed = jax.nn.relu(observed @ w + b)
    return observed @ weights + bias


def loss(layers, target, batch):
    after = batch["next"]
    best = values(layers, after["observation"]).argmax(1)[:, None]
    worth = jnp.take_along_axis(values(target, after["observation"]), best, 1)[:, 0]
    going_on = batch["gamma"].ravel() * (1.0 - after["terminated"].ravel())
    goal = jax.lax.stop_gradient(after["reward"].ravel() + going_on * worth)
    taken = jnp.take_along_axis(values(layers, batch["observation"]), batch["action"].reshape(-1, 1), 1)[:, 0]
    return jnp.square(taken - goal).mean()


@jax.jit
def update(state, batch):
    """A step of Adam, and one of the target network towards the other."""
    layers, target, mean, square, count = state
    slope = jax.grad(loss)(layers, target, batch)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, slope)
    count += 1
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    layers = jax.tree.map(lambda x, m, s: x - rate * m / (jnp.sqrt(s) + 1e-8), layers, mean, square)
    target = jax.tree.map(lambda t, x: t + 0.01 * (x - t), target, layers)
    return layers, target, mean, square, count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where the replay is kept; default: in RAM")
    args = parser.parse_args()

    sampler = NStep(RandomSampler(), n=N, gamma=GAMMA)
    if args.folder:
        rb = ReplayBuffer.open_or_create(args.folder, 20_000, sampler=sampler, batch_size=BATCH)
    else:
        rb = ReplayBuffer(storage=LazyTensorStorage(20_000), sampler=sampler, batch_size=BATCH)
    print(f"{len(rb)} steps are there")
    if len(rb):
        rb.end_trajectory()  # the episode that was open when the last start ended
    env = rb.record(gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))
    layers, rng = network(args.seed), np.random.default_rng(args.seed)
    nothing = jax.tree.map(jnp.zeros_like, layers)
    state = layers, layers, nothing, nothing, 0
    act = jax.jit(lambda layers, observed: values(layers, observed).argmax())

    returns = []
    observed, _ = env.reset(seed=args.seed)
    for step in range(args.steps):
        if rng.random() < max(0.05, 1 - step / (args.steps / 4)):
            action = int(rng.integers(2))
        else:
            action = int(act(state[0], observed))
        observed, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            returns.append(float(info["episode"]["r"]))
            observed, _ = env.reset()
        if step >= args.warmup:
            # A batch is memory of its own, which nothing writes to later: JAX may take it as it is.
            batch = jax.tree.map(jax.dlpack.from_dlpack, rb.sample())
            state = update(state, batch)
    print(f"the first episodes: {np.mean(returns[:10]):.0f}, the last: {np.mean(returns[-10:]):.0f}")
    rb.close()


if __name__ == "__main__":
    main()
